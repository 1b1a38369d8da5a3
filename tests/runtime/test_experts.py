"""Experts divided over the ranks of a group: every layout and schedule gives one process's result."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from atoll.base.errors import RankError
from atoll.plans.layouts import EFFECTIVE
from atoll.runtime.engine import Engine
from atoll.runtime.models import MixtureConfig
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity
from tests.mixtures import MIXTURE, Mixture

PAIR = Case(intra=2, expert=2, microbatches=4, steps=2, model=Mixture())


@pytest.mark.wide(1)
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_every_layout(layout: str) -> None:
    assert_parity(replace(PAIR, layout=layout, inter=2))


@pytest.mark.wide(1)
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_every_layout_where_two_ranks_share_experts(layout: str) -> None:
    assert_parity(replace(PAIR, layout=layout, intra=4))


@pytest.mark.wide(3)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "breadth-first"])
@pytest.mark.parametrize("layout", ["NNG", "GGG"])
def test_schedules(layout: str, schedule: str) -> None:
    assert_parity(replace(PAIR, layout=layout, pipeline=2, schedule=schedule))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("intra", [1, 2])
@pytest.mark.parametrize("layout", ["NNG", "IIG", "GGG"])
def test_tensor_parallel_ranks_divide_experts_too(layout: str, intra: int, sequence_parallel: bool) -> None:
    case = replace(PAIR, layout=layout, intra=intra, expert=intra, tensor=2, sequence_parallel=sequence_parallel)
    assert_parity(case)


@pytest.mark.parametrize("layout", ["NNG", "GGG"])
def test_weight_gradients_wait_for_w_without_an_expert_axis(layout: str) -> None:
    assert_parity(replace(PAIR, layout=layout, intra=1, expert=1, pipeline=2, schedule="zb-h1"))


@pytest.mark.wide(2)
@pytest.mark.parametrize("experts", ["GGG", "NNG", "III"])
@pytest.mark.parametrize("layout", ["NNG", "GGG"])
def test_experts_have_a_layout_of_their_own(layout: str, experts: str) -> None:
    assert_parity(replace(PAIR, layout=layout, expert_layout=experts, inter=2))


@pytest.mark.wide(1)
@pytest.mark.parametrize("recompute", ["block", "selective"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_forward_that_runs_again_exchanges_again(schedule: str, recompute: str) -> None:
    assert_parity(replace(PAIR, layout="GGG", pipeline=2, schedule=schedule, recompute=recompute))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [1, 2])
def test_compiled_blocks(pipeline: int) -> None:
    schedule = "1f1b" if pipeline == 1 else "zb-h1"
    assert_parity(replace(PAIR, layout="GGG", pipeline=pipeline, schedule=schedule, compile="block-eager"))


@pytest.mark.wide(1)
@pytest.mark.parametrize("post_validation", [False, True])
def test_steps_that_are_validated_later(post_validation: bool) -> None:
    case = replace(PAIR, layout="NGG", pipeline=2, schedule="zb-h1", post_validation=post_validation, steps=3)
    assert_parity(case)


def test_compiled_experts_keep_no_products() -> None:
    case = replace(PAIR, recompute="selective", compile="block-eager")
    with pytest.raises(RankError, match='compile = "block-eager" and experts'):
        assert_parity(case)


def test_more_ranks_than_experts_are_refused() -> None:
    few = Mixture(MixtureConfig(experts=3))
    with pytest.raises(RankError, match="3 experts, which expert = 2 ranks cannot divide evenly"):
        assert_parity(replace(PAIR, model=few))


def storages_of(case: Case) -> list[int]:
    """Bytes of the storages of a rank that are as large as the experts of a layer; its model was not on `meta`."""
    torch.manual_seed(0)
    engine = Engine(case.model.build().double(), case.plan, optimizer=case.make_optimizer)
    gc.collect()
    layer = max(parameter.numel() * 8 for name, parameter in engine.model.named_parameters() if "experts" in name)
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and type(each) is not DTensor]
    found = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tensors
        if each.device.type == "cpu" and each.dtype == torch.float64
    }
    engine.close()
    return [nbytes for nbytes in found.values() if nbytes >= layer]


def test_no_rank_keeps_all_experts_of_a_layer() -> None:
    case = replace(PAIR, layout="GGG", model=Mixture(replace(MIXTURE, expert_ffn=64)))
    assert run_ranks(storages_of, 2, case) == [[], []]
