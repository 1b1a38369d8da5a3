"""Activations in host memory: the same result as without, what stays, and the bytes that are predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from atoll import Engine, Layout, MeshShape, Plan
from atoll.base.errors import PlanError, RunError
from atoll.base.units import format_bytes
from atoll.plans import schedules
from atoll.plans.host import HostState
from atoll.plans.layouts import EFFECTIVE, Footprint
from atoll.program import Kept
from atoll.program.host import IN, OUT
from atoll.runtime.pipeline import kept
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity
from atoll.testing.tiny import TinyConfig
from atoll.training.config import Config, from_dict
from atoll.training.setup.build import build_engine, build_model
from atoll.training.setup.prediction import predict_plan
from tests.hosts import PIPELINE, RECOMPUTE, SCHEDULES, assert_same_bits
from tests.mixtures import Mixture

ALL = HostState(activations=1.0)
EVERY = (ALL, HostState("update-on-device", activations=0.5), HostState("update-on-host", activations=1.0))


# ---- the same result


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_layout_equals_one_process(schedule: str) -> None:
    """With each recompute, and each kind of host memory beside."""
    for at, layout in enumerate(EFFECTIVE):
        given = {**PIPELINE, "schedule": schedule, "recompute": RECOMPUTE[at % 3], "host": EVERY[(at // 3) % 3]}
        assert_parity(Case(layout=layout.name, model=TinyConfig(layers=7), **given))


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(
    "model", [TinyConfig(layers=5, dropout=0.2), TinyConfig(layers=5, frozen=True, tied=True)], ids=str
)
def test_without_a_pipeline(model: TinyConfig, recompute: str) -> None:
    assert_parity(Case("GGG", intra=2, host=ALL, model=model, recompute=recompute))


@pytest.mark.wide(3)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("given", [{"recompute": each} for each in RECOMPUTE] + [{"compile": "block-eager"}], ids=str)
def test_the_bits_are_the_same(given: dict[str, str], schedule: str) -> None:
    case = Case(layout="IIG", model=TinyConfig(layers=6), schedule=schedule, precision="bf16", **given, **PIPELINE)
    assert_same_bits(case, ALL)


@pytest.mark.parametrize("given", [{"tensor": 2}, {"intra": 2, "expert": 2}], ids=str)
def test_what_waits_for_w_leaves_and_comes_back(given: dict[str, int]) -> None:
    """Inputs of linear layers, of stacks of experts, and gradients of their outputs, on the last rank of ZB-H1."""
    case = Case(
        "NNG", model=Mixture(layers=6), pipeline=2, schedule="zb-h1", microbatches=4, steps=2, host=ALL, **given
    )
    assert_parity(case)


def test_stages_have_shares_of_their_own() -> None:
    """Here and in the layers below: the same bits, and only the first of two stages copies anything."""
    case = Case(layout="NNG", model=TinyConfig(layers=6), recompute="none", **{**PIPELINE, "schedule": "1f1b"})
    assert_same_bits(case, HostState(activations=(1.0, 0.0)))
    with pytest.raises(PlanError, match=r"activations = \[1.0, 0.5, 0.0\], of 3 stages, and the schedule has 2; give"):
        replace(case, host=HostState(activations=(1.0, 0.5, 0.0))).plan  # noqa: B018


def test_an_embedding_whose_rows_are_split_is_not_run_again() -> None:
    """A hook around the block makes its output whole; the mask of a forward that is run again would stay."""
    given = {"pipeline": 2, "tensor": 2, "microbatches": 4, "recompute": "selective", "host": ALL}
    assert_parity(Case("NNN", model=Mixture(layers=3), steps=1, **given))


def test_a_step_that_is_begun_again_discards_what_has_left() -> None:
    """A post-validated step whose verdict refuses the one before: activations have left by then."""
    model = TinyConfig(layers=6)
    case = Case("NNG", pipeline=2, schedule="zb-h1", post_validation=True, clip=1e-3, host=ALL, model=model, steps=4)
    assert_parity(case)


# ---- what stays


class Remember(nn.Module):
    """Keeps its input, which is the output of the block before, for a later block, or what is computed in it."""

    def __init__(self, held: list[Tensor], what: str) -> None:
        super().__init__()
        self.held, self.what = held, what
        self.scale = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        inside = self.scale(hidden).tanh()
        self.held[:] = [hidden if self.what == "input" else inside]
        return hidden + inside.square()


class Recall(nn.Module):
    """Multiplies with what has been kept, so that its backward reads it."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self.held = held
        self.scale = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        kept = self.held.pop().detach()
        return hidden + self.scale(hidden) * kept


class Masked(nn.Module):
    """Saves a table that is not its own."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)
        self.up = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.up(hidden).sigmoid() * self.table


class Overwritten(nn.Module):
    """Changes what its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        made = self.up(hidden).exp()
        out = made * 2
        made.add_(1)
        return hidden + out


def chain(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    held: list[Tensor] = []
    plain = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]
    middle: list[nn.Module] = []
    if kind in ("input", "inside"):
        middle = [Remember(held, kind), plain[4], plain[5], Recall(held)]
    elif kind == "observed":
        middle = [Remember(held, "input"), plain[4]]
    elif kind == "table":
        table = torch.linspace(0.5, 1.5, 8)
        middle = [Masked(table), Masked(table)]
    elif kind == "overwritten":
        middle = [Overwritten()]
    return nn.Sequential(nn.Embedding(16, 8), *plain[:2], *middle, *plain[2:4], nn.Linear(8, 16))


def trained(
    kind: str, host: HostState | None, recompute: str = "none"
) -> tuple[dict[str, list[float]], int, list[tuple[int, int]]]:
    """The parameters after two steps, the bytes that left, and blocks with the number of storages that were freed."""
    plan = Plan(
        MeshShape(),
        Layout("NNN"),
        schedules.build("gpipe", ranks=1, microbatches=3),
        microbatch=2,
        recompute=recompute,
        host=host,
    )
    engine = Engine(chain(kind), plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    freed: list[tuple[int, int]] = []
    own = engine._executor.microbatches.kept

    def watch() -> None:
        assert own is not None
        away = ((block, each) for (_, block, _), each in own._now.items() if each.job is None)
        freed.extend((block, sum(piece.storage.nbytes() == 0 for piece in each.pieces)) for block, each in away)

    try:
        engine._executor.before = {Kept.ONLOAD_ACT: watch} if host else {}
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            ids = torch.randint(16, (6, 5), generator=generator)
            engine.step({"input_ids": ids, "labels": ids.roll(-1, dims=1)})
        return {name: value.tolist() for name, value in engine.state_dict().items()}, engine.transport.sent[OUT], freed
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["plain", "input", "inside", "table"])
def test_what_others_read_stays(kind: str) -> None:
    plain, none, _ = trained(kind, None)
    own, gone, freed = trained(kind, ALL)
    assert own == plain
    assert gone > 0 == none
    assert any(count for _, count in freed)


def test_an_input_stays_only_where_somebody_has_it() -> None:
    """What a block is run again with is its input alone. That of `Remember` may be read at any time."""
    plain, _, _ = trained("observed", None, "block")
    own, _, freed = trained("observed", ALL, "block")
    assert own == plain
    blocks = {block: count for block, count in freed if block > 0}
    assert blocks.pop(3) == 0
    assert len(blocks) > 4
    assert set(blocks.values()) == {1}


def test_a_tensor_that_is_changed_after_it_was_saved_is_an_error() -> None:
    with pytest.raises(Exception, match="modified by an inplace operation"):
        trained("overwritten", None)
    with pytest.raises(RunError, match="was modified in place after it was saved"):
        trained("overwritten", ALL)


def test_an_evaluation_between_steps_changes_nothing() -> None:
    plan = Plan(MeshShape(), Layout("NNN"), schedules.build("1f1b", ranks=1, microbatches=3), microbatch=2, host=ALL)
    engine = Engine(chain("plain"), plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    ids = torch.arange(30).view(6, 5) % 16
    batch = {"input_ids": ids, "labels": ids.roll(-1, dims=1)}
    engine.step(batch)
    gone = engine.transport.sent[OUT]
    engine.evaluate(batch)
    assert engine.transport.sent[OUT] == gone
    engine.step(batch)
    assert engine.transport.sent[OUT] == 2 * gone
    engine.close()


def test_host_memory_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("cannot allocate")

    monkeypatch.setattr(kept, "host_zeros", fails)
    with pytest.raises(RunError, match=r"for the activations of a block.*parallel.host.activations.*cannot allocate"):
        trained("plain", ALL)


def test_compiled_blocks_with_selective_recompute_are_refused() -> None:
    with pytest.raises(PlanError, match="what a compiled block keeps then is not seen"):
        Case("NNN", host=ALL, recompute="selective", compile="block").plan  # noqa: B018


@pytest.mark.parametrize("activations", [-0.1, 1.5, (0.5, 1.5), ()])
def test_a_share_is_from_0_to_1(activations: float | tuple[float, ...]) -> None:
    with pytest.raises(PlanError, match="a share from 0 to 1"):
        HostState("update-on-host", activations=activations)


# ---- bytes


def decoder(recompute: str, schedule: str, share: float | list[float]) -> Config:
    given = {
        "model": {"layers": 6, "hidden": 32, "heads": 4, "vocabulary": 64, "config": {"tie_embeddings": False}},
        "data": {"sequence": 16},
        "train": {"global_batch": 8, "microbatch": 1, "precision": "bf16"},
        "parallel": {
            "device": "cpu",
            "pipeline": 2,
            "schedule": schedule,
            "recompute": recompute,
            "host": {"activations": share},
        },
    }
    return from_dict(given)


def moved(config: Config) -> tuple[int, int, int, int]:
    """Bytes out and in within a step, those of host memory, and the pipeline rank."""
    engine = build_engine(build_model(config, 64), config.to_plan(2), config, torch.device("cpu"))
    ids = torch.arange(8 * 17).view(8, 17) % 64
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    engine.step(batch)
    before = engine.transport.sent.copy()
    engine.step(batch)
    own = engine._executor.microbatches.kept
    assert own is not None
    found = engine.transport.sent[OUT] - before[OUT], engine.transport.sent[IN] - before[IN], own.nbytes
    assert engine.memory().host == engine.footprint().host == own.nbytes
    place = engine.place.pp
    engine.close()
    return *found, place


@pytest.mark.wide(5)
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize(
    ("recompute", "schedule"),
    [("none", "1f1b"), ("block", "zb-v"), ("selective", "gpipe"), ("none", "zb-h1"), ("selective", "zb-h1")],
)
def test_bytes_on_the_link_and_in_host_memory_are_predicted(recompute: str, schedule: str, share: float) -> None:
    config = decoder(recompute, schedule, share)
    prediction = predict_plan(config, config.to_plan(2), None, reads_in_place=True)
    for out, back, there, rank in run_ranks(moved, 2, config):
        program = prediction.ranks.programs.ranks[rank]
        assert out == back == program.sent[OUT] == program.sent[IN] > 0
        assert 0 <= there - prediction.on_host(rank) < 0.02 * there  # and places at multiples of 64 bytes


def test_bytes_of_shares_of_stages_are_predicted() -> None:
    config = decoder("none", "1f1b", [1.0, 0.0])
    prediction = predict_plan(config, config.to_plan(2), None, reads_in_place=True)
    (out, back, there, _), none = run_ranks(moved, 2, config)
    assert none == (0, 0, 0, 1)
    assert prediction.away(1) == 0
    assert out == back == prediction.ranks.programs.ranks[0].sent[OUT] > 0
    assert 0 <= there - prediction.away(0) < 0.02 * there


def refused(config: Config, limit: int) -> tuple[Footprint, str]:
    """The footprint of an engine before its first step, and the words that refuse one on a machine of `limit` bytes."""
    model, plan = partial(build_model, config, 64), config.to_plan(2)
    with patch("atoll.runtime.assemble.rank.free_memory", lambda: limit):
        engine = build_engine(model(), plan, config, torch.device("cpu"))
        found = engine.footprint()
        engine.close()
    with patch("atoll.runtime.assemble.rank.free_memory", lambda: limit - 1):
        try:
            build_engine(model(), plan, config, torch.device("cpu"))
        except PlanError as error:
            return found, str(error)
    return found, ""


def test_a_machine_with_less_than_all_of_its_ranks_need_is_said_before_the_first_step() -> None:
    """Each rank alone has enough."""
    config = decoder("none", "1f1b", 1.0)
    prediction = predict_plan(config, config.to_plan(2), None)
    needs = [prediction.away(rank) for rank in range(2)]
    assert 0 < needs[1] < needs[0]
    found = run_ranks(refused, 2, config, sum(needs))
    assert [each.host for each, _ in found] == needs
    (words,) = {words for _, words in found}
    assert "the machine of rank 0, or the limit of its control group, has" in words
    assert (
        f"its ranks (2, rank 0 the most) still need {format_bytes(sum(needs))} of it, {format_bytes(sum(needs))} for"
        in words
    )


def test_bytes_that_nothing_predicts_are_checked_in_the_first_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def left() -> int:
        begun.append(1)
        return 2048

    monkeypatch.setattr(kept, "free_memory", left)
    with pytest.raises(
        RunError, match=r"this rank needs .* for activations, of which it has .* 2 KiB left; use a smal"
    ):
        trained("plain", ALL)
    assert 1 < len(begun) < 10  # blocks: not all of the first microbatch


def test_bytes_for_other_numbers_of_ranks_are_refused() -> None:
    plan = Plan(MeshShape(), Layout("NNN"), schedules.build("gpipe", ranks=1, microbatches=3), microbatch=2, host=ALL)
    with pytest.raises(PlanError, match=r"away = \(1, 2\); a number of bytes for each of 1 pipeline ranks"):
        Engine(chain("plain"), plan, optimizer=torch.optim.SGD, away=(1, 2))
