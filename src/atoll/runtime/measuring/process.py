"""`atoll doctor --measure`: the parent that starts local ranks, the measurement in each rank, and rank 0's file."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.base.errors import ConfigError, RunError
from atoll.runtime.failure import Watch
from atoll.runtime.launch import exit_with_error, launch_local, watch_parent
from atoll.runtime.rendezvous import Rendezvous, meet, torchrun_environment

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from atoll.prediction.cost import Cluster

TIMEOUT = 300.0
"""Seconds until a silent rank is abandoned."""
LOCAL_RANKS = 2
"""Number of ranks without a GPU."""


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """Options of `atoll doctor --measure`.

    path: the file to write.  ranks: local processes; None for one per GPU, or two.  cards: network cards of a node.
    seconds: for each quantity.  as_json: print the tables as one JSON object.
    """

    path: Path
    ranks: int | None = None
    cards: int = 1
    seconds: float = 0.2
    as_json: bool = False

    @property
    def command(self) -> list[str]:
        """Return the command of a rank."""
        words = ["doctor", "--measure", str(self.path), "--cards", str(self.cards), "--seconds", str(self.seconds)]
        return [sys.executable, "-m", "atoll", *words, *["--json"] * self.as_json]


def run_measurement(request: MeasureRequest) -> int:
    """Measure as a rank if the environment describes one, or start the ranks. Return the exit code."""
    rendezvous = torchrun_environment()
    if rendezvous is not None:
        return _run_rank(request, rendezvous)
    _check(request)
    gpus = _count_gpus()
    ranks = request.ranks or gpus or LOCAL_RANKS
    _check_gpus(gpus, ranks)
    return launch_local(request.command, ranks)


def _run_rank(request: MeasureRequest, rendezvous: Rendezvous) -> int:
    """Run one rank from start to end and return its exit code. Errors end the process, see `exit_with_error`."""
    return take_part(rendezvous, lambda store: _measure(request, rendezvous, store))


def take_part(rendezvous: Rendezvous, measure: Callable[[Store], None]) -> int:
    """Meet the other ranks, and measure with them. Return the exit code; errors end in `exit_with_error`."""
    watch_parent()
    watch: Watch | None = None
    try:
        store, watch = meet(rendezvous, TIMEOUT)
        with watch.section("measurements"):
            measure(store)
        watch.stop()
    except Exception as error:
        exit_with_error(error, watch, rendezvous)
    return 0


def _measure(request: MeasureRequest, rendezvous: Rendezvous, store: Store) -> None:
    from atoll.runtime import transport
    from atoll.runtime.measuring.measure import measure_cluster

    start = time.monotonic()
    if rendezvous.rank == 0:
        _check(request)
        sys.stderr.write(f"measuring {rendezvous.world} ranks\n")
    device = choose_device(rendezvous)
    transport.join(rendezvous.rank, rendezvous.world, store, device=device, timeout=TIMEOUT)
    cluster = measure_cluster(
        rendezvous.world,
        local=rendezvous.local_world,
        device=device,
        seconds=request.seconds,
        cards=request.cards,
    )
    if rendezvous.rank == 0:
        _conclude(request, cluster, seconds=time.monotonic() - start)
    transport.leave()


def _conclude(request: MeasureRequest, cluster: Cluster, *, seconds: float) -> None:
    from atoll.base.units import format_seconds
    from atoll.runtime.measuring.measure import cluster_to_toml, describe_cluster, to_tables

    write_cluster(request.path, cluster_to_toml(cluster))
    text = json.dumps(to_tables(cluster), indent=2) if request.as_json else describe_cluster(cluster)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    sys.stderr.write(f"wrote {request.path} after {format_seconds(seconds)}\n")


def write_cluster(path: Path, text: str) -> None:
    """Write a whole file: an old one stays until the new one is complete. Raises RunError if the disk fails."""
    draft = path.with_name(f".{path.name}.new")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error


def _check(request: MeasureRequest) -> None:
    """Check in advance that the measurement is possible and the file can be written."""
    for name, value in (("ranks", request.ranks), ("cards", request.cards)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: at least 1")
    if not 0 < request.seconds <= 60:
        raise ConfigError(f"--seconds {request.seconds:g}: seconds for each quantity, above 0 and at most 60")
    folder = request.path.absolute().parent
    if request.path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--measure {request.path}: cannot write there; name a file in a folder that exists")


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_gpus(gpus: int, ranks: int) -> None:
    if 0 < gpus < ranks:
        raise ConfigError(
            f"{ranks} ranks on {gpus} GPUs, and each needs one of its own; start fewer, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= to measure the CPU"
        )


def choose_device(rendezvous: Rendezvous) -> torch.device:
    """Return a separate GPU for each rank of this machine, or the CPU if there are none."""
    import torch

    gpus = _count_gpus()
    _check_gpus(gpus, rendezvous.local_world)
    if not gpus:
        return torch.device("cpu")
    torch.cuda.set_device(rendezvous.local_rank)
    return torch.device("cuda", rendezvous.local_rank)
