"""The hardware of several islands: a cluster for each, and its link to the others.

    [between]                     # the link of each island to the others, in one direction, which all its ranks share
    rate = 125e6
    latency = 0.02

    [[island]]
    name = "north"
    nodes = 2
    device = { preset = "h100-80gb" }
    node = { devices = 8, cards = 8, link = { preset = "nvlink4" }, host = { preset = "dgx-h100" } }
    network = { preset = "infiniband-ndr" }

    [[island]]
    name = "south"
    device = { preset = "rtx4090" }
    node = { devices = 4, link = { preset = "pcie4" }, host = { preset = "workstation-pcie4" } }
    uplink = { rate = 12.5e6, latency = 0.03 }    # instead of [between]

A table of `[[island]]` has the keys of a cluster's file and a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atoll.base.documents import read_toml
from atoll.base.errors import ConfigError
from atoll.prediction.cost.cluster import Cluster, cluster_from, problems_of


@dataclass(frozen=True, slots=True)
class Archipelago:
    """Islands, which train one model together: the cluster of each, with its uplink, by name."""

    islands: Mapping[str, Cluster]

    @staticmethod
    def read(path: str | Path) -> Archipelago:
        """Read a TOML file. Raises ConfigError with every problem if it does not describe islands."""
        return Archipelago.of(_tables(path), source=str(path))

    @staticmethod
    def of(values: Mapping[str, Any], *, source: str = "islands") -> Archipelago:
        """Validate the tables of islands, with preset names replaced by their values."""
        rows = values.get("island", ())
        problems = [
            f"{key}: a key of an island; write it into its [[island]], or leave out what is not [between]"
            for key in values
            if key not in ("island", "between")
        ]
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows) or len(rows) < 2:
            problems.append("island: two tables [[island]] or more; the file of one cluster has none")
            rows = []
        found: dict[str, Cluster] = {}
        for at, row in enumerate(rows, start=1):
            name = row.get("name")
            if not isinstance(name, str) or not name:
                problems.append(f'island {at}: name: an island has a name, such as name = "north"')
                continue
            own = {key: value for key, value in row.items() if key != "name"}
            if "between" in values:
                own.setdefault("uplink", values["between"])
            if "uplink" not in own:
                problems.append(f"island {name}: uplink: its link to the other islands; add it, or [between] for all")
            try:
                found[name] = cluster_from(own)
            except ConfigError as error:
                problems.append(f"island {name}: {error}")
            except ValidationError as error:
                problems += (f"island {name}: {each}" for each in problems_of(error))
        named = Counter(row["name"] for row in rows if isinstance(row.get("name"), str))
        problems += [f"island {name}: {times} islands have this name" for name, times in named.items() if times > 1]
        if problems:
            raise ConfigError("\n  ".join([f"{source}: {len(problems)} problems", *problems]))
        return Archipelago(found)

    def __len__(self) -> int:
        return len(self.islands)

    def __iter__(self) -> Iterator[str]:
        return iter(self.islands)

    def island(self, name: str) -> Cluster:
        """Return the cluster of an island. Raises ConfigError if there is none of this name."""
        if name not in self.islands:
            raise ConfigError(f"no island {name!r} among {', '.join(self.islands)}")
        return self.islands[name]


def read_hardware(path: str | Path, island: str | None = None) -> Cluster | Archipelago:
    """Return what a TOML file describes: a cluster, or islands; of islands one, if it is named.

    Raises ConfigError with every problem, and for an island that the file does not have.
    """
    values = _tables(path)
    if "island" in values:
        every = Archipelago.of(values, source=str(path))
        return every if island is None else every.island(island)
    return Cluster.of(values, source=str(path))


def read_cluster_of(path: str | Path, island: str | None = None) -> Cluster:
    """Return the cluster of a TOML file, or that of an island in it.

    Raises ConfigError with every problem, and for a file of islands if none of them is named.
    """
    found = read_hardware(path, island)
    if isinstance(found, Archipelago):
        raise ConfigError(
            f"{path}: it describes the islands {', '.join(found)}, and one cluster is needed; name one of them"
        )
    return found


def _tables(path: str | Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the cluster {path}: {error}") from error
