"""The choices of a plan, in words and as settings."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from atoll.base.errors import UserError
from atoll.plans.layouts import Layout
from atoll.plans.plan import MeshShape
from atoll.prediction.cost import Cluster, Transformer
from atoll.prediction.planner import Goal, Order, PlanSearch, Space, settings
from atoll.prediction.planner.candidate import Candidate, choices
from atoll.prediction.planner.space import Frame, Travel
from atoll.training.config import from_dict

SIZES = {"layers": 16, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 160}
IDS = 1000
CLUSTER = Cluster.of(
    {
        "nodes": 4,
        "device": {"memory": 2**34, "bandwidth": 1e12, "units": 4, "rates": {"float32": 1e13, "bfloat16": 1e14}},
        "node": {"devices": 4, "link": {"rate": 1e11}},
        "network": {"rate": 1e10},
    }
)


def candidate_of(mesh: MeshShape, order: Order, travel: Travel, **frame: object) -> Candidate:
    plain = Frame(mesh, 1, 4, "none", "fp32", False, False)
    return Candidate(plain._replace(**frame), order, travel, 1.0, 1)  # type: ignore[arg-type]


def test_the_words_for_a_plan() -> None:
    plain = candidate_of(MeshShape(), Order("1f1b"), Travel(Layout("NNN"), "action", "microbatch", 1, None, False))
    assert choices(plain) == {
        "mesh": "1 rank",
        "microbatch": "1 x 4",
        "recompute": "none",
        "precision": "fp32",
        "schedule": "1f1b",
        "layout": "NNN",
        "residency": "action",
        "reduction": "microbatch",
        "unit": "1",
        "prefetch": "as needed",
        "post-validation": "no",
        "sequence parallel": "no",
        "split vocabulary": "no",
    }
    other = candidate_of(
        MeshShape(pipeline=2, inter=3, intra=4, tensor=5),
        Order("interleaved", 2),
        Travel(Layout("IGG"), "run", "step", 4, 0, True),
        microbatch=2,
        microbatches=8,
        recompute="block",
        precision="bf16",
        sequence_parallel=True,
        vocabulary_parallel=True,
    )
    assert choices(other) == {
        "mesh": "pp 2 x inter 3 x intra 4 x tp 5",
        "microbatch": "2 x 8",
        "recompute": "block",
        "precision": "bf16",
        "schedule": "interleaved of 2 stages a rank",
        "layout": "IGG",
        "residency": "run",
        "reduction": "step",
        "unit": "4",
        "prefetch": "0",
        "post-validation": "yes",
        "sequence parallel": "yes",
        "split vocabulary": "yes",
    }
    assert not [name for name, value in choices(other).items() if value == choices(plain)[name]]
    assert choices(other._replace(frame=other.frame._replace(mesh=MeshShape(inter=2))))["mesh"] == "inter 2"


@pytest.mark.parametrize("seed", range(6))
def test_settings_are_a_config_of_the_same_plan(seed: int) -> None:
    draw = random.Random(seed)
    model = Transformer.decoder(**SIZES, vocabulary=IDS, tied=False)
    search = PlanSearch(model.workload, CLUSTER, Goal(global_batch=32, sequence=16), Space(slices=(1, 4)))
    blocks = len(model.workload.blocks)
    frames = [each for each in search.space.frames(search.goal, CLUSTER, blocks=blocks) if each.mesh.pipeline in (2, 4)]
    for frame in draw.sample(frames, 6):
        order = draw.choice(search.space.orders(frame, search.goal))
        chunks = order.chunks or 1
        travels = [*islice(search.space.travels(frame, chunks=chunks), 200)]
        found = Candidate(frame, order, draw.choice(draw.choice(travels)), 1.0, 1)
        if order.slices > 1:
            found = found._replace(slice_work=search.plan(*found[:3]).slice_work)
        try:
            plan = search.plan(*found[:3])
        except UserError:  # the search leaves it out
            continue
        chosen = settings(found)
        values = {
            "model": {**SIZES, "vocabulary": IDS, "config": {"tie_embeddings": False}},
            "data": {"sequence": 16},
            "train": {**chosen["train"], "global_batch": 32},
            "parallel": chosen["parallel"],
        }
        assert from_dict(values).to_plan() == plan
