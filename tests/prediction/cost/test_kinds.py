"""Clusters with nodes of several kinds: which rank is on which, and what it takes and holds there."""

from __future__ import annotations

import random
import tomllib
from typing import Any

import pytest

from atoll.base.errors import ConfigError
from atoll.plans import schedules
from atoll.plans.layouts import Codec, Codecs, Layout, Precision
from atoll.plans.plan import ORDERS, MeshShape, Plan
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.prediction.cost.calibration import Step, calibrate
from atoll.prediction.cost.summary import summary

FAST: dict[str, Any] = {
    "name": "fast",
    "count": 2,
    "device": {"memory": 80 * 2**30, "bandwidth": 2e12, "units": 108, "rates": {"float32": 2e14, "bfloat16": 4e14}},
    "node": {"devices": 2, "link": {"rate": 3e11, "latency": 2e-6}},
}
SLOW: dict[str, Any] = {
    "name": "slow",
    "device": {"memory": 24 * 2**30, "bandwidth": 1e12, "units": 128, "rates": {"float32": 1e14, "bfloat16": 2e14}},
    "node": {"devices": 2, "link": {"rate": 2e10, "latency": 5e-6}},
    "network": {"rate": 1e9},
}
NETWORK = {"rate": 1e10, "latency": 1e-5}
MODEL = Transformer.llama(layers=8, hidden=1024, heads=8, ffn=2816, vocabulary=8000)


def of_two(*rows: dict[str, Any]) -> Cluster:
    return Cluster.of({"network": NETWORK, "nodes": list(rows or (FAST, SLOW))})


def predicted(cluster: Cluster, mesh: MeshShape, **options: Any) -> Prediction:
    schedule = schedules.build("1f1b", ranks=mesh.pipeline, microbatches=4)
    plan = Plan(mesh, Layout("NNG"), schedule, microbatch=1, precision=Precision.preset("bf16"), **options)
    return Prediction(MODEL.workload, plan, cluster, Use(samples=1, sequence=1024, tensor=mesh.tensor))


def test_ranks_fill_the_kinds_in_the_order_of_the_file() -> None:
    cluster = of_two()
    assert [(kind.name, [*ranks]) for kind, ranks in cluster.ranks_of_kinds()] == [
        ("fast", [0, 1, 2, 3]),
        ("slow", [4, 5]),
    ]
    found = [[kind.name for kind in cluster.at(MeshShape(3, 1, 2), rank)] for rank in range(3)]
    assert found == [["fast"], ["fast"], ["slow"]]
    inside = MeshShape(2, 3, 1, order=ORDERS[1])  # replica by replica: 0 1, 2 3, 4 5
    assert [[kind.name for kind in cluster.at(inside, rank)] for rank in range(2)] == [["fast", "slow"]] * 2
    other = cluster.ordered(["slow", "fast"])
    assert [kind.name for kind in other.at(MeshShape(3, 1, 2), 0)] == ["slow"]
    assert cluster.network is not None
    assert cluster.network.rate == 1e9
    assert cluster.groups[0].network is not None
    assert cluster.groups[0].network.rate == NETWORK["rate"]


def test_every_place_is_on_the_node_that_its_rank_is_on() -> None:
    cluster, draw = (
        of_two(FAST | {"count": 3}, SLOW | {"count": 2}, FAST | {"name": "other", "count": 4}),
        random.Random(0),
    )
    ranges = [(kind.name, ranks) for kind, ranks in cluster.ranks_of_kinds()]
    for _ in range(50):
        sizes = [draw.choice([1, 2, 3]) for _ in range(3)]
        mesh = MeshShape(*sizes[:2], 1, draw.choice([1, 2]), order=draw.choice(ORDERS))
        if mesh.world > 18:
            continue
        for rank in range(mesh.pipeline):
            own = {world for world in range(mesh.world) if mesh.place(world).pp == rank}
            wanted = [name for name, ranks in ranges if own & set(ranks)]
            assert [kind.name for kind in cluster.at(mesh, rank)] == wanted


def test_equal_kinds_are_as_one() -> None:
    """Bit for bit: seconds, memory and links, on any mesh."""
    one = Cluster.of({"network": NETWORK, "nodes": 3, **{key: FAST[key] for key in ("device", "node")}})
    three = of_two(*({**FAST, "name": name, "count": 1} for name in "abc"))
    for mesh in (MeshShape(3, 1, 2), MeshShape(2, 3, 1, order=ORDERS[1]), MeshShape(3, 1, 1, 2), MeshShape(1, 3, 2)):
        a, b = (predicted(cluster, mesh) for cluster in (one, three))
        assert a.seconds == b.seconds
        assert a.breakdown == b.breakdown
        assert a.mfu == pytest.approx(b.mfu)
        assert [a.margin(rank) for rank in range(mesh.pipeline)] == [b.margin(rank) for rank in range(mesh.pipeline)]
        assert a.durations.links == b.durations.links


def test_a_rank_takes_the_seconds_of_its_device() -> None:
    mesh = MeshShape(3, 1, 2)
    found = predicted(of_two(), mesh)
    alone = [predicted(kind, mesh) for kind in (of_two().groups[0], of_two().groups[1])]
    for rank, own in enumerate((alone[0], alone[0], alone[1])):
        assert found.rates[rank].compute == own.rates[rank].compute
        assert found.rates[rank].links["intra"] == own.rates[rank].links["intra"]
        assert found.seats.memory(rank) == own.device.memory
    assert alone[0].seconds < found.seconds < alone[1].seconds
    # Between kinds a message takes the slower end, here the network of the slow node.
    assert found.rates[0].to[1].rate == NETWORK["rate"] / 2  # two devices share the card
    assert found.rates[1].to[2].rate == found.rates[2].to[1].rate == 1e9 / 2
    assert found.durations.hops.between(1, 2) == found.durations.hops.between(2, 1)
    assert found.durations.hops.between(0, 1) != found.durations.hops.between(1, 2)


def test_a_pipeline_rank_is_as_slow_as_its_slowest_device() -> None:
    inside = MeshShape(2, 3, 1, order=ORDERS[1])
    found, slow = predicted(of_two(), inside), predicted(of_two().groups[1], inside)
    assert found.rates[0].compute == slow.rates[0].compute
    assert found.rates[0].links["inter"] == slow.rates[0].links["inter"]
    assert found.seats.name(0) == "rank 0 on fast and slow"
    assert found.seats.memory(0) == 24 * 2**30


def test_what_fits_is_said_of_each_rank() -> None:
    mesh = MeshShape(3, 1, 2)
    found = predicted(of_two(), mesh)
    rows = summary(found)["ranks"]
    assert [row["nodes"] for row in rows] == [["fast"], ["fast"], ["slow"]]
    assert rows[2]["margin_bytes"] == 24 * 2**30 - found.peak(2).total
    assert "nodes" not in summary(predicted(of_two().groups[0], mesh))["ranks"][0]


def test_a_cluster_is_written_as_it_was_read() -> None:
    uplink = {"uplink": {"rate": 1e8, "latency": 0.02}}
    for tables in (
        {"network": NETWORK, "nodes": [FAST, SLOW], **uplink},
        {"nodes": 2, **{k: FAST[k] for k in ("device", "node")}},
    ):
        cluster = Cluster.of(tables)
        assert Cluster.of(tomllib.loads(cluster.dump())) == cluster


def test_every_kind_changes() -> None:
    cluster = of_two().with_links(lambda link: link.times(2)).with_network(lambda link: link.times(3)).with_memory(0.5)
    fast, slow = cluster.groups
    assert fast.node.link is not None
    assert slow.network is not None
    assert (fast.node.link.rate, slow.network.rate, fast.device.memory) == (6e11, 3e9, 40 * 2**30)
    assert cluster.nodes == 3


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([FAST, {**SLOW, "name": "fast"}], "give each a name of its own"),
        ([FAST, {**SLOW, "node": {"devices": 4, "link": {"rate": 1e9}}}], "describe a larger node as several of 2"),
        ([FAST, {**SLOW, "device": {**SLOW["device"], "units": 1}}], "some devices are CPUs"),
        ([FAST, {**SLOW, "cards": 2}], "nodes 2: cards: a node has no such key"),
        ([FAST, {**SLOW, "count": 0}], "nodes 2: nodes: Input should be greater than or equal to 1"),
        ([{**FAST, "device": {"preset": "a1000"}}, SLOW], "nodes 1: no preset 'a1000'"),
        ([], r"no table \[\[nodes\]\]"),
    ],
)
def test_what_is_no_cluster_is_refused(rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Cluster.of({"network": NETWORK, "nodes": rows})


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 ranks on 3 nodes of 2 devices"):
        _ = predicted(of_two(), MeshShape(4, 1, 2)).seconds
    with pytest.raises(ConfigError, match="the cluster has the kinds fast, slow; name each once"):
        of_two().ordered(["fast"])
    with pytest.raises(ConfigError, match="device: a key of nodes"):
        Cluster.of({"device": FAST["device"], "nodes": [FAST]})


def test_coded_hops_are_between_nodes_of_any_kind() -> None:
    cluster, mesh = of_two(), MeshShape(3, 1, 2)
    plain, coded = (predicted(cluster, mesh, codecs=codecs) for codecs in (Codecs(), Codecs(hop=Codec("int8"))))
    assert coded.seconds < plain.seconds  # the slow kind has a network of 1 GB/s
    whole = plain.ranks.message_bytes
    for rank, rates in enumerate(coded.durations.rates_of()):
        assert len(rates.messages) == (1 if rank in (0, 2) else 2)
        assert all(nbytes < 0.6 * whole for nbytes in rates.messages.values())
    for pair in ((0, 1), (1, 2)):
        mine, other = (each.durations.hops.each[pair].seconds for each in (coded, plain))
        assert mine < 0.6 * other


def test_constants_are_fitted_to_one_kind() -> None:
    step = Step(((1.0, predicted(of_two(), MeshShape(3, 1, 2))),), 1.0)
    with pytest.raises(ConfigError, match="nodes of fast, slow at once"):
        calibrate([step])
