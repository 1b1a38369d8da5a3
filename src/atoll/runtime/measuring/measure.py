"""Measurement of a cluster by all ranks together, as `atoll.prediction.cost.Cluster` and as its TOML."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from statistics import fmean
from typing import Any

import torch

from atoll.base.errors import ConfigError
from atoll.base.toml import nested_to_toml
from atoll.base.units import format_bytes, format_seconds
from atoll.plans.plan import MeshShape
from atoll.prediction.cost import Cluster, Host, Link, Node
from atoll.runtime.launch import cores
from atoll.runtime.measuring.device import DTYPES, Reading, describe_device, read_device, to_device
from atoll.runtime.measuring.host_link import HostReading, host_of, read_host
from atoll.runtime.measuring.links import read_links
from atoll.runtime.measuring.stopwatch import Stopwatch, typical
from atoll.runtime.transport import Transport, connect, world_rank

DIGITS = 4
"""Number of significant digits that are written."""


def measure_cluster(
    world: int,
    *,
    local: int,
    device: torch.device,
    seconds: float,
    cards: int = 1,
    dtypes: Collection[str] = tuple(DTYPES),
) -> Cluster:
    """Measure the devices and links of all ranks. Each rank calls it after torch.distributed is initialized.

    local: ranks of each node, with consecutive numbers.  seconds: for each quantity.  cards: network cards of a node.
    dtypes: of products, besides that of all other quantities. One `depth`, `attention` and `memory` serve all dtypes;
    only `memory` has a factor for elements of two bytes.

    The result is the same on every rank. Raises ConfigError if nodes have different numbers of ranks.
    """
    rank = world_rank()
    transport = connect(MeshShape(intra=world).place(rank), device)
    total, squares = transport.total(torch.tensor([local, local**2])).tolist()
    if world % local or world * squares != total**2:  # equal only if all are, so that every rank raises or none
        raise ConfigError(f"rank {rank}'s node has {local} of {world} ranks, others have more or fewer; start as many")
    at_once = f", {local} at once" if local > 1 else ""
    version, today = torch.__version__, datetime.date.today().isoformat()
    source = f"measured on {describe_device(device)}{at_once}, torch {version}, {today}"
    shape = MeshShape(inter=world // local, intra=local)
    links = read_links(shape, rank=rank, device=device, budget=seconds, cards=cards, source=source)
    stopwatch = Stopwatch(device, seconds, typical=statistic(device, local))
    reading = _mean(read_device(stopwatch, transport.barrier, dtypes=dtypes), transport)
    host = None
    if device.type == "cuda":  # the memory of a CPU is the device's own
        found = _mean_of_host(read_host(stopwatch, transport.barrier), transport)
        host = host_of(found, local_ranks=local, source=source)
    transport.close()
    return Cluster(
        device=to_device(reading, device, local_ranks=local, source=source),
        node=Node(devices=local, cards=cards, link=links.node, host=host),
        network=links.network,
    )


def statistic(device: torch.device, local: int) -> Callable[[Sequence[float]], float]:
    """Return what counts of the samples of a time: their lower quartile.

    Where the threads of a node's `local` ranks are more than its cores, it is the mean: a sample that is shorter than a
    slice of the scheduler has a core of its own or waits for one.
    """
    waits = device.type == "cpu" and local * torch.get_num_threads() > cores()
    return fmean if waits else typical


def to_tables(cluster: Cluster) -> dict[str, Any]:
    """Return the tables of a measured cluster, with rounded numbers: measurements only, no defaults."""
    return _rounded(cluster.tables())


def cluster_to_toml(cluster: Cluster) -> str:
    """Return TOML for `Cluster.read`."""
    return nested_to_toml(to_tables(cluster))


def describe_cluster(cluster: Cluster) -> str:
    """Return the measurements, one line each."""
    device, reached = cluster.device, cluster.device.efficiency
    rows = [
        ("device", device.source.removeprefix("measured on ")),
        ("memory", f"{format_bytes(device.memory)} a rank, of which the context has {format_bytes(device.context)}"),
        *((f"{dtype} products", _flops(rate)) for dtype, rate in device.rates.items()),
        ("depth", f"{reached.depth:.3g}: inner size of a product that reaches half of that"),
        ("attention", f"{reached.attention:.0%} of it, forward and backward"),
        ("bandwidth", f"{format_bytes(device.bandwidth, decimal=True)}/s"),
        ("other kernels", f"{reached.memory:.0%} of it, {reached.memory * reached.half:.0%} on elements of two bytes"),
        ("optimizer", f"{reached.update:.3g} bytes a parameter"),
        (
            "shortest kernel",
            f"{format_seconds(reached.launch)}, {format_seconds(reached.dispatch)} of the host for each",
        ),
        *(_link_row("node's link", cluster.node.link)),
        *(_link_row("network card", cluster.network)),
        *(_host_row(cluster.node.host)),
    ]
    return "\n".join(f"{name:<18} {value}" for name, value in rows)


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.4g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.4g} GFLOP/s"


def _host_row(host: Host | None) -> list[tuple[str, str]]:
    if host is None:
        return []
    rate, share = (f"{format_bytes(each, decimal=True)}/s" for each in (host.rate, host.bandwidth))
    return [("host memory", f"{format_bytes(host.memory)}, {rate} to a device, {share} of steps there")]


def _link_row(name: str, link: Link | None) -> list[tuple[str, str]]:
    if link is None:
        return []
    rate = format_bytes(link.rate, decimal=True)
    words = f"{rate}/s, {format_seconds(link.latency)} a hop, collectives reach {link.reach:.0%}"
    if link.shared is not None:
        words += f", {format_bytes(link.shared, decimal=True)}/s in memory that ranks share"
    return [(name, words)]


def _mean(own: Reading, transport: Transport) -> Reading:
    """Return the mean over all ranks. A dtype that some rank cannot multiply is left out."""

    def means(values: Sequence[float]) -> list[float]:
        total = transport.total(torch.tensor(values, dtype=torch.float64))
        return (total / transport.place.mesh.world).tolist()

    names = [field.name for field in fields(own) if field.name != "rates"]
    figures = means([getattr(own, name) for name in names])
    rates = means([own.rates.get(dtype, math.nan) for dtype in DTYPES])
    known = {dtype: rate for dtype, rate in zip(DTYPES, rates, strict=True) if not math.isnan(rate)}
    return replace(own, rates=known, **dict(zip(names, figures, strict=True)))


def _mean_of_host(own: HostReading, transport: Transport) -> HostReading:
    """Return the mean over all ranks."""
    names = [field.name for field in fields(own)]
    values = torch.tensor([float(getattr(own, name)) for name in names], dtype=torch.float64)
    total = transport.total(values) / transport.place.mesh.world
    return HostReading(**dict(zip(names, total.tolist(), strict=True)))


def _rounded(value: Any) -> Any:
    match value:
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
        case float():
            return float(f"{value:.{DIGITS}g}")
    return value
