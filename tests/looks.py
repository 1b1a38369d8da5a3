"""What a run of a family's model shows beside the unsplit model of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.testing.parity import Case, History, difference, reference, unsplit, whole_parameters, worst_difference
from atoll.testing.reference import forward
from tests.families import Family


@dataclass(frozen=True)
class Check:
    """A way to train a model. tolerance: of the comparison with the unsplit model."""

    case: Case
    tolerance: float = 1e-10


@dataclass
class Seen:
    """What a rank saw. first: initial values.  logits: of one sample, before the first step, on the last stage."""

    first: dict[str, Tensor]
    logits: Tensor | None
    history: History


def train_and_look(case: Case) -> Seen:
    engine = case.engine()
    history = History()
    first = whole_parameters(engine)
    logits = engine.logits(one_sample(case))

    def note() -> None:
        history.gradients = history.gradients or engine.full_gradients("*")

    for step in range(case.steps):
        result = engine.step(case.share(engine, step), before_update=note)
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.parameters = whole_parameters(engine)
    engine.close()
    return Seen(first, logits, history)


def train_each(cases: Sequence[Case]) -> list[Seen]:
    """Several runs, one after the other."""
    return [train_and_look(case) for case in cases]


def one_sample(case: Case) -> dict[str, Any]:
    """Tokens alone of a language model, else all that a batch has."""
    batch = case.model.batch(0, 1)
    return {"input_ids": batch["input_ids"]} if isinstance(case.model, Family) else batch


def problems_of(check: Check, ranks: Sequence[Seen]) -> Iterator[str]:
    """Loss, norm, gradients and parameters are those of the unsplit model of transformers, and so are logits."""
    wanted = reference(check.case)
    with torch.no_grad():
        logits = forward(unsplit(check.case).eval(), one_sample(check.case))
    for rank, seen in enumerate(ranks):
        worst, where = worst_difference(seen.history, wanted)
        if not worst <= check.tolerance:
            yield f"rank {rank} differs by {worst:.3g} at {where}"
        if seen.logits is not None and not difference(seen.logits, logits) <= check.tolerance:
            yield f"rank {rank} differs by {difference(seen.logits, logits):.3g} at its logits"
    if {seen.logits is None for seen in ranks} != {False, check.case.pipeline > 1}:
        yield "logits are not on the last stage alone"
    gradients = set().union(*(seen.history.gradients for seen in ranks))
    parameters = set().union(*(seen.history.parameters for seen in ranks))
    if not gradients >= set(wanted.gradients):
        yield f"no rank has the gradients of {sorted(set(wanted.gradients) - gradients)}"
    if parameters != set(wanted.parameters):
        yield f"other parameters: {sorted(parameters ^ set(wanted.parameters))}"
