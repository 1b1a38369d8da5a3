"""A search without a plan names the constraint that ruled out the last one."""

from __future__ import annotations

import re
from typing import Any

import pytest

import atoll
from atoll.base.errors import ConfigError
from atoll.plans.outer import Outer
from atoll.prediction.cost import Cluster, Transformer, Use, Work, Workload
from atoll.prediction.planner import Goal, Order, PlanSearch, Space
from atoll.prediction.planner.answer import Answer

MODEL = Transformer.llama(layers=2, hidden=64, heads=2, ffn=128, vocabulary=256).workload
CLUSTER = Cluster.of(
    {
        "nodes": 2,
        "device": {"preset": "h100-80gb"},
        "node": {"devices": 4, "link": {"preset": "nvlink4"}},
        "network": {"preset": "infiniband-ndr"},
    }
)


@pytest.mark.parametrize(
    ("space", "goal", "said"),
    [
        ({"pipeline": (3,)}, {}, "pipeline = 3 does not divide 8 (ranks)"),
        ({"microbatch": (3, 5)}, {}, "microbatch = 3 or 5 does not divide 8 (global_batch)"),
        ({"tensor": (8,)}, {}, "tensor = 8 leaves no mesh: together they divide the ranks, tensor and intra are within "
                               "the 4 devices of a node, and a pipeline has at most 4 ranks"),
        ({"pipeline": (8,)}, {}, "pipeline = 8 leaves no mesh: "),
        ({"pipeline": (2,), "tensor": (8,)}, {}, "tensor = 8 with pipeline = 2 leaves no mesh: "),
        ({"pipeline": (1,), "tensor": (1,)}, {"global_batch": 9}, "global_batch = 9 is not divisible by 8, the"),
        ({"pipeline": (1,), "tensor": (1,), "microbatch": (2,)}, {},
         "microbatch = 2 does not divide a rank's share of global_batch = 8: 1 samples"),
        ({"tensor": (4,), "sequence_parallel": (True,)}, {"sequence": 66},
         "sequence_parallel splits 66 tokens over tensor = 4 ranks"),
        ({"pipeline": (4,), "schedules": (Order("zb-v", 3),)}, {}, "zb-v"),
    ],
)  # fmt: skip
def test_what_is_kept_and_does_not_fit_is_named(space: dict[str, Any], goal: dict[str, int], said: str) -> None:
    wanted = Goal(**{"global_batch": 8, "sequence": 64, **goal})
    with pytest.raises(ConfigError, match=f"no plan for 8 ranks: .*{re.escape(said)}"):
        atoll.plan(MODEL, CLUSTER, wanted, Space(**space))


class Refusing:
    """A block whose costs cannot be told."""

    name = "block"

    def work(self, use: Use) -> Work:
        raise ConfigError("this block has no costs in " + use.compute)


def test_costs_that_are_not_known_are_the_cause() -> None:
    workload = Workload("refusing", (Refusing(),) * 4, range(1, 3))
    with pytest.raises(ConfigError, match="no plan for 8 ranks: this block has no costs in float32"):
        atoll.plan(workload, CLUSTER, Goal(global_batch=8, sequence=64))


def test_outer_steps_need_groups() -> None:
    alone = CLUSTER.model_copy(update={"nodes": 1})
    search = PlanSearch(MODEL, alone, Goal(global_batch=8, sequence=64), Space(pipeline=(4,)), outer=Outer(every=4))
    with pytest.raises(ConfigError, match=r"no plan for 4 ranks: parallel.outer needs two groups or more"):
        Answer.of(search)
