"""A training run: the parent that starts local processes, and the life of each rank.

The life of a run:

    1. the parent checks config, plan, folder and corpus, and starts the ranks: the same command, run up to its imports
       by a template and forked from there (`runtime/template.py`); torchrun and Slurm start them themselves
    2. a rank joins the others at the store, and is connected to the monitor from then on
    3. it prepares the same corpus (cached by the first), builds its part of the model, and trains
    4. the parent starts local ranks again after a failure (`run/restarts.py`); torchrun does so with --max-restarts
    5. a rank exits with 0; 130 or 143 after a signal and a save; 2 for invalid requests; 1 for failures

No torch is imported before a rank needs it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from atoll.base.errors import AtollError
from atoll.plans.plan import Plan
from atoll.runtime.failure import Watch
from atoll.runtime.launch import (
    SAVED_AND_LEFT,
    LaunchResult,
    become_rank,
    exit_with_error,
    name_process,
    run_local,
    take_errand,
    template_of,
    watch_parent,
)
from atoll.runtime.measuring.errand import run_errand
from atoll.runtime.measuring.known import measure_here
from atoll.runtime.places import memory_folder
from atoll.runtime.rendezvous import (
    Rendezvous,
    meet,
    restarts,
    torchrun_environment,
)
from atoll.runtime.same import check_same, software
from atoll.runtime.template import Template, is_template
from atoll.runtime.verdict import transport_patience
from atoll.training.config import Config, load
from atoll.training.models.sources import check_source
from atoll.training.output.folder import RunFolder, Start
from atoll.training.output.lock import RunLock
from atoll.training.output.loggers import check_loggers
from atoll.training.run.restarts import start_ranks
from atoll.training.run.signals import StopRequest, exit_code
from atoll.training.setup.choosing import fewer_ranks, load_chosen
from atoll.training.setup.here import has_gpus, machine_of, measured_cluster
from atoll.training.setup.optimizers import checked
from atoll.training.setup.prediction import named_cluster
from atoll.training.setup.rates import learning_rates
from atoll.training.setup.samples import prepare_corpus, vocabulary_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from atoll.training.run.session import RunResult


@dataclass(frozen=True, slots=True)
class Request:
    """Options of `atoll train`. as_json: print the summary as one JSON object."""

    path: Path
    overrides: tuple[str, ...] = ()
    start: Start = Start.AUTO
    as_json: bool = False

    @property
    def resume_command(self) -> str:
        """The shell command that continues the run."""
        sets = [word for override in self.overrides for word in ("--set", override)]
        return shlex.join(["atoll", "train", str(self.path), *sets])

    @property
    def effective_start(self) -> Start:
        """Return how the run starts. A launcher that restarts the ranks uses the same arguments: the run then
        continues."""
        return Start.AUTO if restarts() else self.start


def train(run: Request | str | Path, *overrides: str) -> int:
    """Train as `atoll train` does: as a rank if the environment describes one; otherwise start the ranks. Return the
    exit code.

    run: the path of a config's TOML file; or a request, which has its own overrides.
    overrides: values of single keys, as in "train.steps=100".

    A program that calls it is run again by each rank: call it under `if __name__ == "__main__":`.
    """
    request = run if isinstance(run, Request) else Request(Path(run), overrides)
    if is_template():
        import atoll.training.run.session  # noqa: F401
        from atoll.base._torch import import_ahead

        import_ahead()
        become_rank()
        if errand := take_errand():
            return run_errand(errand)
    rendezvous = torchrun_environment()
    if rendezvous is not None:
        return _run_rank(request, rendezvous)

    asked = request.path, request.overrides
    config = load(*asked)
    if config.parallel.auto:  # the plan is for this machine where no cluster is named
        code = _measure(config, None)
        if code in SAVED_AND_LEFT:
            return code
    config, chosen = load_chosen(*asked, config=config)
    check_config(config)
    folder = RunFolder(Path(config.run.folder))
    folder.check(request.effective_start)
    with RunLock(folder.root).held(lambda line: _tell(line, sys.stderr)):
        pass  # released; rank 0 holds it from its own start on
    with ExitStack() as held:
        # It imports torch while this process prepares the corpus.
        template = template_of(_command(request, chosen), config.parallel.ranks) if _is_own_command() else None
        if template is not None:
            held.callback(template.close)
        _check_tensor(config)
        corpus = prepare_corpus(config, say=lambda line: _tell(line, sys.stderr))
        vocabulary_of(config, corpus)
        learning_rates(config.with_steps_of(corpus.samples).train)
        code = _measure(config, template)
        if code in SAVED_AND_LEFT:
            return code

        def start(ranks: int, attempt: int) -> LaunchResult:
            is_whole = ranks == config.parallel.ranks
            return run_local(
                _command(request, chosen if is_whole else load_chosen(*asked, world=ranks)[1]),
                ranks,
                limit=config.parallel.timeout,
                attempt=restarts() + attempt,
                template=template if is_whole else None,
            )

        return start_ranks(
            start,
            folder,
            ranks=config.parallel.ranks,
            most=config.run.restarts,
            fewer=lambda ranks: fewer_ranks(*asked, ranks),
            memory=memory_folder() if config.checkpoint.memory else None,
            say=lambda line: _tell(line, sys.stderr),
        )


def _check_tensor(config: Config) -> None:
    """Raise the error of an adapter whose layers cannot be split over so many tensor-parallel ranks. What the built-in
    decoder can be split into is part of the plan."""
    if config.parallel.tensor == 1 or config.model.is_builtin:
        return
    import torch

    from atoll.runtime.models import adapter_for
    from atoll.training.models.pretrained import hugging_face_model

    with torch.device("meta"):
        adapter = adapter_for(hugging_face_model(config, None))
    adapter.tensor_plan(config.parallel.tensor)  # type: ignore[attr-defined]


def _measure(config: Config, template: Template | None) -> int:
    """Measure this machine for the ranks of a run, unless it is known or not asked for. Return the exit code of the
    measurement, which only a signal makes that of the run."""
    machine = machine_of(config, config.parallel.ranks)
    if machine is None or machine.find() is not None:
        return 0
    _tell("measuring this machine, once: a few seconds; ATOLL_MEASURE=0 skips it", sys.stderr)
    try:
        ending = measure_here(machine, template)
    except (OSError, AtollError) as error:
        _tell(f"note: seconds are not predicted: {error}", sys.stderr)
        return 1
    if ending.code and ending.code not in SAVED_AND_LEFT:
        _tell(f"note: seconds are not predicted: {ending.error or 'this machine was not measured'}", sys.stderr)
    return ending.code


def _command(request: Request, overrides: Sequence[str]) -> list[str]:
    """Return the command of a rank: this process's own, with the chosen plan. Its environment makes it a rank."""
    chosen = [word for override in overrides[len(request.overrides) :] for word in ("--set", override)]
    return [sys.executable, *sys.orig_argv[1:], *chosen]


def _is_own_command() -> bool:
    """Return True for `atoll` and `python -m atoll`. Another program may do different things in its ranks before it
    calls this one, so its ranks are started one by one."""
    program = sys.modules["__main__"]
    spec = getattr(program, "__spec__", None)
    return spec.name == "atoll.__main__" if spec else Path(getattr(program, "__file__", None) or "").name == "atoll"


def _run_rank(request: Request, rendezvous: Rendezvous) -> int:
    """Run one rank from start to end and return its exit code. Errors end the process, see `exit_with_error`."""
    watch_parent()
    name_process(rendezvous.rank)
    stop = StopRequest().listen()
    watch: Watch | None = None
    try:
        config, _ = load_chosen(request.path, request.overrides, world=rendezvous.world)
        plan = checked(config, rendezvous.world)
        _check_cluster(config)
        store, watch = meet(rendezvous, config.parallel.timeout)
        Watch.current = watch
        ending = _train(request, config, plan, rendezvous=rendezvous, store=store, stop=stop)
        watch.stop()
    except Exception as error:
        exit_with_error(error, watch, rendezvous)
    return 0 if ending.stopped is None else exit_code(ending.stopped)


def _train(
    request: Request, config: Config, plan: Plan, *, rendezvous: Rendezvous, store: Store, stop: StopRequest
) -> RunResult:
    from atoll.runtime import transport
    from atoll.training.run.session import run_session

    device = _choose_device(config, rendezvous)
    check_same(
        store,
        rendezvous.rank,
        rendezvous.world,
        facts={**software(), "the device": device.type, **_shared_keys(config)},
        advice="start every rank with the same config and the same --set",
    )
    with ExitStack() as held:
        lock: RunLock | None = None
        if rendezvous.rank == 0:
            folder = RunFolder(Path(config.run.folder))
            folder.check(request.effective_start)
            lock = held.enter_context(RunLock(folder.root).held(lambda line: _tell(line, sys.stderr)))
        longest = transport_patience(config.parallel.timeout)
        transport.join(rendezvous.rank, rendezvous.world, store, device=device, timeout=longest)
        here = None
        if rendezvous.rank == 0 and rendezvous.local_world == rendezvous.world:
            here = measured_cluster(config, rendezvous.world, device.type)
        ending = run_session(
            config, plan, device=device, start=request.effective_start, stop=stop, lock=lock, here=here
        )
        if rendezvous.rank == 0:
            _conclude(request, ending)
        transport.leave()
    return ending


# ---- start


PLACES = (
    "run",
    "data.cache",
    "data.chat_template",
    "data.source",
    "data.tokenizer",
    "data.validation",
    "model.source",
    "model.weights",
)
"""Sections and keys with paths that may differ between machines; their contents are compared once they are read."""


def _shared_keys(config: Config) -> dict[str, str]:
    """Options that must be equal on all ranks."""
    tables = {section: keys or {} for section, keys in config.model_dump().items()}
    values = {f"{section}.{key}": value for section, keys in tables.items() for key, value in keys.items()}
    return {
        f"{name} =": "not set" if value is None else repr(value)
        for name, value in values.items()
        if name not in PLACES and name.partition(".")[0] not in PLACES
    }


def check_config(config: Config) -> Plan:
    """Return the plan of a config whose optimizer, learning rates, model, loggers and cluster can be used. Raises the
    errors of those that cannot."""
    plan = checked(config)
    if config.train.epochs is None:
        learning_rates(config.train)
    check_source(config)
    check_loggers(config.run.loggers)
    _check_cluster(config)
    return plan


def _check_cluster(config: Config) -> None:
    """Raise ConfigError for a cluster file that cannot be read, before anything starts."""
    named_cluster(config)


def _choose_device(config: Config, rendezvous: Rendezvous) -> torch.device:
    """Return a separate GPU for each rank of this machine, or the CPU."""
    import torch

    if has_gpus(config, rendezvous.local_world):
        torch.cuda.set_device(rendezvous.local_rank)
        return torch.device("cuda", rendezvous.local_rank)
    return torch.device("cpu")


# ---- end


def _conclude(request: Request, ending: RunResult) -> None:
    """Print how the run ended: results on stdout; after a signal, how to continue, on stderr."""
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
