"""Measurements of this machine that are kept in the user's cache folder. Imports no torch without a GPU.

A file holds one measurement as the tables of a cluster, beside the table `machine`, which says what was measured. Its
name is a digest of that table: another processor, number of ranks or version of torch is another file. A file that
cannot be read, or that is of another machine, is as good as none. If the cache folder cannot be written, as in a
read-only home, the file is in a folder of the user's own among the temporary ones.
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from atoll.base.digests import digest
from atoll.base.documents import read_toml
from atoll.base.errors import AtollError, ConfigError
from atoll.base.machine import graphics_names, machine_memory, processor_name
from atoll.base.toml import nested_to_toml
from atoll.prediction.cost import Cluster
from atoll.runtime.launch import (
    LaunchResult,
    cores,
    run_local,
    threads_of,
)
from atoll.runtime.measuring.errand import Errand
from atoll.runtime.measuring.process import write_cluster
from atoll.runtime.places import cache_folder, private_folder
from atoll.runtime.template import Template

FORM = 1
"""Version of the measurement, increased when it measures differently."""
SECONDS = 0.05
"""For each of some forty quantities."""
LIMIT = 30.0
"""Seconds that a rank may be silent."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that a measurement depends on.

    ranks: of this machine, which compute at once.  device: "cpu" or "cuda".  dtype: of products, by torch's name.
    threads: of a rank.  cores: that this process may use.  memory: bytes.
    """

    ranks: int
    device: str
    dtype: str
    threads: int
    cores: int = field(default_factory=cores)
    memory: int = field(default_factory=machine_memory)
    host: str = field(default_factory=platform.node)
    processor: str = field(default_factory=processor_name)
    graphics: tuple[str, ...] = field(default_factory=graphics_names)
    torch: str = field(default_factory=lambda: metadata.version("torch"))
    form: int = FORM

    @classmethod
    def of(cls, ranks: int, device: str, dtype: str) -> Machine:
        """Return this machine, for ranks on it that compute in a dtype."""
        return cls(ranks, device, dtype, threads_of(ranks))

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"machine-{digest(json.dumps(asdict(self)).encode())[:16]}.toml"

    def find(self) -> Cluster | None:
        """Return the cluster that was measured, or None."""
        return next(self._found(), None)

    def _found(self) -> Iterator[Cluster]:
        for folder in _folders():
            with suppress(OSError, ValueError, AtollError):
                tables: dict[str, Any] = dict(read_toml(folder / self.name))
                if tables.pop("machine", None) == {**asdict(self), "graphics": list(self.graphics)}:
                    yield Cluster.of(tables, source=str(folder / self.name))

    def keep(self, tables: Mapping[str, Any]) -> None:
        """Write the tables of a measured cluster. Raises ConfigError if no folder can be written."""
        text = nested_to_toml({"machine": {**asdict(self), "graphics": list(self.graphics)}, **tables})
        for folder in _folders():
            with suppress(OSError, AtollError):
                folder.mkdir(parents=True, exist_ok=True)
                write_cluster(folder / self.name, text)
                return
        raise ConfigError(f"cannot write {' or '.join(str(folder) for folder in _folders())}")


def measure_here(machine: Machine, template: Template | None = None) -> LaunchResult:
    """Measure this machine in local ranks, and keep what they find. Return how they ended; those that failed have
    printed why.

    template: of ranks that call `run_errand`, as those of `atoll train` do. Raises ConfigError if nothing can be kept.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
        errand = Errand(str(Path(folder) / "cluster.toml"), machine.device, machine.dtype, SECONDS)
        ending = run_local(errand.command, machine.ranks, errand=errand.dump(), template=template, limit=LIMIT)
        if ending.code == 0:
            machine.keep(read_toml(errand.path))
    return ending


def _folders() -> tuple[Path, ...]:
    own = private_folder(Path(tempfile.gettempdir()))
    return (cache_folder(), *([] if own is None else [own]))
