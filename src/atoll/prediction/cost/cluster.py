"""The hardware of a plan: devices, their number per node, and the links inside and between nodes.

    nodes = 2

    [device]
    preset = "a100-80gb"

    [node]
    devices = 8
    cards = 8                     # network cards, which share the node's traffic
    link = { preset = "nvlink3" }
    host = { preset = "dgx-a100" }

    [network]
    preset = "infiniband-hdr"     # of one card

Nodes of several kinds have a table `[[nodes]]` each, with `count`, `device`, `node` and, if it is not that of all,
`network`. An island of several adds `[uplink]`, its link to the others; a file of all islands is an
`atoll.prediction.cost.Archipelago`. A key beside `preset` replaces the preset's, one of `efficiency` that of its table.
Presets and their sources are in `presets.toml`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atoll.base.documents import read_toml
from atoll.base.errors import ConfigError
from atoll.base.toml import nested_to_toml
from atoll.plans.plan import MeshShape
from atoll.prediction.cost.hardware import Count, Device, HardwareTable, Host, Link, Node, with_presets
from atoll.program.host import IN, OUT, STEPS
from atoll.program.sim import Speed


class Cluster(HardwareTable):
    """Nodes of one kind, or of several. network: the link of one card; None for one node.

    nodes: maximum number that a planner may use; predictions use as many as the plan needs, and no more than there are
    if nodes are of several kinds.
    uplink: the link to other islands, which all ranks share; None for a cluster that is no island, or if it is unknown.
    name: of the kind of the nodes, among several.
    groups: the kinds, each a cluster of its nodes alone, in the order in which ranks fill them; empty if all nodes are
    of one kind. `device`, `node` and `network` are then those of the slowest kind. See `at` for those of a rank.
    """

    nodes: Count = 1
    device: Device
    node: Node
    network: Link | None = None
    uplink: Link | None = None
    name: str = ""
    groups: tuple[Cluster, ...] = ()

    @staticmethod
    def read(path: str | Path) -> Cluster:
        """Read a TOML file. Raises ConfigError with every problem if it is not a cluster."""
        try:
            values = read_toml(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the cluster {path}: {error}") from error
        return Cluster.of(values, source=str(path))

    @staticmethod
    def of(values: Mapping[str, Any], *, source: str = "cluster") -> Cluster:
        """Validate the tables of a cluster, with preset names replaced by their values."""
        if "island" in values:
            raise ConfigError(
                f"{source}: it describes islands, and one cluster is needed; name one of them (--island), or plan all "
                "of them with `atoll plan`"
            )
        try:
            return cluster_from(values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        except ValidationError as error:
            problems = problems_of(error)
            raise ConfigError("\n  ".join([f"{source}: {len(problems)} problems", *problems])) from error

    @staticmethod
    def join(kinds: Sequence[Cluster], *, uplink: Link | None = None) -> Cluster:
        """Return the nodes of several kinds as one cluster, whose ranks fill them in this order.

        Raises ConfigError if two have one name, if their nodes have different numbers of devices, and for CPUs beside
        other devices.
        """
        names, sizes = [kind.name for kind in kinds], [kind.node.devices for kind in kinds]
        if len(set(names)) < len(names):
            raise ConfigError(f"nodes: the kinds are named {', '.join(names)}; give each a name of its own")
        if len(set(sizes)) > 1:
            raise ConfigError(
                f"nodes: {', '.join(names)} have {', '.join(map(str, sizes))} devices a node, and ranks are placed on "
                f"nodes of one size; describe a larger node as several of {math.gcd(*sizes)}"
            )
        if len({kind.device.is_cpu for kind in kinds}) > 1:
            raise ConfigError(f"nodes: of {', '.join(names)} some devices are CPUs (units = 1) and some are not")
        slowest = min(kinds, key=lambda kind: max(kind.device.rates.values()))
        return Cluster(
            nodes=sum(kind.nodes for kind in kinds),
            device=slowest.device,
            node=slowest.node,
            network=slowest.network,
            uplink=uplink,
            groups=tuple(kinds),
        )

    def tables(self) -> dict[str, Any]:
        """Return the tables of its TOML, with presets expanded and defaults left out."""
        if not self.groups:
            return self.model_dump(exclude_none=True, exclude_unset=True)
        rows = [kind.tables() for kind in self.groups]
        found: dict[str, Any] = {"nodes": [{"count": row.pop("nodes", 1), **row} for row in rows]}
        return found if self.uplink is None else found | {"uplink": self.uplink.model_dump(exclude_unset=True)}

    def dump(self) -> str:
        """Return TOML that `read` reads back to an equal cluster."""
        return nested_to_toml(self.tables())

    # ---- kinds of nodes

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        """The kinds of nodes; this cluster alone if all are of one."""
        return self.groups or (self,)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kinds, in the order of ranks; none if all nodes are of one."""
        return tuple(kind.name for kind in self.groups)

    def at(self, mesh: MeshShape, rank: int) -> tuple[Cluster, ...]:
        """Return the kinds of nodes at the places of a pipeline rank.

        The pipeline rank is as slow as the slowest of them, and holds what fits the smallest. Raises ConfigError if
        there are several kinds and fewer devices than ranks.
        """
        if not self.groups:
            return (self,)
        devices = self.node.devices
        if mesh.world > self.nodes * devices:
            raise ConfigError(
                f"{mesh.world} ranks on {self.nodes} nodes of {devices} devices: nodes are of several kinds, so each "
                "is listed; use fewer ranks, or raise the count of one of [[nodes]]"
            )
        stride = mesh.stride("pp")
        starts = range(rank * stride, mesh.world, stride * mesh.pipeline)
        places = [range(first, first + stride) for first in starts]
        return tuple(
            kind
            for kind, ranks in self.ranks_of_kinds()
            if any(own.start < ranks.stop and ranks.start < own.stop for own in places)
        )

    def ranks_of_kinds(self) -> Iterator[tuple[Cluster, range]]:
        """Yield each kind, and the ranks of a world on its nodes."""
        first = 0
        for kind in self.kinds:
            after = first + kind.nodes * self.node.devices
            yield kind, range(first, after)
            first = after

    def each(self, change: Callable[[Cluster], Cluster]) -> Cluster:
        """Return the cluster with the nodes of every kind changed."""
        if not self.groups:
            return change(self)
        return Cluster.join([change(kind) for kind in self.groups], uplink=self.uplink)

    def with_links(self, change: Callable[[Link], Link]) -> Cluster:
        """Return the cluster with the links inside nodes changed."""

        def changed(kind: Cluster) -> Cluster:
            link = None if kind.node.link is None else change(kind.node.link)
            return kind.model_copy(update={"node": kind.node.model_copy(update={"link": link})})

        return self.each(changed)

    def with_network(self, change: Callable[[Link], Link]) -> Cluster:
        """Return the cluster with the links between nodes changed."""
        return self.each(
            lambda kind: kind.model_copy(update={"network": None if kind.network is None else change(kind.network)})
        )

    def with_memory(self, share: float) -> Cluster:
        """Return the cluster with a share of the devices' memory."""

        def changed(kind: Cluster) -> Cluster:
            memory = int(kind.device.memory * share)
            return kind.model_copy(update={"device": kind.device.model_copy(update={"memory": memory})})

        return self.each(changed)

    def ordered(self, names: Sequence[str]) -> Cluster:
        """Return the cluster with its kinds in another order. Raises ConfigError for other names than theirs."""
        known = {kind.name: kind for kind in self.groups}
        if sorted(names) != sorted(known):
            raise ConfigError(
                f"nodes = {', '.join(names)}: the cluster has "
                + (f"the kinds {', '.join(known)}; name each once" if known else "nodes of one kind; leave it out")
            )
        return Cluster.join([known[name] for name in names], uplink=self.uplink)

    def mean_rate(self, world: int, dtype: str) -> float:
        """Return the FLOP/s of products in a dtype, mean over the devices of a world. Raises ConfigError if a device
        has no rate for it."""
        if not self.groups:
            return self.device.rate(dtype)
        rates = (
            kind.device.rate(dtype) * len(ranks[: max(0, world - ranks.start)]) for kind, ranks in self.ranks_of_kinds()
        )
        return sum(rates) / world

    # ---- links

    def along(self, mesh: MeshShape, axis: str) -> Speed:
        """Return the link of each rank for a collective along an axis, while all groups along it communicate. Besides
        the axes of the mesh there are `expert`, ranks that divide experts, also with their tensor-parallel groups
        (`expert x tp`), `shard`, those that share them, and `sequence`, those that divide sequences.

        A ring crosses between nodes once in each direction, so the ranks of a group in one node share one group's part
        of the cards. Ranks that divide experts or sequences send to all others: each has its own part of the cards, for
        what leaves the node. Of nodes of several kinds it is the slowest link. Raises ConfigError if the axis leaves
        the node and there is no network.
        """
        if self.groups:
            return slower(*(kind.along(mesh, axis) for kind in self.groups))
        inner, size = _stretch(mesh, axis)
        near = 1 if inner >= self.node.devices else min(size, self.node.devices // inner)
        if axis == "expert x tp":
            near, size = near * mesh.tensor, size * mesh.tensor
        inside = self.node.link
        if near == size:
            found = self.inside()
            if inside is None or inside.shared is None or axis not in ("intra", "shard"):
                return found
            return replace(found, rate=inside.shared)
        if self.network is None:
            raise ConfigError(
                f"ranks along {axis!r} are {inner * size} apart, a node has {self.node.devices} devices and the "
                "cluster no [network]; add one, or use fewer ranks"
            )
        groups = self.node.devices // near
        if axis in _ALL_TO_ALL:
            found = self.network.speed(self.node.cards / self.node.devices)
            found = replace(found, rate=found.rate * (size - 1) / (size - near))
        else:
            found = self.network.speed(self.node.cards / groups)
        if inside is not None and near > 1:
            return replace(found, rate=min(found.rate, inside.goodput))
        return found

    def share_nodes(self, mesh: MeshShape, one: int, other: int) -> bool:
        """Return True if two pipeline ranks are on one node in each of the pipelines that run side by side."""
        devices, stride = self.node.devices, mesh.stride("pp")
        outer = mesh.world // (stride * mesh.pipeline)
        # Pipelines begin at each of these places in a node, which repeat after as many.
        begins = {
            (number * stride * mesh.pipeline + inner) % devices
            for number in range(min(outer, devices))
            for inner in range(min(stride, devices))
        }
        return all((first + one * stride) // devices == (first + other * stride) // devices for first in begins)

    @property
    def host(self) -> Host:
        """The host memory of a node. Raises ConfigError if it is not known."""
        if self.node.host is None:
            raise ConfigError(
                "the cluster has no [node.host], and the plan keeps state in host memory; add memory, bandwidth and "
                'rate, or a preset such as host = { preset = "dgx-h100" }'
            )
        return self.node.host

    def to_host(self, mesh: MeshShape) -> dict[str, Speed]:
        """Return a device's link to host memory, in both directions, and its share of that memory while all devices of
        the node copy or are stepped there: by axis of `atoll.program.host`."""
        host, devices = self.host, min(self.node.devices, mesh.world)
        uplinks = min(devices, host.uplinks or devices)
        # Copies in both directions read or write the memory that the devices share.
        share = host.bandwidth / devices
        rate = min(host.rate * uplinks / devices, share) * host.reach
        link = Speed(host.latency, rate)
        return {IN: link, OUT: link, STEPS: Speed(0.0, share * host.reach)}

    def inside(self) -> Speed:
        """Return the link of a device within its node."""
        link = self.node.link
        return Speed() if link is None else link.speed(1.0)


def slower(*links: Speed) -> Speed:
    """Return the slowest link, at whose rate a transfer over all of them goes."""
    return min(links, key=lambda link: link.rate)


_ALL_TO_ALL = ("expert", "expert x tp", "sequence")
"""Axes along which each rank sends to all others."""


def _stretch(mesh: MeshShape, axis: str) -> tuple[int, int]:
    """Return how far neighbours along an axis are apart, and the number of ranks along it."""
    sizes = mesh.sizes
    own = "intra" if axis in (*_ALL_TO_ALL, "shard") else axis
    inner = mesh.stride(own)
    if axis == "shard":
        return inner * mesh.expert, mesh.intra // mesh.expert
    return inner, {"sequence": mesh.sequence}.get(axis, mesh.expert) if axis in _ALL_TO_ALL else sizes[own]


def problems_of(error: ValidationError) -> list[str]:
    """Return what is wrong with the tables of a cluster, a line for each key."""
    return [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]


def cluster_from(values: Mapping[str, Any]) -> Cluster:
    """Return the cluster of some tables. Raises ConfigError or ValidationError for tables that are not one."""
    rows = values.get("nodes")
    if not isinstance(rows, list):
        return Cluster.model_validate(with_presets(values))
    problems = [
        f"{key}: a key of nodes; write it into each [[nodes]]" for key in values if key not in ("nodes", *_OF_ALL)
    ]
    kinds = []
    for at, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            problems.append(f"nodes {at}: {row!r}; it is a table [[nodes]]")
            continue
        problems += [f"nodes {at}: {key}: a node has no such key" for key in row if key not in _OF_NODES]
        preset = row["device"].get("preset") if isinstance(row.get("device"), Mapping) else None
        own = {"name": preset or f"nodes {at}", **{key: row[key] for key in _OF_NODES[1:] if key in row}}
        own |= {"nodes": row.get("count", 1)}
        if "network" in values:
            own.setdefault("network", values["network"])
        try:
            kinds.append(Cluster.model_validate(with_presets(own)))
        except ConfigError as error:
            problems.append(f"nodes {at}: {error}")
        except ValidationError as error:
            problems += (f"nodes {at}: {each}" for each in problems_of(error))
    if problems or not kinds:
        problems = problems or ["nodes: no table [[nodes]]"]
        raise ConfigError("\n  ".join([f"{len(problems)} problems", *problems]))
    uplink = with_presets({"uplink": values["uplink"]})["uplink"] if "uplink" in values else None
    return Cluster.join(kinds, uplink=None if uplink is None else Link.model_validate(uplink))


_OF_ALL, _OF_NODES = ("network", "uplink"), ("count", "name", "device", "node", "network")
"""Keys beside `[[nodes]]`, and those of its tables."""
