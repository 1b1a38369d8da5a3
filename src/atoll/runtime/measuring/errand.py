"""A short measurement of this machine by local ranks that were started for something else, or only for it.

python -m atoll.measuring.errand
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.base.documents import parse_json
from atoll.runtime.launch import take_errand
from atoll.runtime.measuring.process import TIMEOUT, choose_device, take_part, write_cluster
from atoll.runtime.rendezvous import Rendezvous, torchrun_environment

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True, slots=True)
class Errand:
    """Settings of a measurement. path: the file that rank 0 writes.  device: "cpu" or "cuda".  dtype: of products.
    seconds: for each quantity."""

    path: str
    device: str
    dtype: str
    seconds: float

    @property
    def command(self) -> list[str]:
        """The command of a rank that does nothing else."""
        return [sys.executable, "-m", "atoll.runtime.measuring.errand"]

    def dump(self) -> str:
        """Return text for `run_errand`."""
        return json.dumps(asdict(self))


def run_errand(text: str) -> int:
    """Measure as a rank of the environment. Return the exit code; errors end the process."""
    rendezvous = torchrun_environment()
    assert rendezvous is not None, "only ranks have errands"
    errand = Errand(**parse_json(text))
    return take_part(rendezvous, lambda store: _measure(errand, rendezvous, store))


def _measure(errand: Errand, rendezvous: Rendezvous, store: Store) -> None:
    import torch

    from atoll.runtime import transport
    from atoll.runtime.measuring.measure import cluster_to_toml, measure_cluster

    device = torch.device("cpu") if errand.device == "cpu" else choose_device(rendezvous)
    transport.join(rendezvous.rank, rendezvous.world, store, device=device, timeout=TIMEOUT)
    found = measure_cluster(
        rendezvous.world,
        local=rendezvous.local_world,
        device=device,
        seconds=errand.seconds,
        dtypes=(errand.dtype,),
    )
    if rendezvous.rank == 0:
        write_cluster(Path(errand.path), cluster_to_toml(found))
    transport.leave()


if __name__ == "__main__":
    sys.exit(run_errand(take_errand()))
