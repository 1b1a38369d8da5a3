"""Mesh coordinates, and plans that do not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import ConfigError, PlanError
from atoll.plans import schedules
from atoll.plans.ir.text import to_csv, to_text
from atoll.plans.layouts import Layout, Nest, NewtonSchulz, Whole
from atoll.plans.outer import Outer
from atoll.plans.plan import ORDERS, MeshShape, Place, Plan, View
from atoll.training.config import from_dict

LAW = settings(deadline=None, max_examples=50)
AXIS = st.integers(1, 4)
MESHES = st.builds(MeshShape, pipeline=AXIS, inter=AXIS, intra=AXIS, tensor=AXIS, order=st.sampled_from(ORDERS))


def test_picture_of_a_mesh() -> None:
    mesh = MeshShape(pipeline=2, inter=2, intra=2)
    assert [tuple(mesh.place(rank).coordinates.values()) for rank in range(mesh.world)] == [
        (0, 0, 0, 0),
        (0, 0, 1, 0),
        (0, 1, 0, 0),
        (0, 1, 1, 0),
        (1, 0, 0, 0),
        (1, 0, 1, 0),
        (1, 1, 0, 0),
        (1, 1, 1, 0),
    ]
    assert mesh.place(6).peers("intra") == (6, 7)
    assert mesh.place(6).peers("inter") == (4, 6)
    assert mesh.place(6).peers("pp") == (2, 6)
    assert mesh.place(6).peers("pp", "intra") == (2, 3, 6, 7)
    assert mesh.place(6).nest == Nest(2, 2, 1, 0)


@LAW
@given(mesh=MESHES)
def test_places_are_one_to_one(mesh: MeshShape) -> None:
    places = [mesh.place(rank) for rank in range(mesh.world)]
    assert [place.rank for place in places] == list(range(mesh.world))
    assert len(set(places)) == mesh.world
    assert {place.data for place in places} == set(range(mesh.data))


@LAW
@given(mesh=MESHES, data=st.data())
def test_peers_differ_along_their_axis_only(mesh: MeshShape, data: st.DataObject) -> None:
    place = mesh.place(data.draw(st.integers(0, mesh.world - 1)))
    for axis, size in mesh.sizes.items():
        peers = place.peers(axis)
        assert len(peers) == size
        assert peers[place.coordinates[axis]] == place.rank
        for position, peer in enumerate(peers):
            assert mesh.place(peer).coordinates == {**place.coordinates, axis: position}


def test_meshes_and_ranks_that_do_not_exist() -> None:
    with pytest.raises(PlanError, match="mesh axis 'intra' has 0 ranks"):
        MeshShape(intra=0)
    with pytest.raises(PlanError, match="rank 4 is outside a mesh of 4 ranks"):
        MeshShape(inter=4).place(4)


def test_a_plan_knows_its_global_batch() -> None:
    schedule = schedules.build("1f1b", ranks=2, microbatches=4)
    plan = Plan(MeshShape(pipeline=2, inter=3), Layout("NNG"), schedule, microbatch=5)
    assert plan.global_batch == 5 * 4 * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": MeshShape(pipeline=4)}, "is for 2 pipeline ranks, the mesh has 4"),
        ({"microbatch": 0}, "microbatch = 0"),
        (
            {"schedule": schedules.build("gpipe", ranks=2, microbatches=8192)},
            "8192 microbatches a rank .* at most 8191",
        ),
        (
            {"schedule": schedules.build("gpipe", ranks=2, microbatches=1024, slices=8 + 1)},
            "9216 slices of microbatches a rank .* at most 8191",
        ),
        ({"recompute": "all"}, "recompute = 'all'; known: none, block, selective"),
        ({"residency": "block"}, "residency = 'block'; known: action, run, step"),
        ({"reduction": "unit"}, "reduction = 'unit'; known: microbatch, run, step"),
        ({"unit": 0}, "unit = 0; a unit has at least one block"),
        ({"unit": -2}, "unit = -2; a unit has at least one block"),
        ({"prefetch": -1}, "prefetch = -1 bytes"),
        ({"resident": -1, "residency": "run"}, "resident = -1 bytes with residency = 'run'"),
        ({"compile": "all"}, "compile = 'all'; known: none, block, block-eager"),
        ({"sequence_parallel": True}, "sequence_parallel .* tensor = 1 has none"),
        (
            {
                "mesh": MeshShape(pipeline=1, tensor=2),
                "schedule": schedules.build("1f1b", ranks=1, microbatches=4),
                "vocabulary_parallel": True,
            },
            "two or more pipeline ranks, and the mesh has one",
        ),
        ({"slice_work": -0.5}, r"slice_work = -0\.5"),
        ({"slice_work": float("nan")}, "slice_work = nan"),
        ({"resident": 5}, "resident = 5 bytes with residency = 'step'"),
    ],
)
def test_plans_that_do_not_fit(change: dict[str, object], message: str) -> None:
    fitting: dict[str, object] = {
        "mesh": MeshShape(pipeline=2),
        "layout": Layout("NNN"),
        "schedule": schedules.build("1f1b", ranks=2, microbatches=4),
        "microbatch": 1,
    }
    with pytest.raises(PlanError, match=message):
        Plan(**{**fitting, **change})  # type: ignore[arg-type]


def test_an_order_of_slices_in_a_config() -> None:
    order = replace(schedules.build("1f1b", ranks=2, microbatches=2, slices=2), name="mine")
    values = {"ranks": 2, "pipeline": 2, "layout": "NNN", "schedule": to_text(order)}

    def plan(batch: int, **parallel: object) -> Plan:
        train = {"global_batch": batch, "microbatch": 1}
        return from_dict({"train": train, "parallel": {**values, **parallel}}).to_plan()

    with pytest.raises(ConfigError, match=r"is for 2 slices of each sequence, parallel\.slices makes 1"):
        plan(2)
    assert plan(2, slices=2, slice_work=1e-3).schedule == order
    whole = replace(order, slices=1)
    assert plan(4, schedule=to_text(whole)).schedule == whole


def test_a_config_without_keys_makes_the_plan_without_arguments() -> None:
    """Whoever writes a program has the defaults that the documentation of a config says."""
    plan = from_dict({}).to_plan()
    assert plan == Plan(plan.mesh, plan.layout, plan.schedule, plan.microbatch)
    even = from_dict({"parallel": {"imbalance": 1.5}}).to_plan()
    assert even == replace(plan, imbalance=1.5) != plan


def test_slices_in_a_config(tmp_path: Path) -> None:
    parallel = {"ranks": 2, "pipeline": 2, "slices": 4, "slice_work": 0.01}
    values = {"train": {"global_batch": 4, "microbatch": 2}, "parallel": parallel}
    plan = from_dict(values).to_plan()
    assert (plan.schedule.slices, plan.schedule.whole_microbatches, plan.slice_work) == (4, 2, 0.01)
    path = tmp_path / "order.csv"
    path.write_text(to_csv(plan.schedule))
    assert from_dict(values, overrides=[f'parallel.schedule="{path}"']).to_plan().schedule.slices == 4
    with pytest.raises(ConfigError, match=r"parallel\.slice_work = 0\.01 makes later slices .* parallel\.slices = 1"):
        from_dict(values, overrides=["parallel.slices=1"]).to_plan()
    with pytest.raises(ConfigError, match="'zb-h2' runs whole sequences, not slices of them"):
        from_dict(values, overrides=['parallel.schedule="zb-h2"']).to_plan()


def test_a_pipeline_inside_the_nodes() -> None:
    mesh = MeshShape(pipeline=2, inter=2, intra=2, order=("inter", "intra", "pp", "tp"))
    assert list(mesh.sizes) == ["inter", "intra", "pp", "tp"]
    assert mesh.place(3) == Place(mesh, pp=1, inter=0, intra=1, tp=0)
    assert mesh.place(3).peers("pp") == (2, 3)
    assert mesh.place(3).peers("inter", "intra") == (1, 3, 5, 7)


def test_an_order_that_does_not_exist() -> None:
    with pytest.raises(PlanError, match="order of the mesh's axes = tp, pp, inter, intra; known: pp, inter"):
        MeshShape(order=("tp", "pp", "inter", "intra"))


def test_unit_is_a_deprecated_name_of_residency_action() -> None:
    schedule = schedules.build("1f1b", ranks=1, microbatches=2)
    with pytest.warns(FutureWarning, match="'unit' is deprecated, use 'action'"):
        plan = Plan(MeshShape(), Layout("NNN"), schedule, 1, residency="unit")  # type: ignore[arg-type]
    assert plan.residency == "action"
    with pytest.warns(FutureWarning, match="'unit' is deprecated"):
        config = from_dict({"parallel": {"residency": "unit"}})
    assert config.parallel.residency == "action"


@pytest.mark.parametrize(
    ("mesh", "layout", "rest", "said"),
    [
        (MeshShape(), "NNN", {}, "on the rank that stores it"),
        (MeshShape(pipeline=2), "GGG", {}, "on the rank that stores it"),
        (MeshShape(inter=2, intra=2), "NNN", {}, "on every rank that stores it"),
        (MeshShape(inter=2, intra=2), "NNG", {}, "on one of the 4 ranks that shard its state"),
        (MeshShape(inter=2, intra=2), "III", {}, "on one of the 2 ranks of each group that shards its state"),
        (MeshShape(inter=1, intra=2), "III", {}, "on one of the 2 ranks that shard its state"),
        (MeshShape(tensor=2), "NNN", {}, "on one of the 2 ranks that shard its state"),
        (MeshShape(intra=2, tensor=2), "NNN", {}, "on one of the 2 ranks of each group that shards its state"),
        (MeshShape(intra=2, tensor=2), "GGG", {}, "on one of the 4 ranks that shard its state"),
        (
            *(MeshShape(inter=2, intra=2), "GGG", {"outer": Outer(every=4)}),
            "on one of the 2 ranks of each group that shards its state",
        ),
        (
            *(MeshShape(intra=4, expert=4), "GGG", {}),
            "on one of the 4 ranks that shard its state, an expert's on the rank that stores it",
        ),
        (
            *(MeshShape(intra=4, expert=2), "GGG", {"expert_layout": Layout("NNN")}),
            "on one of the 4 ranks that shard its state, an expert's on every rank that stores it",
        ),
    ],
)
def test_plans_say_which_rank_transforms_a_matrix(
    mesh: MeshShape, layout: str, rest: dict[str, Any], said: str
) -> None:
    schedule = schedules.build("1f1b", ranks=mesh.pipeline, microbatches=2)
    plan = Plan(mesh, Layout(layout), schedule, 1, whole=Whole("Muon", NewtonSchulz()), **rest)
    assert plan.matrices == f"Muon: each matrix is transformed whole, {said}; AdamW for everything else"


@pytest.mark.parametrize(
    ("expert", "layout", "wanted"),
    [(4, "III", "NII"), (4, "IGG", "NGG"), (4, "GGG", "GGG"), (2, "III", "III"), (2, "NIG", "NIG")],
)
def test_experts_that_no_other_rank_has_are_whole(expert: int, layout: str, wanted: str) -> None:
    mesh = MeshShape(inter=2, intra=4, expert=expert)
    plan = Plan(mesh, Layout("NNG"), schedules.build("gpipe", ranks=1, microbatches=1), 1, expert_layout=Layout(layout))
    assert plan.sharding(mesh.place(0), View.EXPERTS).layout == Layout(wanted)
    assert plan.sharding(mesh.place(0)).layout == Layout("NNG")
