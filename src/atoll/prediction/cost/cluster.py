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

An island of several adds `[uplink]`, its link to the others; a file of all islands is an
`atoll.prediction.cost.Archipelago`. A key beside `preset` replaces the preset's, one of `efficiency` that of its table.
Presets and their sources are in `presets.toml`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from atoll.base.documents import parse_toml, read_toml
from atoll.base.errors import ConfigError
from atoll.base.toml import nested_to_toml
from atoll.plans.layouts import ITEM_BYTES
from atoll.plans.plan import MeshShape
from atoll.program.host import IN, OUT, STEPS
from atoll.program.sim import Speed

Above = Annotated[float, Field(gt=0)]
NotBelow = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
_Count = Annotated[int, Field(ge=1)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Efficiency(_Table):
    """Efficiency of kernels, relative to a device's rates.

    products: share of the peak that a large matrix product reaches.
    depth: inner size of a product that reaches half of that share.
    waves: share of the time of a last, partly filled wave of tiles that is lost.
    attention: share of the peak that fused attention reaches.
    memory: share of the memory bandwidth that all other kernels reach.
    half: factor of that share for kernels on elements of two bytes; less than 1 on a CPU, which converts them.
    update: bytes read and written per parameter at a step's end: by Adam's step with an fp32 master, and by the cast of
    its result to the dtype of the forward.
    launch: seconds of the shortest kernel on the device.
    dispatch: seconds that the host needs for a kernel, with the Python, autograd and views around it. A block takes at
    least this time for all of its kernels.
    pause: idle seconds of a stage's F and of its I, such as when the host waits for a message or the device before it
    launches the next kernels.
    spread: relative error of a step's seconds that is left after the fit of the constants; 0 if unknown.
    source: hardware or data they were measured on or fitted to.
    """

    products: Share = 0.8
    depth: NotBelow = 100.0
    waves: Annotated[float, Field(ge=0, le=1)] = 0.8
    attention: Share = 0.5
    memory: Share = 0.7
    half: Share = 1.0
    update: NotBelow = 30.0
    launch: NotBelow = 2e-6
    dispatch: NotBelow = 1e-5
    pause: NotBelow = 1e-4
    spread: Annotated[float, Field(ge=0, lt=1)] = 0.0
    source: str = ""


class Device(_Table):
    """A device.

    memory: bytes.  context: bytes taken by driver and communicators before the first tensor.
    bandwidth: of its memory, bytes a second.  units: multiprocessors, over which tiles of a product are spread.
    rates: FLOP/s by torch's dtype names, and "float8".
    """

    memory: _Count
    context: Annotated[int, Field(ge=0)] = 0
    bandwidth: Above
    units: _Count = 1
    rates: dict[str, Above]
    efficiency: Efficiency = Efficiency()
    source: str = ""

    @model_validator(mode="after")
    def _check_rates(self) -> Device:
        known = {*ITEM_BYTES, "float8"}
        unknown = sorted(set(self.rates) - known)
        if unknown or not self.rates:
            raise ValueError(f"rates of {', '.join(unknown) or 'nothing'}; known dtypes: {', '.join(sorted(known))}")
        return self

    @property
    def is_cpu(self) -> bool:
        """True if the device is a rank's share of a CPU."""
        return self.units == 1

    def rate(self, dtype: str) -> float:
        """Return the FLOP/s of products in a dtype. Raises ConfigError if the device has no rate for it."""
        if dtype not in self.rates:
            raise ConfigError(
                f"the device has no rate for {dtype}, only for {', '.join(self.rates)}; add it to [device.rates]"
            )
        return self.rates[dtype]


class Link(_Table):
    """A link of a device or of a network card, in one direction.

    rate: bytes a second.  latency: seconds of one hop.  reach: share of the rate that large messages achieve.
    burst: bytes that it transfers at once after a pause, like a token bucket; they count against its rate.
    busy: share of transfer time during which the device cannot compute: 1 if the computing processor copies, as between
    ranks on one CPU, 0 if a network card does.
    shared: bytes a second of gathers and reductions in a group whose ranks read each other's memory, as on one CPU;
    None if they exchange messages.
    """

    rate: Above
    latency: NotBelow = 0.0
    reach: Share = 1.0
    burst: NotBelow = 0.0
    busy: Annotated[float, Field(ge=0, le=1)] = 0.0
    shared: Above | None = None
    source: str = ""

    def times(self, factor: float) -> Link:
        """Return the link with a multiple of its bytes a second."""
        shared = None if self.shared is None else self.shared * factor
        return self.model_copy(update={"rate": self.rate * factor, "shared": shared})

    @property
    def goodput(self) -> float:
        """Bytes a second of large messages."""
        return self.rate * self.reach

    def speed(self, count: float) -> Speed:
        """Return the link multiplied: several links as one, or a part of one."""
        return Speed(self.latency, self.goodput * count, burst=self.burst * count, busy=self.busy)


class Host(_Table):
    """The host memory of a node, and the link between it and a device.

    memory: bytes of a node.  bandwidth: bytes a second of that memory, which all processors and links of a node share.
    rate: bytes a second of a device's link, in one direction.  latency: seconds of a copy.  reach: share of rate and
    bandwidth that large copies and updates achieve.
    uplinks: number of such links that a node has, where its devices share them, as behind switches; one a device if not
    given.
    """

    memory: _Count
    bandwidth: Above
    rate: Above
    latency: NotBelow = 0.0
    reach: Share = 0.8
    uplinks: _Count | None = None
    source: str = ""

    def times(self, factor: float) -> Host:
        """Return the host with a multiple of the link's bytes a second."""
        return self.model_copy(update={"rate": self.rate * factor})


class Node(_Table):
    """A node: devices with a link each, network cards that they share, and host memory. link: None for one device.
    host: needed only to predict what rests there."""

    devices: _Count = 1
    cards: _Count = 1
    link: Link | None = None
    host: Host | None = None

    @model_validator(mode="after")
    def _check_link(self) -> Node:
        if self.devices > 1 and self.link is None:
            raise ValueError(f"{self.devices} devices and no link between them; add [node.link]")
        return self


class Cluster(_Table):
    """Nodes of one kind. network: the link of one card; None for one node.

    nodes: maximum number that a planner may use; predictions use as many as the plan needs.
    uplink: the link to other islands, which all ranks share; None for a cluster that is no island, or if it is unknown.
    """

    nodes: _Count = 1
    device: Device
    node: Node
    network: Link | None = None
    uplink: Link | None = None

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
            return Cluster.model_validate(with_presets(values))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        except ValidationError as error:
            problems = problems_of(error)
            raise ConfigError("\n  ".join([f"{source}: {len(problems)} problems", *problems])) from error

    def tables(self) -> dict[str, Any]:
        """Return the tables of its TOML, with presets expanded and defaults left out."""
        return self.model_dump(exclude_none=True, exclude_unset=True)

    def dump(self) -> str:
        """Return TOML that `read` reads back to an equal cluster."""
        return nested_to_toml(self.tables())

    def along(self, mesh: MeshShape, axis: str) -> Speed:
        """Return the link of each rank for a collective along an axis, while all groups along it communicate. Besides
        the axes of the mesh there are `expert`, ranks that divide experts, also with their tensor-parallel groups
        (`expert x tp`), `shard`, those that share them, and `sequence`, those that divide sequences.

        A ring crosses between nodes once in each direction, so the ranks of a group in one node share one group's part
        of the cards. Ranks that divide experts or sequences send to all others: each has its own part of the cards, for
        what leaves the node. Raises ConfigError if the axis leaves the node and there is no network.
        """
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
        devices, sizes = self.node.devices, mesh.sizes
        axes = list(sizes)
        at = axes.index("pp")
        stride = math.prod(sizes[axis] for axis in axes[at + 1 :])
        outer = math.prod(sizes[axis] for axis in axes[:at])
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


_ALL_TO_ALL = ("expert", "expert x tp", "sequence")
"""Axes along which each rank sends to all others."""


def _stretch(mesh: MeshShape, axis: str) -> tuple[int, int]:
    """Return how far neighbours along an axis are apart, and the number of ranks along it."""
    sizes = mesh.sizes
    own = "intra" if axis in (*_ALL_TO_ALL, "shard") else axis
    names = list(sizes)
    inner = math.prod(sizes[name] for name in names[names.index(own) + 1 :])
    if axis == "shard":
        return inner * mesh.expert, mesh.intra // mesh.expert
    return inner, {"sequence": mesh.sequence}.get(axis, mesh.expert) if axis in _ALL_TO_ALL else sizes[own]


@lru_cache(maxsize=1)
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return presets by kind ("devices", "links" and "hosts") and name, as tables."""
    text = files("atoll.prediction.cost").joinpath("presets.toml").read_text(encoding="utf-8")
    return parse_toml(text)


def problems_of(error: ValidationError) -> list[str]:
    """Return what is wrong with the tables of a cluster, a line for each key."""
    return [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]


def with_presets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a cluster with presets expanded. Raises ConfigError for an unknown one."""
    found = {key: dict(table) if isinstance(table, Mapping) else table for key, table in values.items()}
    if isinstance(found.get("device"), dict):
        found["device"] = _filled(found["device"], "devices")
    for key in ("network", "uplink"):
        if isinstance(found.get(key), dict):
            found[key] = _filled(found[key], "links")
    node = found.get("node")
    if isinstance(node, dict) and isinstance(node.get("link"), Mapping):
        node["link"] = _filled(node["link"], "links")
    if isinstance(node, dict) and isinstance(node.get("host"), Mapping):
        node["host"] = _filled(node["host"], "hosts")
    return found


def _filled(table: Mapping[str, Any], kind: str) -> dict[str, Any]:
    own = dict(table)
    name = own.pop("preset", None)
    if name is None:
        return own
    known = presets()[kind]
    if name not in known:
        raise ConfigError(f"no preset {name!r} among the {kind}; known: {', '.join(known)}")
    return _over(known[name], own)


def _over(preset: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset's keys overridden by others, also in nested tables."""
    tables = {key: _over(preset[key], table) for key, table in own.items() if _is_table(table, preset.get(key))}
    return {**preset, **own, **tables}


def _is_table(*values: object) -> bool:
    return all(isinstance(value, Mapping) for value in values)
