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

NAME_BYTES = 128
"""Bytes of a device's name that tell kinds of nodes apart."""

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

    Consecutive nodes whose devices have one name are of a kind; each kind has the means of its ranks, and the link
    between nodes is measured once for all. The result is the same on every rank. Raises ConfigError if nodes have
    different numbers of ranks.
    """
    rank = world_rank()
    transport = connect(MeshShape(intra=world).place(rank), device)
    total, squares = transport.total(torch.tensor([local, local**2])).tolist()
    if world % local or world * squares != total**2:  # equal only if all are, so that every rank raises or none
        raise ConfigError(f"rank {rank}'s node has {local} of {world} ranks, others have more or fewer; start as many")
    at_once = f", {local} at once" if local > 1 else ""
    version, today = torch.__version__, datetime.date.today().isoformat()
    shape, kinds = MeshShape(inter=world // local, intra=local), _kinds(describe_device(device), transport, local=local)
    sources = [f"measured on {name}{at_once}, torch {version}, {today}" for name, _ in kinds]
    links = [
        read_links(shape, nodes=nodes, rank=rank, device=device, budget=seconds, cards=cards, source=source)
        for (_, nodes), source in zip(kinds, sources, strict=True)
    ]
    stopwatch = Stopwatch(device, seconds, typical=statistic(device, local))
    reading = read_device(stopwatch, transport.barrier, dtypes=dtypes)
    # The memory of a CPU is the device's own.
    copies = read_host(stopwatch, transport.barrier) if device.type == "cuda" else None
    found = []
    for at, ((name, nodes), source) in enumerate(zip(kinds, sources, strict=True)):
        own = _Means(transport, range(nodes.start * local, nodes.stop * local))
        device_of = to_device(own.reading(reading), device, local_ranks=local, source=source)
        if len(kinds) > 1:
            sizes = own([float(device_of.memory), float(device_of.units)])
            device_of = device_of.model_copy(update=dict(zip(("memory", "units"), map(round, sizes), strict=True)))
        host = None if copies is None else host_of(own.host(copies), local_ranks=local, source=source)
        node = Node(devices=local, cards=cards, link=links[at].node, host=host)
        kind = Cluster(device=device_of, node=node, network=links[0].network)
        found.append(kind if len(kinds) == 1 else kind.model_copy(update={"nodes": len(nodes), "name": name}))
    transport.close()
    return found[0] if len(found) == 1 else Cluster.join(found)


def _kinds(name: str, transport: Transport, *, local: int) -> list[tuple[str, range]]:
    """Return the names of the devices, and the consecutive nodes that have them. name: of this rank's device."""
    nodes, rank = transport.place.mesh.world // local, transport.place.rank
    codes = torch.zeros(nodes, NAME_BYTES)
    if rank % local == 0:
        text = name.encode()[:NAME_BYTES]
        codes[rank // local, : len(text)] = torch.tensor(list(text), dtype=codes.dtype)
    rows = transport.total(codes.flatten()).reshape(nodes, NAME_BYTES).tolist()
    names = [bytes(int(code) for code in row).rstrip(b"\0").decode(errors="ignore") for row in rows]
    found: list[tuple[str, range]] = []
    for node, each in enumerate(names):
        if found and found[-1][0].partition(" (")[0] == each:
            found[-1] = found[-1][0], range(found[-1][1].start, node + 1)
        else:
            again = sum(known.partition(" (")[0] == each for known, _ in found)
            found.append((f"{each} ({again + 1})" if again else each, range(node, node + 1)))
    return found


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
    """Return the measurements, one line each; of nodes of several kinds one kind after the other."""
    if cluster.groups:
        parts = zip(cluster.ranks_of_kinds(), map(describe_cluster, cluster.groups), strict=True)
        return "\n\n".join(f"ranks {own.start} to {own.stop - 1}: {kind.name}\n{text}" for (kind, own), text in parts)
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


class _Means:
    """The means of measurements over some of the ranks, the same on every rank."""

    def __init__(self, transport: Transport, ranks: range) -> None:
        self._transport, self._ranks = transport, ranks

    def __call__(self, values: Sequence[float]) -> list[float]:
        """Return the means of values that each rank has of its own."""
        own = torch.tensor(values, dtype=torch.float64)
        takes_part = self._transport.place.rank in self._ranks
        total = self._transport.total(own if takes_part else torch.zeros_like(own))
        return (total / len(self._ranks)).tolist()

    def reading(self, own: Reading) -> Reading:
        """Return the mean of a device. A dtype that some rank cannot multiply is left out."""
        names = [field.name for field in fields(own) if field.name != "rates"]
        figures = self([getattr(own, name) for name in names])
        rates = self([own.rates.get(dtype, math.nan) for dtype in DTYPES])
        known = {dtype: rate for dtype, rate in zip(DTYPES, rates, strict=True) if not math.isnan(rate)}
        return replace(own, rates=known, **dict(zip(names, figures, strict=True)))

    def host(self, own: HostReading) -> HostReading:
        """Return the mean of host memory."""
        names = [field.name for field in fields(own)]
        return HostReading(**dict(zip(names, self([float(getattr(own, name)) for name in names]), strict=True)))


def _rounded(value: Any) -> Any:
    match value:
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
        case list():
            return [_rounded(each) for each in value]
        case float():
            return float(f"{value:.{DIGITS}g}")
    return value
