"""The parts of docs/clusters.md: the keys of a cluster's tables, and the presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from charts import markdown_table
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from atoll.base.toml import value_to_toml
from atoll.base.units import format_bytes, format_seconds
from atoll.prediction.cost import Cluster, Device, Efficiency, Host, Link, Node, presets

MEANINGS: Mapping[str, str] = {
    "nodes": "how many nodes a planner may use; predictions take as many as the plan needs. Or tables `[[nodes]]` of "
    "several kinds, with `count` (1), `name` (that of the preset), `device`, `node` and `network`; see below",
    "device.memory": "bytes of a device; on the CPU, of a rank",
    "device.context": "bytes that are taken before the first tensor, by driver and communicators",
    "device.bandwidth": "bytes a second of its memory",
    "device.units": "multiprocessors, over which the tiles of a product are spread; 1 on the CPU",
    "device.rates": 'FLOP/s of products by torch\'s names of dtypes, as in `{ bfloat16 = 989e12 }`, and "float8"',
    "device.efficiency": "what kernels reach of these rates, see below",
    "device.source": "where the figures are from",
    "device.efficiency.products": "share of the rate that a large product reaches",
    "device.efficiency.depth": "inner size of a product at which half of that is lost",
    "device.efficiency.waves": "share of the time of a last, partly filled wave of tiles that is lost",
    "device.efficiency.attention": "share of the rate that fused attention reaches",
    "device.efficiency.memory": "share of the bandwidth that everything else reaches",
    "device.efficiency.half": "share of that which kernels on elements of two bytes reach; less than 1 on a CPU, which "
    "converts them",
    "device.efficiency.update": "bytes that the optimizer reads and writes for a parameter, with a master in fp32",
    "device.efficiency.launch": "seconds of the shortest kernel",
    "device.efficiency.dispatch": "seconds that the host needs to launch a kernel",
    "device.efficiency.pause": "seconds of a stage's F and of its I that no kernel fills",
    "device.efficiency.spread": "relative error of a step that these constants left, or that is to be expected",
    "device.efficiency.source": "where the figures are from",
    "node.devices": "devices of a node",
    "node.cards": "network cards of a node, which its devices share evenly",
    "node.link": "between two devices of a node: a link; needed where there are two",
    "node.host": "the memory of the node's host, and a device's link to it: needed to predict what rests there",
    "host.memory": "bytes of a node",
    "host.bandwidth": "bytes a second of that memory, which all processors and links of the node share",
    "host.rate": "bytes a second of a device's link to it, in one direction",
    "host.latency": "seconds of a copy",
    "host.reach": "share of rate and bandwidth that large copies and updates reach",
    "host.uplinks": "such links of a node where its devices share them, as behind switches; one a device if not given",
    "host.source": "where the figures are from",
    "network": "of one network card: a link; needed where there are two nodes",
    "uplink": "to the other islands of a federation, in one direction: a link, which all ranks share; see below",
    "link.rate": "bytes a second in one direction",
    "link.latency": "seconds of one hop",
    "link.reach": "share of the rate that collectives of large buffers reach",
    "link.burst": "bytes that it carries at once after a pause, as a token bucket does; they count against its rate",
    "link.busy": "share of the time of what it carries during which the device computes nothing: 1 where its own "
    "processor copies, as between ranks on one CPU",
    "link.shared": "bytes a second of gathers and reductions in a group whose ranks read each other's memory, as on "
    "one CPU; not given where they exchange messages",
    "link.source": "where the figures are from",
}

TABLES: Mapping[str, type[BaseModel]] = {
    "device": Device,
    "device.efficiency": Efficiency,
    "node": Node,
    "link": Link,
    "host": Host,
}


def keys() -> str:
    rows = []
    for table, model in TABLES.items():
        for key, field in model.model_fields.items():
            name = f"{table}.{key}"
            has_own_table = name in TABLES or field.default is None
            default = (
                "" if has_own_table else "required" if field.is_required() else f"`{value_to_toml(field.default)}`"
            )
            rows.append([f"`{name}`", default, MEANINGS[name]])
    rows.insert(0, ["`nodes`", "`1`", MEANINGS["nodes"]])
    rows += [[f"`{key}`", "", MEANINGS[key]] for key in ("network", "uplink")]
    unknown = set(MEANINGS) - {row[0].strip("`") for row in rows}
    assert not unknown, f"meanings of keys that do not exist: {sorted(unknown)}"
    assert set(Cluster.model_fields) == {"nodes", "device", "node", "network", "uplink", "name", "groups"}
    return markdown_table(["key", "default", "meaning"], rows)


def _default_of(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "" if name in TABLES or field.default is None else f"`{value_to_toml(field.default)}`"


def devices() -> str:
    rows = []
    for name in presets()["devices"]:
        device = Cluster.of({"device": {"preset": name}, "node": {}}).device
        rates = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in device.rates.items())
        bandwidth = f"{format_bytes(device.bandwidth, decimal=True)}/s"
        rows.append([f"`{name}`", format_bytes(device.memory), bandwidth, rates, device.source])
    return markdown_table(["device", "memory", "bandwidth", "TFLOP/s", "source"], rows)


def efficiencies() -> str:
    """A column for the devices that have the same constants, and a line with their source."""
    columns: dict[Efficiency, list[str]] = {}
    for name in presets()["devices"]:
        device = Cluster.of({"device": {"preset": name}, "node": {}}).device
        columns.setdefault(device.efficiency, []).append(f"`{name}`")
    numbers = [key for key in Efficiency.model_fields if key != "source"]
    rows = [[f"`{key}`", *(f"{getattr(each, key):g}" for each in columns)] for key in numbers]
    head = ["", *(", ".join(names) for names in columns.values())]
    sources = [f"- {', '.join(names)}: {each.source}" for each, names in columns.items()]
    return "\n".join([markdown_table(head, rows), *sources]) + "\n"


def links() -> str:
    rows = []
    for name in presets()["links"]:
        link = Link.model_validate(presets()["links"][name])
        rate = f"{format_bytes(link.rate, decimal=True)}/s"
        rows.append([f"`{name}`", rate, format_seconds(link.latency), link.source])
    return markdown_table(["link", "rate", "latency", "source"], rows)


def hosts() -> str:
    rows = []
    for name in presets()["hosts"]:
        host = Host.model_validate(presets()["hosts"][name])
        rates = (f"{format_bytes(each, decimal=True)}/s" for each in (host.bandwidth, host.rate))
        uplinks = "one a device" if host.uplinks is None else str(host.uplinks)
        rows.append([f"`{name}`", format_bytes(host.memory), *rates, uplinks, host.source])
    return markdown_table(["host", "memory", "bandwidth", "link", "links", "source"], rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "cluster-keys": keys,
    "cluster-devices": devices,
    "cluster-efficiencies": efficiencies,
    "cluster-links": links,
    "cluster-hosts": hosts,
}
