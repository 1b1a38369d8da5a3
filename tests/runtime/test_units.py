"""Units of several blocks: the same results, fewer gathers of more bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from atoll.program import groups_of
from atoll.runtime.models import adapter_for
from atoll.runtime.sharding.norm import sum_of_squares
from atoll.runtime.sharding.unit import unit_specs
from atoll.runtime.sharding.unsharded import GatherState, UnshardedParameters
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity
from atoll.testing.tiny import TinyConfig, tiny_model
from tests.drawn import drawn

EVERYTHING = TinyConfig(layers=7, tied=True, frozen=True, odd=True, small=True, unused=True, dropout=0.2)


@pytest.mark.wide(4)
@pytest.mark.parametrize("together", [2, 3, 9])
@pytest.mark.parametrize("layout", ["NNG", "ING", "IIG", "GGG"])
def test_parity_over_two_groups(layout: str, together: int) -> None:
    assert_parity(Case(layout, inter=2, intra=2, microbatches=8, model=EVERYTHING, unit=together))


@pytest.mark.wide(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "schedule", "recompute"),
    drawn(6, ["IIG", "GGG"], ["1f1b", "zb-h1", "zb-v"], ["none", "block", "selective"]),
)
def test_parity_in_a_pipeline(layout: str, schedule: str, recompute: str) -> None:
    case = Case(layout, pipeline=2, intra=2, schedule=schedule, model=EVERYTHING, unit=2, recompute=recompute)
    assert_parity(case)
    assert_parity(replace(case, residency="run", reduction="run"))


def test_blocks_of_one_class_in_one_stage_are_a_unit() -> None:
    with torch.device("meta"):
        blocks = adapter_for(tiny_model(TinyConfig(layers=7))).blocks()
    assert len(blocks) == 9
    kinds = [type(block.module) for block in blocks]
    assert groups_of(kinds, [range(9)], 1) == [[at] for at in range(9)]
    assert groups_of(kinds, [range(9)], 4) == [[0], [1, 2, 3, 4], [5, 6, 7], [8]]
    assert groups_of(kinds, [range(5), range(5, 9)], 3) == [[0], [1, 2, 3], [4], [5, 6, 7], [8]]
    specs = unit_specs([(block.name, block.module) for block in blocks], groups_of(kinds, [range(9)], 4))
    assert [spec.blocks for spec in specs] == [(0,), (1, 2, 3, 4), (5, 6, 7), (8,)]
    assert specs[1].name == f"{blocks[1].name} to {blocks[4].name}"
    assert not any(spec.is_shared for spec in specs)


def watched(case: Case) -> tuple[int, int, int]:
    """Of the second step: gathers of segments, the most blocks whole after any, and what is left whole."""
    engine = case.engine()
    engine.step(case.share(engine, 0))
    gathers = most = 0
    bring, gather = UnshardedParameters._all_gather, UnshardedParameters.gather

    def whole() -> int:
        return sum(
            len(unit.spec.blocks)
            for unit in engine.units
            if all(segment.unsharded.state is GatherState.UNSHARDED for segment in unit.segments)
        )

    def bringing(copy: UnshardedParameters, *args: Any) -> None:
        nonlocal gathers
        gathers += 1
        bring(copy, *args)

    def gathering(copy: UnshardedParameters) -> None:
        nonlocal most
        gather(copy)
        most = max(most, whole())

    with (
        patch.object(UnshardedParameters, "_all_gather", bringing),
        patch.object(UnshardedParameters, "gather", gathering),
    ):
        engine.step(case.share(engine, 1))
    left = whole()
    engine.close()
    return gathers, most, left


@pytest.mark.slow
def test_larger_units_are_gathered_less_often() -> None:
    """Two microbatches, forward and backward: embedding, units of layers, head."""
    model = TinyConfig(layers=8)
    case = Case("GGG", inter=2, intra=2, microbatches=8, model=model, prefetch=0)
    for together, units, blocks in ((1, 10, 2), (4, 4, 8), (8, 3, 9)):
        for gathers, most, left in run_ranks(watched, 4, replace(case, unit=together)):
            assert gathers == 2 * 2 * units
            assert most <= blocks
            assert left == 0


def test_shared_units_stand_before_the_blocks_that_use_them_in_one_order() -> None:
    """Of those that begin in one block, the one of more blocks first, then by the blocks, whatever a block names first.

    A shared unit is named by its first parameter, one of a single block by the block.
    """
    shared = {name: torch.nn.Parameter(torch.empty(2)) for name in "abc"}
    blocks = []
    for at, names in enumerate(("abc", "b", "ac", "c")):
        module = torch.nn.Module()
        for name in names:
            module.register_parameter(name, shared[name])
        module.register_parameter("own", torch.nn.Parameter(torch.empty(1)))
        blocks.append((f"block{at}", module))
    specs = unit_specs(blocks, [(at,) for at in range(4)])
    assert [spec.blocks for spec in specs] == [(0, 2, 3), (0, 1), (0, 2), (0,), (1,), (2,), (3,)]
    assert [spec.name for spec in specs[:4]] == ["shared block0.c", "shared block0.b", "shared block0.a", "block0"]
    assert [spec.is_shared for spec in specs] == [True] * 3 + [False] * 4


@pytest.mark.parametrize("numel", [0, 1, 1000, (1 << 16) - 1, 1 << 16, (1 << 17) + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sum_of_squares_is_added_in_float64(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).mul(1e25).to(dtype)
    got = sum_of_squares(values)
    assert got.dtype == torch.float64
    # 1e50 is beyond fp32.
    assert float(got) == pytest.approx(float(values.double().square().sum()), rel=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e25])
def test_the_sum_of_squares_is_right_at_every_scale(scale: float) -> None:
    """Also where squares in fp32 would be zero or infinite."""
    values = torch.randn(50_001, generator=torch.Generator().manual_seed(0)) * scale
    assert float(sum_of_squares(values)) == pytest.approx(float(values.double().square().sum()), rel=1e-6)


def test_the_sum_of_squares_of_what_is_not_finite() -> None:
    for fault in (float("inf"), float("nan")):
        assert not sum_of_squares(torch.tensor([1.0, fault, 2.0])).isfinite()
