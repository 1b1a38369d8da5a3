"""Every schedule of the catalogue trains as one process does.

On two pipeline ranks each meets every layout in `test_matrix.py`; here are four, with a layout that is drawn.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atoll.plans import schedules
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity, train_case
from atoll.testing.tiny import TinyConfig
from tests.drawn import drawn

EVERYTHING = TinyConfig(layers=8, tied=True, frozen=True, odd=True, small=True, unused=True, dropout=0.2)
NAMES = list(schedules.CATALOGUE)


def case_of(name: str, layout: str, pipeline: int, **options: object) -> Case:
    data = 2 if pipeline == 2 else 1
    chosen = Case(
        layout=layout,
        pipeline=pipeline,
        intra=data,
        schedule=name,
        microbatches=data * 2 * pipeline,
        model=EVERYTHING,
        steps=2,
    )
    return replace(chosen, **options)  # type: ignore[arg-type]


@pytest.mark.wide(8)
@pytest.mark.parametrize(("name", "layout"), drawn(len(NAMES), NAMES, ["NNN", "NNG", "GGG"]))
def test_every_schedule(name: str, layout: str) -> None:
    assert_parity(case_of(name, layout, 4))


RECOMPUTED = ["1f1b", "zb-h2", "zb-v", "dualpipe-v", "unit"]


@pytest.mark.wide(3)
@pytest.mark.parametrize(("name", "recompute"), drawn(len(RECOMPUTED), RECOMPUTED, ["block", "selective"]))
def test_recompute(name: str, recompute: str) -> None:
    assert_parity(case_of(name, "IIG", 2, recompute=recompute))


@pytest.mark.wide(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_post_validation_gives_the_same_bits(name: str) -> None:
    case = case_of(name, "IIG", 2, clip=1.0, steps=4)
    waiting = run_ranks(train_case, case.ranks, case)
    ahead = run_ranks(train_case, case.ranks, replace(case, post_validation=True))
    for one, other in zip(waiting, ahead, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        assert all(torch.equal(one.parameters[key], other.parameters[key]) for key in one.parameters)


SAME_ORDER = ["gpipe", "1f1b", "zb-h1", "zb-h2"]
"""Schedules on one placement that run every op of a stage in the order of microbatches."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NNN", "IIG"])
def test_schedules_that_keep_the_order_give_the_same_bits(layout: str) -> None:
    histories = [run_ranks(train_case, 4, case_of(name, layout, 2)) for name in SAME_ORDER]
    for ranks in zip(*histories, strict=True):
        first, *others = ranks
        for other in others:
            assert other.losses == first.losses
            assert other.norms == first.norms
            assert all(torch.equal(first.parameters[key], other.parameters[key]) for key in first.parameters)
