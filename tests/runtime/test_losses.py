"""Losses that are not next-token prediction: any function of outputs and batch, nested batches, batches without labels.

Each is compared in float64 with one process, which divides by what the loss counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import Engine, Layout, MeshShape, Plan
from atoll.base.errors import AtollError, BadStepError, PlanError, RankError
from atoll.plans import schedules
from atoll.runtime.models import Loss
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity, difference, reference, train_case, unsplit
from atoll.testing.reference import History, forward, rows
from atoll.testing.tiny import TinyConfig

WIDTH, CLASSES = 6, 5


def draw(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 + step), dtype=torch.float64)


class Heads(nn.Module):
    """Several outputs of one hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = nn.Linear(WIDTH, CLASSES)
        self.value = nn.Linear(WIDTH, 2)

    def forward(self, hidden: Tensor) -> dict[str, Any]:
        return {"kind": self.kind(hidden), "rest": (self.value(hidden), hidden.mean(-1))}


@dataclass(frozen=True)
class Chain:
    """Blocks of linear layers, a last one, and what is made of its outputs."""

    last: Callable[[], nn.Module]
    engine_loss: Loss
    make: Callable[[int, int], dict[str, Any]]

    def build(self) -> nn.Module:
        body = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(*body, self.last())

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        return self.make(step, samples)

    @property
    def loss(self) -> Loss:
        return self.engine_loss


def to_classes() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


def squared(outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
    labels: Tensor = batch["labels"]
    return (outputs - labels).square().sum()


def values(step: int, samples: int) -> dict[str, Any]:
    return {"inputs": draw(step, samples, WIDTH), "labels": draw(step + 100, samples, CLASSES)}


def of_classes(outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"], reduction="sum")


def classes(step: int, samples: int) -> dict[str, Any]:
    labels = torch.arange(samples) * (step + 2) % CLASSES
    labels[1::5] = -100
    return {"inputs": draw(step, samples, WIDTH), "labels": labels}


WEIGHTS = torch.tensor([0.5, 1.0, 3.0, 0.25, 2.0], dtype=torch.float64)


def weighted(outputs: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """As `F.cross_entropy(..., weight=WEIGHTS)`, whose mean divides by the weights of the labels."""
    labels = batch["labels"]
    weights = torch.where(labels == -100, 0.0, WEIGHTS[labels.clamp(min=0)])
    return F.cross_entropy(outputs, labels, weight=WEIGHTS, reduction="sum"), weights.sum()


def contrastive(outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Each sample finds its pair among those of its microbatch."""
    one, other = F.normalize(outputs, dim=-1).chunk(2, dim=1)
    scores = one.squeeze(1) @ other.squeeze(1).T / 0.2
    return F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum")


def pairs(step: int, samples: int) -> dict[str, Any]:
    return {"inputs": draw(step, samples, 2, WIDTH)}


def several(outputs: Mapping[str, Any], batch: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Two of three outputs are used; one target in nine has no sample of its own."""
    kinds = F.cross_entropy(outputs["kind"], batch["labels"]["kind"], reduction="sum")
    found, _ = outputs["rest"]
    return kinds + (found - batch["labels"]["more"]["value"]).square().sum() / 7, 1.5 * len(found)


def of_several(step: int, samples: int) -> dict[str, Any]:
    labels = {"kind": torch.arange(samples) % CLASSES, "more": {"value": draw(step + 50, samples, 2)}}
    return {"inputs": draw(step, samples, WIDTH), "labels": labels}


TASKS = {
    "regression": Chain(to_classes, squared, values),
    "classification": Chain(to_classes, of_classes, classes),
    "weighted classes": Chain(to_classes, weighted, classes),
    "contrastive": Chain(to_classes, contrastive, pairs),
    "several heads": Chain(Heads, several, of_several),
}
FORMS: dict[str, dict[str, Any]] = {
    "pipeline and sharding": {"pipeline": 2, "intra": 2, "layout": "IIG", "schedule": "zb-h1"},
    "no clipping": {"pipeline": 2, "inter": 2, "layout": "NIG", "clip": None},
    "post-validated": {"pipeline": 2, "intra": 2, "layout": "IGG", "post_validation": True, "schedule": "zb-h1"},
    "post-validated, no clipping": {"pipeline": 2, "post_validation": True, "clip": None, "steps": 4},
    "recomputed": {"pipeline": 2, "intra": 2, "layout": "GGG", "recompute": "block"},
}


def case_of(task: str, **options: Any) -> Case:
    return Case(model=TASKS[task], microbatch=4, microbatches=4, **options)


@pytest.mark.wide(9)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", TASKS)
def test_a_loss_of_ones_own_is_that_of_one_process(task: str, form: str) -> None:
    assert_parity(case_of(task, **FORMS[form]))


@dataclass(frozen=True)
class OfWeights(TinyConfig):
    """The tiny decoder, whose later tokens count more."""

    @staticmethod
    def loss(outputs: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        weights = torch.linspace(0.1, 2.0, labels.shape[1], dtype=outputs.dtype).expand_as(labels) * (labels != -100)
        each = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        return (each * weights.flatten()).sum(), weights.sum()

    @property
    def engine_loss(self) -> Loss:
        return self.loss


@pytest.mark.slow
def test_outputs_of_a_tensor_parallel_group_are_whole() -> None:
    assert_parity(Case(model=OfWeights(), pipeline=2, tensor=2, layout="NNN"))


def look(case: Case) -> tuple[History, float, Any]:
    """Gradients before the update of the first step; the loss of an evaluation, and outputs, before it."""
    engine = case.engine()
    share = case.share(engine, 0)
    before = engine.evaluate(share).loss
    outputs = engine.logits(rows(share, 0, case.microbatch, "cpu"))
    history = History()
    engine.step(share, before_update=lambda: history.gradients.update(engine.full_gradients()))
    engine.close()
    return history, before, outputs


@pytest.mark.parametrize("task", ["weighted classes", "several heads"])
def test_gradients_evaluations_and_outputs(task: str) -> None:
    case = case_of(task, pipeline=2, intra=2, layout="IIG")
    wanted = reference(case)
    model = unsplit(case)
    share = rows(case.model.batch(0, case.samples), 0, case.microbatch, "cpu")
    with torch.no_grad():
        alone: Any = forward(model, share)
    seen = run_ranks(look, case.ranks, case)
    for history, before, _ in seen:
        assert abs(before - wanted.losses[0]) < 1e-12
        for name, value in history.gradients.items():
            assert difference(value, wanted.gradients[name]) < 1e-10, name
    outputs = seen[case.ranks // 2][2]
    if isinstance(alone, dict):
        assert difference(outputs["kind"], alone["kind"]) < 1e-12
        assert difference(outputs["rest"][0], alone["rest"][0]) < 1e-12
    else:
        assert difference(outputs, alone) < 1e-12


# ---- wrong beginnings


def engine_of(loss: Any, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)).double()
    plan = Plan(
        MeshShape(),
        Layout("NNN"),
        schedules.build("1f1b", ranks=1, microbatches=2),
        2,
        precision=case_of("regression").plan.precision,
    )
    return Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), loss=loss, **options)


def step_of(loss: Any, batch: Any) -> float:
    engine = engine_of(loss)
    try:
        return engine.step(batch).loss
    finally:
        engine.close()


WRONG_LOSSES = {
    "a mean of each sample": (lambda outputs, batch: outputs.mean(-1), r"sum of shape \(2,\).*add up"),
    "a number": (
        lambda outputs, batch: float(outputs.detach().sum()),
        "returned a float.*sum over what counts as a tensor",
    ),
    "a triple": (lambda outputs, batch: (outputs.sum(), 1, 2), "returned a tuple.*pair"),
    "counts of each sample": (lambda outputs, batch: (outputs.sum(), torch.ones(2)), r"count of shape \(2,\)"),
    "a count in words": (lambda outputs, batch: (outputs.sum(), "two"), "count of type str"),
}


@pytest.mark.parametrize("wrong", WRONG_LOSSES)
def test_a_loss_of_another_form_is_refused(wrong: str) -> None:
    loss, message = WRONG_LOSSES[wrong]
    with pytest.raises(AtollError, match=message):
        step_of(loss, values(0, 4))


def test_counts_for_some_microbatches_only_are_refused() -> None:
    calls: list[int] = []

    def moody(outputs: Tensor, batch: Mapping[str, Any]) -> Any:
        calls.append(1)
        return outputs.sum() if len(calls) % 2 else (outputs.sum(), 3)

    with pytest.raises(AtollError, match="a count for 1 of 2 microbatches"):
        step_of(moody, values(0, 4))


def test_a_step_in_which_nothing_counts_changes_nothing() -> None:
    engine = engine_of(lambda outputs, batch: (outputs.sum() * 0, 0))
    before = engine.state_dict()
    with pytest.raises(BadStepError):
        engine.step(values(0, 4))
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())  # type: ignore[arg-type]
    engine.close()


WRONG_BATCHES = {
    "a list": ([draw(0, 4, WIDTH)], "the batch is a list; give tensors by name"),
    "words": ({"inputs": ["a", "b"]}, "the batch's inputs is a list that cannot become a tensor"),
    "words within": ({"inputs": draw(0, 4, WIDTH), "more": {"who": "me"}}, "the batch's more.who is a str"),
    "a number": ({"inputs": draw(0, 4, WIDTH), "scale": 2.0}, "scale is a single number"),
    "numbers for names": ({0: draw(0, 4, WIDTH)}, "key 0 of type int"),
    "uneven": ({"inputs": draw(0, 4, WIDTH), "more": {"a": draw(0, 3)}}, r"'more.a': 3.*share is 4"),
    "nothing": ({}, "a batch without tensors"),
}


@pytest.mark.parametrize("wrong", WRONG_BATCHES)
def test_a_batch_of_another_form_is_refused(wrong: str) -> None:
    batch, message = WRONG_BATCHES[wrong]
    with pytest.raises(PlanError, match=message):
        step_of(contrastive, batch)


def test_labels_may_equal_the_input_where_the_loss_is_ones_own() -> None:
    """An autoencoder of tokens is no mistake."""
    ids = torch.arange(40).reshape(4, 10) % 7
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    plan = Plan(MeshShape(), Layout("NNN"), schedules.build("1f1b", ranks=1, microbatches=2), 2)

    def again(outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    engine = Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), loss=again)
    assert engine.step({"input_ids": ids, "labels": ids}).loss > 0
    engine.close()


@pytest.mark.slow
def test_a_split_vocabulary_has_a_loss_of_its_own() -> None:
    case = Case(model=OfWeights(), pipeline=2, vocabulary_parallel=True)
    with pytest.raises(RankError, match="another loss; leave one of them out"):
        run_ranks(train_case, 2, case)
