"""Several ranks on one GPU, by way of the host, equal one process: streams, events and frees under real concurrency."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atoll.testing import run_ranks
from atoll.testing.parity import Case, History, reference, train, worst_difference
from atoll.testing.tiny import TinyConfig

EVERYTHING = TinyConfig.everything()


def on_gpu(case: Case) -> list[History]:
    return run_ranks(train, case.ranks, case, timeout=300.0, sees_gpus=True)


def assert_equals_one_process(case: Case) -> None:
    wanted = reference(replace(case, layout="NNN", pipeline=1, inter=1, intra=1, schedule="1f1b"))
    for rank, got in enumerate(on_gpu(case)):
        got.parameters = {name: value.cuda() for name, value in got.parameters.items()}
        worst, where = worst_difference(got, wanted)
        assert worst <= 1e-10, f"{case}: rank {rank} differs by {worst:.3g} at {where}"


@pytest.mark.parametrize("layout", ["NNN", "NNG", "NIG", "III", "IIG", "GGG"])
def test_layouts(layout: str) -> None:
    assert_equals_one_process(Case(layout, inter=2, intra=2, microbatches=8, model=EVERYTHING, device="cuda"))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("layout", ["NNG", "IIG", "GGG"])
def test_layouts_in_a_pipeline(layout: str, schedule: str) -> None:
    assert_equals_one_process(Case(layout, pipeline=2, intra=2, schedule=schedule, model=EVERYTHING, device="cuda"))


@pytest.mark.parametrize("layout", ["IIG", "GGG"])
def test_gathering_ahead_changes_no_bit(layout: str) -> None:
    case = Case(layout, inter=2, intra=2, microbatches=8, model=EVERYTHING, steps=5, device="cuda")
    without = on_gpu(replace(case, prefetch=0))
    for prefetch in (None, 1 << 30):
        for one, other in zip(without, on_gpu(replace(case, prefetch=prefetch)), strict=True):
            assert one.losses == other.losses
            assert all(torch.equal(one.parameters[key], other.parameters[key]) for key in one.parameters)


@pytest.mark.parametrize("layout", ["NNN", "IIG", "GGG"])
def test_post_validated_steps(layout: str) -> None:
    case = Case(layout, pipeline=2, intra=2, model=EVERYTHING, steps=5, device="cuda", schedule="zb-h2")
    for one, other in zip(on_gpu(case), on_gpu(replace(case, post_validation=True)), strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(one.parameters[key], other.parameters[key]) for key in one.parameters)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_split_vocabulary(schedule: str) -> None:
    case = Case("IIG", pipeline=2, intra=2, schedule=schedule, model=EVERYTHING, device="cuda")
    wanted = reference(replace(case, layout="NNN", pipeline=1, intra=1, schedule="1f1b"))
    for got in on_gpu(replace(case, vocabulary_parallel=True)):
        got.parameters = {name: value.cuda() for name, value in got.parameters.items()}
        worst, where = worst_difference(got, wanted)
        assert worst <= 1e-10, where
