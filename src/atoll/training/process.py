"""A training run: the parent that starts local processes, and what each rank does.

The life of a run:

    1. the parent checks config, plan, folder and corpus, and starts the ranks; torchrun and Slurm start them themselves
    2. a rank meets the others at the store, and watches it for their errors from then on
    3. it prepares the same corpus (cached by the first), builds its part of the model, and trains
    4. the parent starts local ranks again after a failure (`restarts.py`); torchrun does so with --max-restarts
    5. it leaves: 0, 130 or 143 after a signal and a save, 2 for the user's mistakes, 1 for failures

No torch is imported before a rank needs it.
"""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from atoll.config import Config
from atoll.cost import Cluster
from atoll.errors import ConfigError
from atoll.plans import Plan
from atoll.runtime.failure import Watch
from atoll.runtime.launch import Rendezvous, leave, meet, restarts, run_local, torchrun_environment, watch_parent
from atoll.training.choosing import load_chosen
from atoll.training.folder import RunFolder, Start
from atoll.training.lock import RunLock
from atoll.training.restarts import start_ranks
from atoll.training.samples import prepare_corpus, vocabulary_of
from atoll.training.signals import StopRequest, exit_code

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from atoll.training.session import RunResult


SLACK = 4.0
"""Seconds by which gloo and NCCL wait longer than a rank may keep others waiting: the monitor knows whom to blame."""


@dataclass(frozen=True, slots=True)
class Request:
    """What `atoll train` was asked for. as_json: print the summary as one JSON object."""

    path: Path
    overrides: tuple[str, ...] = ()
    start: Start = Start.AUTO
    as_json: bool = False

    @property
    def resume_command(self) -> str:
        """What continues the run in a shell."""
        sets = [word for override in self.overrides for word in ("--set", override)]
        return shlex.join(["atoll", "train", str(self.path), *sets])

    @property
    def effective_start(self) -> Start:
        """How it starts. A launcher that restarts the ranks says the same words again: then the run goes on."""
        return Start.AUTO if restarts() else self.start


def train(request: Request) -> int:
    """Train as a rank, if the environment says that this process is one, or start the ranks; the exit code."""
    rendezvous = torchrun_environment()
    if rendezvous is not None:
        return run_rank(request, rendezvous)

    config, overrides = load_chosen(request.path, request.overrides)
    config.to_plan()
    _check_cluster(config)
    folder = RunFolder(Path(config.run.folder))
    folder.check(request.effective_start)
    with RunLock(folder.root).held(lambda line: _tell(line, sys.stderr)):
        pass  # free; rank 0 holds it from its own start on
    vocabulary_of(config, prepare_corpus(config, say=lambda line: _tell(line, sys.stderr)))
    # Each rank is this very command again, with the plan that was chosen; its environment makes it a rank.
    chosen = [word for override in overrides[len(request.overrides) :] for word in ("--set", override)]
    command = [sys.executable, *sys.orig_argv[1:], *chosen]
    return start_ranks(
        lambda attempt: run_local(
            command,
            config.parallel.ranks,
            port=config.run.port,
            limit=config.parallel.timeout,
            attempt=restarts() + attempt,
        ),
        folder,
        most=config.run.restarts,
        say=lambda line: _tell(line, sys.stderr),
    )


def run_rank(request: Request, rendezvous: Rendezvous) -> int:
    """One rank's whole life; its exit code. Errors end the process, as `leave` says."""
    watch_parent()
    stop = StopRequest().listen()
    watch: Watch | None = None
    try:
        config, _ = load_chosen(request.path, request.overrides, world=rendezvous.world)
        plan = config.to_plan(rendezvous.world)
        _check_cluster(config)
        store, watch = meet(rendezvous, config.parallel.timeout)
        Watch.current = watch
        ending = _train(request, config, plan, rendezvous=rendezvous, store=store, stop=stop)
        watch.stop()
    except Exception as error:
        leave(error, watch, rendezvous)
    return 0 if ending.stopped is None else exit_code(ending.stopped)


def _train(
    request: Request, config: Config, plan: Plan, *, rendezvous: Rendezvous, store: Store, stop: StopRequest
) -> RunResult:
    from atoll.runtime import transport
    from atoll.training.session import run

    device = _choose_device(config, rendezvous)
    with ExitStack() as held:
        lock: RunLock | None = None
        if rendezvous.rank == 0:
            folder = RunFolder(Path(config.run.folder))
            folder.check(request.effective_start)
            lock = held.enter_context(RunLock(folder.root).held(lambda line: _tell(line, sys.stderr)))
        transport.join(rendezvous.rank, rendezvous.world, store, device=device, timeout=config.parallel.timeout + SLACK)
        ending = run(config, plan, device=device, start=request.effective_start, stop=stop, lock=lock)
        if rendezvous.rank == 0:
            _conclude(request, ending)
        transport.leave()
    return ending


# ---- the start


def _check_cluster(config: Config) -> None:
    """ConfigError for a cluster that cannot be read, before anything starts."""
    if config.run.cluster is not None:
        Cluster.read(config.run.cluster)


def _choose_device(config: Config, rendezvous: Rendezvous) -> torch.device:
    """A GPU of its own for each rank of this machine, or the CPU."""
    import torch

    if has_gpus(config, rendezvous.local_world):
        torch.cuda.set_device(rendezvous.local_rank)
        return torch.device("cuda", rendezvous.local_rank)
    return torch.device("cpu")


def has_gpus(config: Config, ranks: int) -> bool:
    """Whether `ranks` of this machine have a GPU each. ConfigError where the config asks for one and they do not."""
    import torch

    wanted = config.parallel.device
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cuda" and count < ranks:
        raise ConfigError(
            f"parallel.device = 'cuda': this machine has {count} GPUs for {ranks} ranks, and each "
            "needs one of its own; use fewer parallel.ranks, or device = 'cpu'"
        )
    return wanted != "cpu" and count >= ranks


# ---- the end


def _conclude(request: Request, ending: RunResult) -> None:
    """Say how it ended: results on stdout; after a signal how to continue, on stderr."""
    if request.as_json:
        _tell(json.dumps(ending.summary()), sys.stdout)
    elif ending.stopped is None:
        _tell(ending.describe(), sys.stdout)
    if ending.stopped is not None:
        text = f"interrupted after step {ending.step}; saved {ending.checkpoint}"
        _tell(f"{text}\ncontinue with: {request.resume_command}", sys.stderr)


def _tell(text: str, stream: TextIO) -> None:
    stream.write(f"{text}\n")
    stream.flush()
