"""`atoll doctor`: check what this machine supports, what is missing, and how to install it."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from atoll.base.machine import machine_memory
from atoll.cli.arguments import CLUSTER, AsJson


@dataclass(frozen=True)
class _Device:
    """A CUDA device."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Package:
    """An optional package: its version or None, the feature it enables, and the extra that installs it."""

    name: str
    version: str | None
    enables: str
    extra: str


@dataclass(frozen=True)
class MissingComponent:
    """A missing component, how to install it, and whether training is impossible without it."""

    what: str
    remedy: str
    fatal: bool


@dataclass(frozen=True)
class Examination:
    """Result of `atoll doctor --json`, without `ready`."""

    python: str
    torch: str | None
    torch_cuda: str | None
    devices: tuple[_Device, ...]
    gloo: bool
    nccl: bool
    cores: int
    memory_bytes: int
    message_seconds: float | None
    cache: str
    packages: tuple[Package, ...]
    problems: tuple[MissingComponent, ...]

    @property
    def ready(self) -> bool:
        """True if training can run on this machine."""
        return not any(problem.fatal for problem in self.problems)


_OPTIONAL = (
    ("tensorboard", "metrics as TensorBoard events", "tensorboard"),
    ("datasets", "Hugging Face dataset folders and parquet files as a corpus", "hf"),
    ("transformers", "Hugging Face models, from scratch or from their folders", "hf"),
    ("peft", "low-rank adapters on such models", "hf"),
    ("numba", "automatic schedules found faster, the first time after compiling for some seconds", "fast"),
)


def doctor_command(
    measure: Annotated[
        Path | None,
        typer.Option("--measure", metavar="FILE", help="Measure devices and links, and write this TOML file."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", help="With --measure: local processes; one for each GPU, or 2 on the CPU."),
    ] = None,
    cards: Annotated[int, typer.Option("--cards", help="With --measure: network cards of a node.")] = 1,
    seconds: Annotated[
        float, typer.Option("--seconds", help="With --measure: how long each quantity is measured.")
    ] = 0.2,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="ROWS",
            help="Fit the constants of a cluster to the measured steps in this JSON or JSONL file.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="With --calibrate, required: the TOML file to write."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help=f"With --calibrate: {CLUSTER} The fit starts from its constants; by default those of the first row."
        ),
    ] = None,
    constants: Annotated[
        str | None,
        typer.Option(help="With --calibrate: constants to fit, as keys of the file separated by commas; default all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check what this machine supports, what is missing and how to install it; exit code 1 if training cannot run here.

    With --measure FILE, measure the rates of devices and links on all ranks at once, and write them as a cluster: in
    local processes, or as a rank of torchrun or Slurm on one node or several.

    With --calibrate ROWS -o FILE, fit the constants of a cluster to measured steps, and write the cluster with them. A
    row is {"config": "run.toml", "set": ["train.microbatch=2"], "seconds": 1.2}, where the config may also be its
    tables, or {"run": "runs/mine"}, the folder of a run; `atoll report` writes such rows. Paths are relative to the
    folder of ROWS. Only constants that affect a step are fitted, with a prior: the value before the fit, known to
    within 25 %. `spread` in the file is the expected error for other steps: with up to 12 rows the leave-one-out
    error, otherwise the error of the fit.

    Keys of the JSON object: ready; python, torch (versions; torch null if it is missing), torch_cuda (the CUDA
    version it is built for, or null); devices (name, memory_bytes); gloo, nccl (whether torch has them); cores,
    memory_bytes (that this process may use); message_seconds (two processes started and one message exchanged
    between them, null if that failed); cache (folder); packages (name, version or null, enables, extra); problems
    (what, remedy, fatal). With --measure: device, node, network, the tables of the file. With --calibrate: file; error
    and spread, relative; steps (name, measured, before, after: seconds; error, relative); constants (name, before,
    after).
    """
    _check_options(measure, calibrate, {"--output": output, "--cluster": cluster, "--constants": constants})
    if calibrate is not None and output is not None:
        from atoll.cli.calibrate import fit_constants

        fit_constants(calibrate, output, cluster, constants, as_json=as_json)
        return
    if measure is not None:
        from atoll.runtime.measuring.process import MeasureRequest, run_measurement

        code = run_measurement(MeasureRequest(measure, ranks, cards, seconds, as_json))
        if code:
            raise typer.Exit(code)
        return
    examination = examine()
    if as_json:
        import json

        typer.echo(json.dumps({"ready": examination.ready, **asdict(examination)}, indent=2))
    else:
        _print(examination)

    if not examination.ready:
        raise typer.Exit(1)


def _check_options(measure: Path | None, calibrate: Path | None, fitting: dict[str, object]) -> None:
    """Raise ConfigError for options that exclude or need each other. fitting: those of --calibrate."""
    from atoll.base.errors import ConfigError

    if measure is not None and calibrate is not None:
        raise ConfigError("--measure and --calibrate each write a cluster; measure first, then calibrate that file")
    given = [option for option, value in fitting.items() if value is not None]
    if calibrate is None and given:
        raise ConfigError(f"{', '.join(given)}: for --calibrate ROWS only")
    if calibrate is not None and fitting["--output"] is None:
        raise ConfigError(f"--calibrate {calibrate} writes a cluster: name its file with -o FILE")


def examine() -> Examination:
    """Examine this machine. Starts two short-lived processes and changes nothing."""
    problems: list[MissingComponent] = []
    torch = _version("torch")
    devices: tuple[_Device, ...] = ()
    torch_cuda, gloo, nccl, seconds = None, False, False, None

    if torch is None:
        problems.append(MissingComponent("torch is not installed", "pip install torch", fatal=True))
    else:
        torch_cuda, gloo, nccl = _backends()
        devices = _devices()
        problems += _version_problems(torch)
        problems += _device_problems(devices, cuda=torch_cuda, nccl=nccl)
        if gloo:
            seconds = _time_message(problems)
        else:
            problems.append(
                MissingComponent("torch has no gloo", "install a build of torch with distributed", fatal=True)
            )

    cache = _cache(problems)
    return Examination(
        python=platform.python_version(),
        torch=torch,
        torch_cuda=torch_cuda,
        devices=devices,
        gloo=gloo,
        nccl=nccl,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=machine_memory(),
        message_seconds=seconds,
        cache=str(cache),
        packages=tuple(Package(name, _version(name), enables, extra) for name, enables, extra in _OPTIONAL),
        problems=tuple(problems),
    )


EXCHANGE_SECONDS = 60.0
"""Seconds for which each of the two processes waits for the other."""


def exchange() -> None:
    """Join the other process, all-reduce one number with it, and leave. Run by both processes."""
    import torch

    from atoll.plans.plan import MeshShape
    from atoll.runtime import transport
    from atoll.runtime.launch import watch_parent
    from atoll.runtime.rendezvous import meet, torchrun_environment

    watch_parent()
    here = torchrun_environment()
    assert here is not None, "started by atoll.runtime.launch"

    store, watch = meet(here, EXCHANGE_SECONDS)
    device = torch.device("cpu")
    transport.join(here.rank, here.world, store, device=device, timeout=EXCHANGE_SECONDS)
    total = transport.connect(MeshShape(intra=here.world).place(here.rank), device).total(torch.tensor([here.rank + 1]))
    transport.leave()
    watch.stop()
    if total.tolist() != [3]:
        raise RuntimeError(f"1 + 2 came out as {total.tolist()}")


def _backends() -> tuple[str | None, bool, bool]:
    import torch
    from torch import distributed

    if not distributed.is_available():
        return torch.version.cuda, False, False
    return torch.version.cuda, distributed.is_gloo_available(), distributed.is_nccl_available()


def _devices() -> tuple[_Device, ...]:
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(_Device(properties.name, properties.total_memory) for properties in found)


def _version_problems(installed: str) -> list[MissingComponent]:
    from atoll.base._torch import TORCH

    first, end = TORCH
    if _minor(first) <= _minor(installed) < _minor(end):
        return []
    what = f"torch {installed} is not one of the supported versions, from {first} up to but not {end}"
    return [MissingComponent(what, f'pip install "torch>={first},<{end}"', fatal=False)]


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _device_problems(devices: tuple[_Device, ...], *, cuda: str | None, nccl: bool) -> list[MissingComponent]:
    if cuda is None and Path("/proc/driver/nvidia/version").exists():
        what = "this machine has an NVIDIA driver, but torch is built for the CPU"
        return [MissingComponent(what, "install a CUDA build of torch", fatal=False)]
    if cuda is not None and not devices:
        what = f"torch is built for CUDA {cuda}, but there is no device: training uses the CPU"
        return [MissingComponent(what, "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES", fatal=False)]
    if len(devices) > 1 and not nccl:
        return [
            MissingComponent(
                "torch has no NCCL: devices cannot reach each other", "install a CUDA build of torch", fatal=True
            )
        ]
    return []


def _time_message(problems: list[MissingComponent]) -> float | None:
    """Return the seconds for two processes to start as in `atoll train`, rendezvous, and exchange a message."""
    import time

    from atoll.base.errors import AtollError
    from atoll.runtime.launch import launch_local

    start = time.monotonic()
    try:
        code = launch_local([sys.executable, "-c", "from atoll.cli.doctor import exchange; exchange()"], 2, grace=5.0)
        reason = f"exit code {code}, see stderr" if code else None
    except (AtollError, OSError, RuntimeError) as error:
        reason = str(error)

    if reason is None:
        return time.monotonic() - start
    problems.append(
        MissingComponent(
            f"two local processes could not exchange a message: {reason}",
            "allow connections on the loopback address; if the host's own name does not resolve, "
            "set GLOO_SOCKET_IFNAME=lo",
            fatal=True,
        )
    )
    return None


def _cache(problems: list[MissingComponent]) -> Path:
    import tempfile

    from atoll.runtime.places import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "make it writable, or name another: data.cache in the config, or XDG_CACHE_HOME"
        problems.append(
            MissingComponent(f"the cache folder {folder} is not writable: {error.strerror}", remedy, fatal=True)
        )
    return folder


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _print(found: Examination) -> None:
    from atoll.base.units import format_bytes, format_seconds

    cuda = f"built for CUDA {found.torch_cuda}" if found.torch_cuda else "built for the CPU"
    has = {True: "yes", False: "no"}
    rows = [
        ("Python", found.python),
        ("torch", f"{found.torch}, {cuda}" if found.torch else "missing"),
        ("backends", f"gloo {has[found.gloo]}, NCCL {has[found.nccl]}"),
        *(
            (f"device {index}", f"{each.name}, {format_bytes(each.memory_bytes)}")
            for index, each in enumerate(found.devices)
        ),
        ("cores", str(found.cores)),
        ("memory", format_bytes(found.memory_bytes)),
        (
            "message",
            "failed" if found.message_seconds is None else f"2 processes, {format_seconds(found.message_seconds)}",
        ),
        ("cache", found.cache),
        *((each.name, _describe(each)) for each in found.packages),
    ]
    for name, value in rows:
        typer.echo(f"{name:<13} {value}")

    for problem in found.problems:
        typer.echo(f"\n{'problem' if problem.fatal else 'note'}: {problem.what}\n  {problem.remedy}")
    typer.echo(f"\ntraining {'can' if found.ready else 'cannot'} run here")


def _describe(package: Package) -> str:
    if package.version is not None:
        return f"{package.version}, for {package.enables}"
    return f"not installed; for {package.enables}: pip install -e '.[{package.extra}]' in Atoll's folder"
