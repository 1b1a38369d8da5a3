"""Balance of experts: selection biases and losses of routers give one process's result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.base.errors import PlanError, RankError
from atoll.plans.outer import Outer
from atoll.runtime.models import Decoder, DecoderConfig, MixtureConfig
from atoll.runtime.models import mixture as built_in
from atoll.runtime.pipeline.routing import Balance, ExpertWork, Routers
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity, biases_of, reference, results, train_case, worst_difference
from atoll.testing.reference import History, Routed
from atoll.testing.tiny import TinyConfig
from tests.families import Family

MIXTURE = MixtureConfig(
    experts=4, experts_per_token=2, expert_ffn=8, dense_layers=1, scoring="sigmoid", selection_bias=True
)
BALANCE = Balance(bias_rate=2**-7, sequence_loss=0.01, z_loss=0.02)


@dataclass(frozen=True)
class Mixture:
    """The built-in decoder with a mixture. bad: the step whose loss is not finite."""

    config: MixtureConfig = MIXTURE
    bad: int | None = None

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        scale = float("nan") if bool((batch["labels"] == 18).all(-1).any()) else 1.0
        return scale * F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    @property
    def engine_loss(self) -> Any:
        return None if self.bad is None else self.loss

    def build(self) -> Decoder:
        sizes = {"vocabulary": 19, "layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24}
        return Decoder(DecoderConfig(**sizes, mixture=self.config))

    def batch(self, step: int, samples: int) -> dict[str, Tensor]:
        batch = TinyConfig(vocabulary=19).batch(step, samples)
        if step == self.bad:
            batch["labels"][-1] = 18
        return batch

    def initialise(self, name: str, module: nn.Module) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                residual = key == "down_proj" or name.endswith((".attention.output", ".down"))
                parameter.normal_(std=0.02 / 8**0.5 if residual else 0.02)

    def routing(self, module: nn.Module, output: Any) -> Routed | None:
        if not isinstance(module, built_in.Router):
            return None
        return Routed(output.top_k_index, output.scores, output.logits, module.selection_bias)


@dataclass(frozen=True)
class OfTransformers:
    """A mixture of transformers."""

    name: str = "deepseek_v3"

    def build(self) -> nn.Module:
        return Family(self.name).build()

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        return Family(self.name).batch(step, samples)

    def routing(self, module: nn.Module, output: Any) -> Routed | None:
        if not type(module).__name__.endswith(("TopkRouter", "TopKRouter")):
            return None
        logits, index = output[0].double(), output[2]  # once, as its gradient is rounded where it is fp32 again
        scores = logits.sigmoid() if "Deepseek" in type(module).__name__ else logits.softmax(-1)
        return Routed(index, scores, logits, getattr(module, "e_score_correction_bias", None))


CASE = Case(microbatches=4, microbatch=2, clip=None, balance=BALANCE, model=Mixture())
PLANS = [
    {},
    {"layout": "GGG", "intra": 2, "expert": 2, "recompute": "block"},
    {"layout": "NNG", "intra": 2, "pipeline": 2, "expert": 2, "recompute": "selective", "clip": 0.05},
    {"layout": "IIG", "inter": 2, "pipeline": 2, "schedule": "zb-v"},
    {"tensor": 2, "intra": 2, "expert": 2, "recompute": "block"},
    {"pipeline": 2, "schedule": "zb-h1", "post_validation": True},
]


@pytest.mark.wide(1)
@pytest.mark.parametrize("model", [Mixture(), OfTransformers()], ids=["built-in", "deepseek_v3"])
@pytest.mark.parametrize("options", PLANS, ids=lambda options: "-".join(map(str, options.values())) or "one rank")
def test_equal_to_one_process(model: Any, options: Mapping[str, Any]) -> None:
    assert_parity(replace(CASE, model=model, **options))


@pytest.mark.slow
def test_parts_of_a_sequence_count_as_one() -> None:
    assert_parity(replace(CASE, tensor=2, sequence_parallel=True, intra=2, expert=2))


def test_a_router_without_a_bias_has_losses() -> None:
    balance = replace(BALANCE, bias_rate=0.0)
    assert_parity(replace(CASE, model=OfTransformers("qwen3_moe"), balance=balance, intra=2, expert=2))


@pytest.mark.parametrize("options", [{}, {"pipeline": 2}, {"pipeline": 2, "post_validation": True}])
def test_a_step_that_is_not_taken_leaves_biases(options: Mapping[str, Any]) -> None:
    """And what is skipped ahead of its verdict, and the forwards that followed it, are taken back."""
    case = replace(
        CASE, steps=4, bad_steps="skip", balance=replace(BALANCE, z_loss=0.0), model=Mixture(bad=2), **options
    )
    wanted = reference(replace(case, pipeline=1, post_validation=False))
    for history in run_ranks(train_case, case.ranks, case):
        of_state = History(parameters=history.parameters, biases=history.biases)
        assert worst_difference(of_state, replace(wanted, losses=[], norms=[]))[0] <= 1e-10
    assert [math.isfinite(loss) for loss in wanted.losses] == [True, True, False, True]


def _biases_after(case: Case, folder: Path, first: int) -> dict[str, Tensor]:
    engine = case.engine()
    if first:
        engine.load(folder)
    list(results(case, engine, first))
    if not first:
        engine.evaluate(case.share(engine, 0))
        engine.save(folder)
    found = biases_of(engine)
    engine.close()
    return found


@pytest.mark.slow
def test_a_run_goes_on_with_the_biases_on_other_ranks(tmp_path: Path) -> None:
    halves = replace(CASE, intra=2, expert=2), replace(CASE, intra=4, expert=4, layout="GGG", steps=5)
    before = run_ranks(_biases_after, 2, replace(halves[0], steps=3), tmp_path, 0)
    after = run_ranks(_biases_after, 4, halves[1], tmp_path, 3)
    wanted = reference(replace(CASE, steps=5)).biases
    assert all(each.keys() == wanted.keys() for each in (*before, *after))
    assert all(torch.equal(each[name].double(), value) for each in after for name, value in wanted.items())
    assert any(bool(value.any()) for value in wanted.values())


@pytest.mark.parametrize(
    ("model", "balance", "words"),
    [
        (TinyConfig(), BALANCE, "no router of experts"),
        (Mixture(replace(MIXTURE, selection_bias=False)), BALANCE, "layers.1.feed_forward.router .Router. has none"),
        (OfTransformers("phimoe"), replace(BALANCE, bias_rate=0.0), "PhimoeTopKRouter. gets no losses"),
    ],
)
def test_what_cannot_be_balanced_is_refused(model: Any, balance: Balance, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        replace(CASE, model=model, balance=balance).engine()


def test_values_below_0_are_refused() -> None:
    with pytest.raises(PlanError, match="bias_rate = -1, z_loss = nan"):
        Balance(bias_rate=-1, z_loss=float("nan"))


def test_islands_have_no_biases_of_their_own() -> None:
    plan = replace(CASE, inter=2, outer=Outer(every=2)).plan
    with pytest.raises(PlanError, match="drift apart"):
        Routers.of(BALANCE, plan, plan.mesh.place(0))


def test_without_balance_nothing_is_watched() -> None:
    engine = replace(CASE, balance=None).engine()
    routers = [module for module in engine.model.modules() if isinstance(module, built_in.Router)]
    assert routers
    assert not any("forward" in vars(router) for router in routers)
    engine.close()


DIVIDED = Case(intra=2, sequence=2, microbatches=4, steps=3, model=Mixture(), balance=BALANCE)


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        DIVIDED,
        replace(DIVIDED, microbatch=2, recompute="block", layout="IIG"),
        replace(DIVIDED, intra=4, expert=4),
        replace(DIVIDED, tensor=2, expert=2),
        replace(DIVIDED, pipeline=2, schedule="zb-h1", post_validation=True),
    ],
    ids=["alone", "recompute", "experts", "tensor", "pipeline"],
)
def test_losses_of_routers_are_of_whole_sequences_where_ranks_divide_them(case: Case) -> None:
    assert_parity(case)


def test_padding_of_divided_sequences_is_refused_where_it_would_count() -> None:
    """Six tokens, which four ranks cannot divide."""
    with pytest.raises(RankError, match="padding would be routed to experts"):
        assert_parity(replace(DIVIDED, intra=4, sequence=4))


def test_every_program_counts_its_own_rows() -> None:
    work = ExpertWork(torch.device("cpu"))
    with work.exchanging():
        work.rows += 12
    assert (work.rows, work.seconds > 0) == (12, True)
    work.begin()
    assert (work.rows, work.seconds) == (0, 0.0)
