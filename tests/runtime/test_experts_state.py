"""State of experts that ranks divide: whole matrices, checkpoints, access, bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from atoll.base.errors import ReplicaError
from atoll.base.faults import BadStepPolicy
from atoll.plans.layouts import EFFECTIVE, Codec, Codecs
from atoll.plans.outer import Outer
from atoll.plans.plan import View
from atoll.prediction.cost import Ranks, Transformer, Use
from atoll.runtime.assemble.describe import describe_rank
from atoll.runtime.experts.grouped import GroupedWeight
from atoll.runtime.experts.kinds import stacked_in
from atoll.runtime.models import adapter_for
from atoll.runtime.outline import Outline
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_checkpoint_parity, assert_parity, difference, whole_parameters
from tests.drawn import drawn
from tests.mixtures import MIXTURE, Mixture
from tests.runtime.test_experts import PAIR
from tests.runtime.test_matrix_updates import Matrices, Reference, step_of_dion, step_of_shampoo

# ---- each expert is a matrix

ADAMW = ("adamw", (("lr", 3e-3), ("betas", (0.8, 0.95))))


MUON = replace(
    PAIR, optimizer="Muon", model=Mixture(), options=(ADAMW, ("split", (("*.gate_up_proj", 2),))), layout="IIG"
)


DIVIDED: dict[str, dict[str, Any]] = {
    "two ranks share an expert": {"layout": "III", "intra": 4},
    "two groups and a pipeline": {"layout": "GGG", "inter": 2, "pipeline": 2, "schedule": "zb-v"},
    "not divided": {"expert": 1, "post_validation": True, "clip": None, "steps": 3},
    "tensor-parallel ranks alone": {"intra": 1, "expert": 1, "tensor": 2},
    "tensor-parallel ranks too": {"tensor": 2},
    "another layout": {"layout": "NNG", "expert_layout": "III", "intra": 4, "post_validation": True},
}


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", DIVIDED)
def test_each_expert_is_orthogonalized_by_itself(name: str) -> None:
    assert_parity(replace(MUON, **DIVIDED[name]))


def each(step: Callable[[Tensor, dict[str, Any]], Tensor]) -> Callable[[Tensor, dict[str, Any]], Tensor]:
    """The same for stacked matrices, each with a state of its own."""

    def of_stack(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if gradient.dim() == 2:
            return step(gradient, state)
        own = state.setdefault("of", [{} for _ in gradient])
        state.setdefault("momentum", torch.zeros_like(gradient))
        for at, one in enumerate(own):
            one.setdefault("momentum", torch.zeros_like(gradient[at]))
        return torch.stack([step(one, kept) for one, kept in zip(gradient, own, strict=True)])

    return of_stack


@dataclass(frozen=True)
class Stacked(Matrices):
    """Optimizers that keep state of whole matrices."""

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Reference(groups, self.lr, each({"Shampoo": step_of_shampoo, "Dion": step_of_dion}[self.optimizer]))


KEPT = Stacked(intra=2, expert=2, microbatches=4, model=Mixture(), layout="IIG", steps=2)


OTHERS: dict[str, dict[str, Any]] = {
    "one rank": {"layout": "NNN", "intra": 1, "expert": 1},
    "four expert ranks": {"layout": "III", "intra": 4, "expert": 4},
    "tensor-parallel ranks": {"layout": "GGG", "intra": 1, "expert": 1, "tensor": 2},
}


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "name"), drawn(3, ["Shampoo", "Dion"], [*OTHERS]))
def test_state_of_a_matrix_is_found_under_another_division(optimizer: str, name: str, tmp_path: Path) -> None:
    first = replace(KEPT, optimizer=optimizer)
    second = replace(first, **OTHERS[name])
    assert_checkpoint_parity(first, second, tmp_path / "there")
    assert_checkpoint_parity(second, first, tmp_path / "back")


# ---- checkpoints

FOUR = replace(PAIR, layout="IIG", intra=4)


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [*OTHERS.values(), {"layout": "GGG", "intra": 2, "pipeline": 2, "schedule": "zb-v"}, {"expert": 1}],
    ids=[*OTHERS, "a pipeline", "experts whole"],
)
def test_a_checkpoint_continues_with_another_division(other: dict[str, Any], tmp_path: Path) -> None:
    assert_checkpoint_parity(FOUR, replace(FOUR, **other), tmp_path / "there")
    assert_checkpoint_parity(replace(FOUR, **other), FOUR, tmp_path / "back")


def saved(case: Case, folder: Path, loaded: Path | None = None) -> None:
    engine = case.engine()
    if loaded is None:
        for step in range(2):
            engine.step(case.share(engine, step))
    else:
        engine.load(loaded)
    engine.save(folder)
    engine.check_replicas()
    engine.close()


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("other", [{"expert": 1}, {"intra": 4, "expert": 4}], ids=str)
def test_another_division_saves_the_same_bits(other: dict[str, Any], tmp_path: Path) -> None:
    """Masters, states, and what codecs keep."""
    case = replace(PAIR, layout="IIG", inter=2, microbatches=8, codecs=CODECS)
    run_ranks(saved, case.ranks, case, tmp_path / "first")
    run_ranks(saved, replace(case, **other).ranks, replace(case, **other), tmp_path / "second", tmp_path / "first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folders = tmp_path / "first", tmp_path / "second"
        first, second = (flattened(_load_state_dict_from_keys(checkpoint_id=each)) for each in folders)
    assert first.keys() == second.keys()
    assert any(name.startswith("codec.residual") and "experts" in name for name in first)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


# ---- what crosses between groups, and between islands

CODECS = Codecs(Codec("int8", 8, "stochastic"), Codec("int4", 8))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "intra"), [("IIG", 2), ("GGG", 4)])
def test_codecs_along_inter(layout: str, intra: int) -> None:
    """Ranks with other experts draw other random numbers for a message of the same unit."""
    assert_parity(replace(PAIR, layout=layout, inter=2, intra=intra, microbatches=8, codecs=CODECS))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("codec", [None, Codec("int4", 8, "stochastic")])
def test_islands(codec: Codec | None) -> None:
    outer = Outer(2, fragments=2, delay=1, codec=codec)
    assert_parity(replace(PAIR, layout="IIG", inter=2, intra=4, microbatches=8, outer=outer, steps=5))


# ---- access


def accessed(case: Case) -> dict[str, dict[str, Tensor]]:
    """Gradients of a step, parameters behind it, and those after another one that follows an edit of the experts."""
    engine = case.engine()
    found: dict[str, dict[str, Tensor]] = {}
    engine.step(case.share(engine, 0), before_update=lambda: found.update(gradients=engine.full_gradients()))
    with engine.full_parameters("*.experts.*") as values:
        for value in values.values():
            value.mul_(0.5)
    found["edited"] = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.step(case.share(engine, 1))
    found["after"] = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return found


@pytest.mark.wide(1)
@pytest.mark.parametrize("spread", [{}, {"intra": 4, "layout": "GGG"}, {"tensor": 2, "layout": "NNG"}], ids=str)
def test_parameters_and_gradients_are_read_and_edited_whole(spread: dict[str, Any]) -> None:
    case = replace(PAIR, layout="IIG", intra=1, expert=1)
    (wanted,) = run_ranks(accessed, 1, case)
    divided = replace(case, **{"intra": 2, "expert": 2, **spread})
    for found in run_ranks(accessed, divided.ranks, divided):
        for what, values in found.items():
            assert values.keys() == wanted[what].keys()
            assert all(difference(value, wanted[what][name]) <= 1e-10 for name, value in values.items())


def flipped(case: Case, rank: int) -> str:
    """Flip the lowest bit of an expert's last element on a rank; what the comparison says."""
    engine = case.engine()
    try:
        engine.step(case.share(engine, 0))
        engine.check_replicas()
        if engine.place.rank == rank:
            own = next(unit for unit in engine.units if unit.spec.view is View.EXPERTS)
            master = own.segments[0].shards.master
            assert master is not None
            master.view(torch.uint8)[-master.itemsize] ^= 1
        engine.check_replicas()
    except ReplicaError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize("spread", [{"inter": 2}, {"intra": 4}], ids=str)
def test_a_flipped_bit_of_an_expert_is_found_by_the_rank_that_shares_it(spread: dict[str, Any]) -> None:
    for said in run_ranks(flipped, 4, replace(PAIR, layout="NNN", **spread), 1):
        assert "ranks 1, 3 hold different master weights of experts of layers.1" in said


def spoilt(case: Case) -> list[bool]:
    """Whether each step was skipped: in the second, rank 1 alone gets NaN for the gradient of its experts."""
    engine = case.engine()
    engine.bad_steps.policy = BadStepPolicy.parse("skip")
    collect, found = GroupedWeight.collect, []

    def spoil(layer: GroupedWeight, rows: Tensor, gradient: Tensor, counts: Any) -> None:
        collect(layer, rows, gradient * (torch.nan if engine.place.rank == 1 else 1.0), counts)

    for step in range(3):
        with patch.object(GroupedWeight, "collect", spoil if step == 1 else collect):
            result = engine.step(case.share(engine, step))
        found.append(result.skipped)
    engine.check_replicas()
    assert all(value.isfinite().all() for value in whole_parameters(engine).values())
    engine.close()
    return found


@pytest.mark.wide(1)
@pytest.mark.parametrize("post_validation", [False, True])
def test_a_step_with_a_bad_expert_is_skipped_by_all(post_validation: bool) -> None:
    case = replace(PAIR, layout="IIG", inter=2, post_validation=post_validation, clip=None)
    assert run_ranks(spoilt, 4, case) == [[False, True, False]] * 4


def overflowed(case: Case) -> list[bool]:
    """Whether each step was skipped: in the second, the output of one expert is too large for fp16."""
    engine, name = case.engine(), "layers.1.feed_forward.experts.down_proj"
    found = []
    for step in range(case.steps):
        scale = 1e5 if step == 1 else 1.0
        with engine.full_parameters(name) as values:
            values[name][5].mul_(scale)
        found.append(engine.step(case.share(engine, step)).skipped)
        with engine.full_parameters(name) as values:
            values[name][5].div_(scale)
    engine.check_replicas()
    engine.close()
    return found


@pytest.mark.slow
def test_an_expert_that_overflows_in_fp16_skips_the_step() -> None:
    case = replace(PAIR, layout="IIG", tensor=2, precision="fp16", steps=4, lr=1e-3)
    for skipped in run_ranks(overflowed, 4, case):
        assert skipped == [False, True, False, False]


# ---- bytes


def counted(case: Case) -> tuple[Any, ...]:
    """Bytes held within a step and behind it, and sent in one, each as measured and as said."""
    engine = case.engine()
    inside: list[Any] = []
    engine.step(case.share(engine, 0), before_update=lambda: inside.append(engine.memory()))
    for unit in engine.units:
        unit.wait_for_parameters()
    before = dict(engine.transport.sent)
    engine.step(case.share(engine, 1))
    engine.close()
    sent = {axis: engine.transport.sent[axis] - before.get(axis, 0) for axis in ("inter", "intra")}
    said = {axis: engine.program.sent.get(axis, 0) for axis in sent}
    exchanged = engine.transport.sent["expert"] - before.get("expert", 0)
    shape = engine.program.shape
    return (engine.memory(), inside[0], sent), (shape.at_rest, shape.footprint(states=0), said), exchanged


@pytest.mark.wide(3)
@pytest.mark.parametrize(
    ("layout", "spread", "optimizer"),
    [
        *((*each, "AdamW") for each in drawn(14, [layout.name for layout in EFFECTIVE], [{"inter": 2}, {"intra": 4}])),
        ("IIG", {"inter": 2}, "Muon"),
        ("NII", {"intra": 4}, "Muon"),
    ],
    ids=str,
)
def test_bytes_held_and_sent_are_those_of_the_program(layout: str, spread: dict[str, int], optimizer: str) -> None:
    case = replace(PAIR if optimizer == "AdamW" else MUON, layout=layout, precision="bf16", **spread)
    for measured, said, _ in run_ranks(counted, 4, case):
        if optimizer == "Muon":  # which has state of one kind for matrices
            measured, said = measured[::2], said[::2]
        assert measured == said


SPREADS: list[dict[str, Any]] = [
    {"intra": 2, "expert": 1},
    {"intra": 2},
    {"intra": 4},
    {"inter": 2},
    {"intra": 4, "expert_layout": "NNG"},
]


@pytest.mark.wide(2)
@pytest.mark.parametrize(("layout", "spread"), drawn(10, ["NNN", "NNG", "NII", "III", "GGG"], SPREADS), ids=str)
def test_bytes_of_muon_are_predicted(layout: str, spread: dict[str, Any]) -> None:
    """By the formulas, without the model: at rest and sent, to the byte."""
    case = replace(MUON, layout=layout, precision="bf16", options=(ADAMW,), **spread)
    plan = replace(case.plan, whole=case.optimizer_of_engine().whole)
    use = Use(samples=1, sequence=8, expert=case.expert, compute="bfloat16")
    workload = Transformer.decoder(
        layers=4, hidden=16, heads=4, kv_heads=2, ffn=24, vocabulary=19, mixture=MIXTURE
    ).workload
    predicted = Ranks(workload, plan, use, reads_in_place=True).programs.ranks[0]
    (stored, _, sent), *_ = run_ranks(counted, case.ranks, case)[0]
    assert predicted.shape.at_rest == stored
    assert {axis: predicted.sent.get(axis, 0) for axis in sent} == sent


@pytest.mark.wide(2)
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("expert", [2, 4])
def test_even_routing_exchanges_what_the_formula_says(expert: int, recompute: str) -> None:
    """Every token goes to every expert: 4 T k h (e - 1) / e elements a layer and microbatch, half as many more where
    the forward runs again; and the counts."""
    model = Mixture(replace(MIXTURE, experts_per_token=8))
    case = replace(PAIR, layout="GGG", intra=expert, expert=expert, model=model, recompute=recompute)
    tokens = model.batch(0, 1)["input_ids"].shape[1]
    forwards, layers, each = (1 if recompute == "none" else 2), 3, 4 // expert
    rows = (2 + 2 * forwards) * tokens * 8 * 16 * 8 * (expert - 1) // expert
    counts = forwards * 8 * 8 * (expert - 1) // expert
    for *_, exchanged in run_ranks(counted, expert, case):
        assert exchanged == layers * each * (rows + counts)


# ---- before a run


def described(case: Case) -> tuple[Any, ...]:
    engine = case.engine()
    found = engine.program, engine.reads_in_place, engine.footprint()
    engine.close()
    return found


@pytest.mark.wide(1)
@pytest.mark.parametrize("case", [replace(FOUR, tensor=2, intra=2), replace(MUON, layout="GGG")], ids=["AdamW", "Muon"])
def test_a_rank_is_described_as_it_is_built(case: Case) -> None:
    def model() -> nn.Module:
        with torch.device("meta"):
            return case.model.build()

    plan = case.plan if case.optimizer != "Muon" else replace(case.plan, whole=case.optimizer_of_engine().whole)
    for _ in range(2):  # a mesh of the second must not be taken for one of the first
        program, reads_in_place, footprint = run_ranks(described, case.ranks, case)[0]
        found = describe_rank(model, plan, 0, reads_in_place=reads_in_place).program
        assert (found.digest, found.shape) == (program.digest, program.shape)
        assert found.shape.footprint() == footprint


def test_sizes_of_stages_count_the_experts_of_one_rank() -> None:
    """Half of 8 experts of 16 x 16 and 8 x 16 in each of three layers, and half of everything with tensor = 2."""
    with torch.device("meta"):
        adapter = adapter_for(PAIR.model.build())
    stacked = stacked_in(adapter.blocks()).values()
    experts = 3 * 8 * (16 * 16 + 8 * 16)
    every = sum(p.numel() for block in adapter.blocks() for _, p in block.named_parameters())
    for tensor in (1, 2):
        (size,) = Outline.of(adapter, replace(PAIR, tensor=tensor).plan, stacked=stacked).sizes
        assert size.parameters == size.trained == (every - experts // 2) // tensor
