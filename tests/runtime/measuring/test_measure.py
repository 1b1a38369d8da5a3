"""Real measurements of this machine, shorter than anyone would trust: their form, and that predictions take them."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from atoll.base.errors import RankError
from atoll.base.machine import machine_memory
from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.cost import Cluster, Prediction, Transformer, Use
from atoll.runtime.measuring import measure
from atoll.runtime.measuring.device import _Bench
from atoll.runtime.measuring.host_link import host_of, read_host
from atoll.runtime.measuring.measure import cluster_to_toml, describe_cluster, measure_cluster, statistic, to_tables
from atoll.runtime.measuring.stopwatch import Stopwatch, typical
from atoll.runtime.transport import world_rank
from atoll.testing import run_ranks
from tests.training.report.sheets import CLUSTER

CPU = torch.device("cpu")
ONE = torch.zeros(1)
MODEL = Transformer.llama(layers=2, hidden=64, heads=2, ffn=128, vocabulary=256)


def measured(ranks: int, *, local: int, cards: int = 1) -> Cluster:
    found = run_ranks(measure_cluster, ranks, ranks, local=local, device=CPU, seconds=0.002, cards=cards)
    assert all(each == found[0] for each in found), "every rank has the same"
    return found[0]


def check(cluster: Cluster, folder: Path) -> Cluster:
    """Everything that must be above 0 is, and the file says the same to four digits."""
    device, reached = cluster.device, cluster.device.efficiency
    links = [link for link in (cluster.node.link, cluster.network) if link is not None]
    values = [
        *(device.memory, device.bandwidth, device.units, *device.rates.values()),
        *(reached.attention, reached.memory, reached.update, reached.launch, reached.dispatch),
        *(value for link in links for value in (link.rate, link.goodput)),
    ]
    assert all(math.isfinite(value) and value > 0 for value in values)
    assert 0 <= reached.depth < 1e6
    assert all(0 <= link.latency < 1 for link in links)
    assert device.source.startswith("measured on ")
    assert f"torch {torch.__version__}" in device.source

    path = folder / "cluster.toml"
    path.write_text(cluster_to_toml(cluster), encoding="utf-8")
    read = Cluster.read(path)
    assert to_tables(read) == to_tables(cluster)
    assert read.device.bandwidth == pytest.approx(cluster.device.bandwidth, rel=1e-3)
    return read


@pytest.mark.alone
@pytest.mark.slow
def test_two_ranks_of_a_node(tmp_path: Path) -> None:
    cluster = check(measured(2, local=2), tmp_path)
    assert set(cluster.device.rates) >= {"float32", "float64", "bfloat16"}
    assert 1e8 < cluster.device.rates["float32"] < 1e14
    assert 1e8 < cluster.device.bandwidth < 1e13
    assert cluster.device.memory == machine_memory() // 2
    assert cluster.device.context == 0
    assert cluster.node.devices == 2
    assert cluster.node.link is not None
    assert cluster.network is None

    plan = Plan(MeshShape(2), Layout("NNN"), schedules.build("1f1b", ranks=2, microbatches=4), 1,
                precision=Precision.preset("fp32"))  # fmt: skip
    prediction = Prediction(MODEL.workload, plan, cluster, Use(samples=1, sequence=32, compute="float32"))
    assert 0 < prediction.seconds < 60
    assert prediction.fits


@pytest.mark.alone
@pytest.mark.slow
def test_two_nodes_of_two_ranks(tmp_path: Path) -> None:
    cluster = check(measured(4, local=2, cards=4), tmp_path)
    assert (cluster.node.devices, cluster.node.cards) == (2, 4)
    assert cluster.node.link is not None
    assert cluster.network is not None
    # Two ranks share four cards: each card has half of what a rank sees, and `along` gives it back.
    along = cluster.along(MeshShape(inter=2, intra=2), "inter")
    assert along.rate == pytest.approx(2 * cluster.network.goodput)


@pytest.mark.alone
@pytest.mark.slow
def test_two_nodes_of_one_rank_have_a_network_only(tmp_path: Path) -> None:
    cluster = check(measured(2, local=1), tmp_path)
    assert cluster.node.link is None
    assert cluster.network is not None
    assert "[node.link]" not in cluster_to_toml(cluster)
    assert "network card" in describe_cluster(cluster)


@pytest.mark.alone
@pytest.mark.slow
def test_a_rank_alone_has_no_link(tmp_path: Path) -> None:
    cluster = check(measured(1, local=1), tmp_path)
    assert cluster.node.link is cluster.network is None
    assert cluster.device.memory == machine_memory()


@pytest.mark.slow
def test_nodes_of_different_sizes_are_refused() -> None:
    with pytest.raises(RankError, match="node has 2 of 3 ranks, others have more or fewer"):
        run_ranks(measure_cluster, 3, 3, local=2, device=CPU, seconds=0.002)


def test_the_host_takes_longer_for_a_kernel_of_a_layer_than_for_a_launch() -> None:
    """Python, autograd and views of a layer are shared among the kernels that formulas count."""
    bench = _Bench(Stopwatch(CPU, 0.01))
    assert bench.dispatch() > bench.stopwatch.host_seconds(lambda: ONE.add_(1.0))


@pytest.mark.parametrize(
    ("cores", "device", "expected"), [(4, "cpu", typical), (3, "cpu", fmean), (3, "cuda", typical)]
)
def test_samples_of_ranks_that_share_cores_count_with_their_waits(
    monkeypatch: pytest.MonkeyPatch, cores: int, device: str, expected: object
) -> None:
    """Two ranks of two threads on four cores have one each, on three they take turns; a GPU's kernels do not wait."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("atoll.runtime.measuring.measure.cores", lambda: cores)
    assert statistic(torch.device(device), 2) is expected


def test_the_host_of_a_device() -> None:
    """Here the device is the processor, whose copies are as fast as memory is."""
    found = read_host(Stopwatch(CPU, 0.01), lambda: None)
    host = host_of(found, local_ranks=4, source="here")
    assert (host.memory, host.rate, host.reach) == (machine_memory(), found.rate, 1.0)
    assert host.bandwidth == 4 * found.stepped
    assert 1e8 < found.rate < 1e12
    assert 1e8 < found.stepped < 1e12
    assert 0 < found.latency < 1e-3


def test_a_cpu_has_no_host() -> None:
    assert measured(1, local=1).node.host is None


def test_the_link_to_host_memory_is_a_line_where_there_is_one() -> None:
    lines = [line for line in describe_cluster(CLUSTER).splitlines() if line.startswith("host memory ")]
    assert lines == ["host memory        59.6 GiB, 5 GB/s to a device, 20 GB/s of steps there"]
    bare = CLUSTER.model_copy(update={"node": CLUSTER.node.model_copy(update={"host": None})})
    assert "host memory" not in describe_cluster(bare)


def of_two_kinds(ranks: int, *, local: int, **options: Any) -> Cluster:
    """Measure as one of `ranks`, of which those of the first node say that their device is another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "describe_device", lambda _: "fast" if world_rank() < local else "slow")
        return measure_cluster(ranks, local=local, device=CPU, seconds=0.002, **options)


@pytest.mark.alone
@pytest.mark.slow
def test_nodes_with_other_devices_are_a_kind_of_their_own(tmp_path: Path) -> None:
    every = run_ranks(of_two_kinds, 4, 4, local=2)
    cluster = every[0]
    assert all(each == cluster for each in every)
    assert [(kind.name, [*ranks]) for kind, ranks in cluster.ranks_of_kinds()] == [("fast", [0, 1]), ("slow", [2, 3])]
    for kind in cluster.groups:
        assert kind.device.source.startswith(f"measured on {kind.name}, 2 at once")
        assert kind.device.memory == pytest.approx(machine_memory() / 2, rel=1e-6)
        assert kind.node.link is not None
        assert kind.node.link.source.startswith(f"measured on {kind.name}")
        check(kind.model_copy(update={"nodes": 1}), tmp_path)
    assert cluster.groups[0].network == cluster.groups[1].network is not None
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_to_toml(cluster), encoding="utf-8")
    assert to_tables(Cluster.read(path)) == to_tables(cluster)
    assert "ranks 2 to 3: slow\ndevice" in describe_cluster(cluster)
