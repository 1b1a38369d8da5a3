"""The cluster of a run that names none: this machine, as it was measured before.

Only the process that starts local ranks measures, once for a number of ranks; it finds the result in the user's cache
the next time, and so do its ranks, those of a launcher on one machine, and `atoll predict`, `plan` and `explain`.
Several machines are not measured: their network takes all of them, see `atoll doctor --measure`.
"""

from __future__ import annotations

from atoll.base.errors import ConfigError, RunError
from atoll.base.machine import graphics_names
from atoll.plans.layouts import Precision
from atoll.prediction.cost import Cluster
from atoll.runtime.measuring.known import Machine
from atoll.runtime.places import measures
from atoll.runtime.rendezvous import restarts
from atoll.training.config import Config


def machine_of(config: Config, ranks: int, device: str | None = None) -> Machine | None:
    """Return what would be measured for `ranks` of this machine. device: "cpu" or "cuda", if it is known.

    None if run.cluster or ATOLL_MEASURE makes it unnecessary, and without GPUs that the config requires.
    """
    if config.run.cluster is not None or not measures():
        return None
    names, wanted = graphics_names(), config.parallel.device
    if device is None:
        if wanted == "cuda" and not names:
            return None
        device = "cuda" if names and has_gpus(config, ranks) else "cpu"
    return Machine.of(ranks, device, Precision.preset(config.train.precision).compute)


def measured_cluster(config: Config, ranks: int, device: str | None = None) -> Cluster | None:
    """Return this machine as it was measured for as many ranks, or None."""
    machine = machine_of(config, ranks, device)
    return None if machine is None else machine.find()


def has_gpus(config: Config, ranks: int) -> bool:
    """Return True if `ranks` of this machine have a GPU each. Raises ConfigError if the config requires GPUs and there
    are too few, and RunError if there were enough before: fewer ranks may continue."""
    import torch

    wanted = config.parallel.device
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cuda" and count < ranks:
        words = (
            f"parallel.device = 'cuda': this machine has {count} GPUs for {ranks} ranks, and each needs one of its own"
        )
        if restarts():
            raise RunError(f"{words}: one that was there is lost")
        raise ConfigError(f"{words}; use fewer parallel.ranks, or device = 'cpu'")
    return wanted != "cpu" and count >= ranks
