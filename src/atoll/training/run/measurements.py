"""Reading of measured steps from run folders and from files of rows for `atoll doctor --calibrate`. No torch.

A row is an object with

    config              a TOML file, or its tables;  set: overrides of it, as ["train.microbatch=2"]
    seconds             per step
    vocabulary, world, reads_in_place, device    properties of its run that the config does not set

or with `run`, the folder of a run, whose records contain all of these. Paths are relative to the folder of the file.
`name` is the row's name in tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from atoll.base import documents
from atoll.base.documents import LARGEST_BYTES, LARGEST_JSON, finite, parse_json, read_text, string, whole_number
from atoll.base.errors import ConfigError, UserError
from atoll.prediction.cost import Cluster, Prediction
from atoll.prediction.cost.calibration import Step
from atoll.prediction.cost.comparison import Taken, Timed
from atoll.program import operation_of
from atoll.training.config import Config, from_dict, load
from atoll.training.output.folder import RunFolder, typical_seconds
from atoll.training.setup.optimizers import planned
from atoll.training.setup.prediction import predict_plan

OF_CONFIG = {"config", "set", "seconds", "vocabulary", "world", "reads_in_place", "device", "name"}
OF_RUN = {"run", "name"}

_KINDS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "run": (str,),
    "config": (str, dict),
    "set": (list,),
    "seconds": (int, float),
    "vocabulary": (int,),
    "world": (int,),
    "reads_in_place": (bool,),
    "device": (str,),
}


@dataclass(frozen=True, slots=True)
class _Measured:
    """A measured step.

    world: number of ranks; parallel.ranks if None.  vocabulary, reads_in_place, device: see `predict`.
    cluster: a file of the cluster it was measured on, if known.
    """

    name: str
    config: Config
    seconds: float
    world: int | None = None
    vocabulary: int | None = None
    reads_in_place: bool = False
    device: str | None = None
    cluster: Path | None = None

    def predict(self, cluster: Cluster) -> Prediction:
        """Return the predicted step on a cluster. Raises ConfigError or PlanError if its costs are unknown."""
        plan, nodes = planned(self.config, self.world), self.config.run.nodes
        cluster = cluster.ordered(nodes) if nodes and cluster.groups else cluster
        facts = {"vocabulary": self.vocabulary, "reads_in_place": self.reads_in_place, "device": self.device}
        return predict_plan(self.config, plan, cluster, **facts)  # type: ignore[arg-type]

    def row(self) -> dict[str, Any]:
        """Return the object that `read_rows` reads."""
        return {
            "name": self.name,
            "config": self.config.model_dump(mode="json"),
            "seconds": self.seconds,
            "vocabulary": self.vocabulary,
            "world": self.world,
            "reads_in_place": self.reads_in_place,
            "device": self.device,
        }


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of a run.

    blocks: their names.
    timed_seconds: of the last step on rank 0.  timed, peaks: instructions and bytes of each pipeline rank; () if the
    run did not reach that step.
    memory: kind of the peaks, "allocated" tensors or "resident" memory.
    """

    folder: RunFolder
    measured: _Measured
    blocks: tuple[str, ...]
    timed_seconds: float = 0.0
    timed: tuple[Timed, ...] = ()
    peaks: tuple[int, ...] = ()
    memory: str = ""


class Started(NamedTuple):
    """The last start of a run: its first step, its ranks, the arguments of `predict`, the names of its blocks, and
    notes on its corpus."""

    first_step: int
    world: int
    vocabulary: int | None
    reads_in_place: bool
    device: str
    blocks: tuple[str, ...]
    corpus: tuple[str, ...]


class _Timing(NamedTuple):
    """A timed step, see `RunRecords`."""

    seconds: float
    timed: tuple[Timed, ...]
    peaks: tuple[int, ...]
    memory: str


def read_run(root: Path) -> RunRecords:
    """Return the records of the last start of a run in a folder. Raises ConfigError if they are missing or damaged."""
    folder = RunFolder(root)
    config = load(folder.config)
    started = read_started(folder.plan)
    seconds = typical_seconds(folder.metrics, started.first_step)
    if seconds is None:
        raise ConfigError(f"{folder.metrics} has no steps of the last start; let the run take some")
    cluster = folder.cluster if folder.cluster.is_file() else None
    known = started.world, started.vocabulary, started.reads_in_place, started.device
    measured = _Measured(str(root), config, seconds, *known, cluster)
    if not folder.timing.is_file():
        return RunRecords(folder, measured, started.blocks)
    timing = read_timing(folder.timing)
    found = timing.seconds, timing.timed, timing.peaks, timing.memory
    return RunRecords(folder, measured, started.blocks, *found)


def read_started(path: Path) -> Started:
    """Return the content of a run's plan.json. Raises ConfigError if it is missing or damaged."""
    plan = read_run_file(path)
    with _written(path):
        return Started(
            first_step=whole_number(plan["first_step"]),
            world=reduce(lambda ranks, size: whole_number(ranks * whole_number(size)), plan["mesh"].values(), 1),
            vocabulary=None if plan["vocabulary"] is None else whole_number(plan["vocabulary"]),
            reads_in_place=bool(plan["reads_in_place"]),
            device=string(plan["device"]),
            blocks=tuple(string(name) for names in plan["stages"] for name in names),
            corpus=tuple(string(note) for note in plan.get("corpus", ())),  # older runs have none
        )


def read_timing(path: Path) -> _Timing:
    """Return the content of a run's timing.json. Raises ConfigError if it is missing or damaged."""
    timing = read_run_file(path)
    with _written(path):
        ranks = timing["ranks"]
        if not ranks:
            raise ValueError("no ranks")
        return _Timing(
            seconds=finite(timing["seconds"]),
            timed=tuple(map(_timed, ranks)),
            peaks=tuple(whole_number(rank["peak_bytes"], limit=LARGEST_BYTES) for rank in ranks),
            memory=string(timing["memory"]),
        )


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Convert errors of records in an unexpected form to a ConfigError."""
    try:
        yield
    except KeyError as error:
        raise ConfigError(
            f"{path} is not what a run writes: no {error}, as of an older version; run it again"
        ) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not what a run writes: {error}; run it again") from error


def read_rows(path: Path) -> list[_Measured]:
    """Return the rows of a JSON or JSONL file. Raises ConfigError with the number and error of every invalid row."""
    try:
        rows = read_text(path, limit=LARGEST_JSON)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the rows {path}: {error}") from error
    found, problems = [], []
    for number, row in enumerate(_split(rows), start=1):
        try:
            found.append(_read_row(parse_json(row) if isinstance(row, str) else row, path.parent, number))
        except (UserError, ValueError) as error:
            problems.append(f"row {number}: {error}")
    _raise(path, problems)
    if not found:
        raise ConfigError(f'{path} has no rows; write one a line, as {{"config": "run.toml", "seconds": 1.2}}')
    return found


def steps_of(path: Path, rows: list[_Measured], cluster: Cluster) -> list[Step]:
    """Return the rows of a file as steps on a cluster. Raises ConfigError with every row that cannot be predicted
    there."""
    found, problems = [], []
    for number, row in enumerate(rows, start=1):
        try:
            step = Step(((1.0, row.predict(cluster)),), row.seconds, row.name)
            step.predicted  # noqa: B018  (what cannot be predicted raises when it is played)
            found.append(step)
        except UserError as error:
            problems.append(f"row {number}: {error}")
    _raise(path, problems)
    return found


def _raise(path: Path, problems: list[str]) -> None:
    if problems:
        count = "a wrong row" if len(problems) == 1 else f"{len(problems)} wrong rows"
        raise ConfigError("\n  ".join([f"{path}: {count}", *problems]))


def _split(rows: str) -> list[Any]:
    """Return the rows of a JSON list, of a single object, or the unparsed lines of JSONL."""
    try:
        whole = parse_json(rows)
    except ValueError:
        return [line for line in rows.splitlines() if line.strip()]
    return whole if isinstance(whole, list) else [whole]


def _read_row(row: Any, folder: Path, number: int) -> _Measured:
    if not isinstance(row, dict):
        raise ConfigError(f"{row!r} is no object")
    row = {key: value for key, value in row.items() if value is not None}
    if ("run" in row) == ("config" in row):
        raise ConfigError('name either "config", with "seconds", or "run"')
    unknown = sorted(set(row) - (OF_RUN if "run" in row else OF_CONFIG))
    if unknown:
        raise ConfigError(f"unknown keys {', '.join(unknown)}; known: {', '.join(sorted(OF_CONFIG | OF_RUN))}")
    for key, value in row.items():
        if not isinstance(value, _KINDS[key]) or (isinstance(value, bool) and bool not in _KINDS[key]):
            raise ConfigError(f"{key} = {value!r}: must be {' or '.join(kind.__name__ for kind in _KINDS[key])}")
    if "run" in row:
        return read_run(folder / row["run"]).measured
    seconds = float(row.get("seconds", math.nan))
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"seconds = {row.get('seconds')}: must be a number above 0, of a step")
    given, overrides = row["config"], [str(each) for each in row.get("set", ())]
    is_file = isinstance(given, str)
    config = load(folder / given, overrides) if is_file else from_dict(given, overrides=overrides, source="config")
    return _Measured(
        row.get("name", " ".join([given, *overrides]) if is_file else f"row {number}"),
        config,
        seconds,
        row.get("world"),
        row.get("vocabulary"),
        row.get("reads_in_place", False),
        row.get("device"),
        None if config.run.cluster is None else Path(config.run.cluster),
    )


def _timed(rank: Mapping[str, Any]) -> Timed:
    return {
        (operation_of(string(each["do"])), whole_number(each["of"], least=-1)): Taken(
            whole_number(each["times"]), finite(each["seconds"]), finite(each["shortest"])
        )
        for each in rank["instructions"]
    }


def read_run_file(path: Path) -> Any:
    """Read a file of a run folder. Raises ConfigError if it is missing or damaged."""
    try:
        return documents.read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}, which `atoll train` writes: {error}") from error
