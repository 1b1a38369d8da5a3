"""A device, a link, a node and its host as tables, and their presets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from atoll.base.documents import parse_toml
from atoll.base.errors import ConfigError
from atoll.plans.layouts import ITEM_BYTES
from atoll.program.sim import Speed

Above = Annotated[float, Field(gt=0)]
NotBelow = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class HardwareTable(BaseModel):
    """A table of constants."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Efficiency(HardwareTable):
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


class Device(HardwareTable):
    """A device.

    memory: bytes.  context: bytes taken by driver and communicators before the first tensor.
    bandwidth: of its memory, bytes a second.  units: multiprocessors, over which tiles of a product are spread.
    rates: FLOP/s by torch's dtype names, and "float8".
    """

    memory: Count
    context: Annotated[int, Field(ge=0)] = 0
    bandwidth: Above
    units: Count = 1
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


class Link(HardwareTable):
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


class Host(HardwareTable):
    """The host memory of a node, and the link between it and a device.

    memory: bytes of a node.  bandwidth: bytes a second of that memory, which all processors and links of a node share.
    rate: bytes a second of a device's link, in one direction.  latency: seconds of a copy.  reach: share of rate and
    bandwidth that large copies and updates achieve.
    uplinks: number of such links that a node has, where its devices share them, as behind switches; one a device if not
    given.
    """

    memory: Count
    bandwidth: Above
    rate: Above
    latency: NotBelow = 0.0
    reach: Share = 0.8
    uplinks: Count | None = None
    source: str = ""

    def times(self, factor: float) -> Host:
        """Return the host with a multiple of the link's bytes a second."""
        return self.model_copy(update={"rate": self.rate * factor})


class Node(HardwareTable):
    """A node: devices with a link each, network cards that they share, and host memory. link: None for one device.
    host: needed only to predict what rests there."""

    devices: Count = 1
    cards: Count = 1
    link: Link | None = None
    host: Host | None = None

    @model_validator(mode="after")
    def _check_link(self) -> Node:
        if self.devices > 1 and self.link is None:
            raise ValueError(f"{self.devices} devices and no link between them; add [node.link]")
        return self


@lru_cache(maxsize=1)
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return presets by kind ("devices", "links" and "hosts") and name, as tables."""
    text = files("atoll.prediction.cost").joinpath("presets.toml").read_text(encoding="utf-8")
    return parse_toml(text)


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
