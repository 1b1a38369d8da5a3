"""Experts divided over the ranks of a group: every layout and schedule gives one process's result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.plans.layouts import EFFECTIVE
from atoll.testing.parity import Case, assert_parity
from tests.mixtures import Mixture

PAIR = Case(intra=2, expert=2, microbatches=4, steps=2, model=Mixture())


@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_every_layout(layout: str) -> None:
    assert_parity(replace(PAIR, layout=layout, inter=2))


@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_every_layout_where_two_ranks_share_experts(layout: str) -> None:
    assert_parity(replace(PAIR, layout=layout, intra=4))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "breadth-first"])
@pytest.mark.parametrize("layout", ["NNG", "GGG"])
def test_schedules(layout: str, schedule: str) -> None:
    assert_parity(replace(PAIR, layout=layout, pipeline=2, schedule=schedule))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("intra", [1, 2])
@pytest.mark.parametrize("layout", ["NNG", "IIG", "GGG"])
def test_tensor_parallel_ranks_divide_experts_too(layout: str, intra: int, sequence_parallel: bool) -> None:
    case = replace(PAIR, layout=layout, intra=intra, expert=intra, tensor=2, sequence_parallel=sequence_parallel)
    assert_parity(case)


@pytest.mark.parametrize("layout", ["NNG", "GGG"])
def test_weight_gradients_wait_for_w_without_an_expert_axis(layout: str) -> None:
    assert_parity(replace(PAIR, layout=layout, intra=1, expert=1, pipeline=2, schedule="zb-h1"))


@pytest.mark.parametrize("experts", ["GGG", "NNG", "III"])
@pytest.mark.parametrize("layout", ["NNG", "GGG"])
def test_experts_have_a_layout_of_their_own(layout: str, experts: str) -> None:
    assert_parity(replace(PAIR, layout=layout, expert_layout=experts, inter=2))
