"""The folder of a run. No torch.

    <run.folder>/run.json               the run's id, repeated in its checkpoints
                 config.toml            the effective config
                 plan.json              mesh, layout, schedule, precision; actions and bytes of each rank
                 metrics.jsonl          one object per training step
                 validation.jsonl       one object per evaluation, the first as step 0
                 incidents.jsonl        one object per bad step that was skipped or rolled back; never rewound
                 rounds.jsonl           of an island of a federation: one object for each thing that it did
                 trace.json             one measured step, for chrome://tracing or Perfetto
                 prediction.json        output of `atoll predict --json` for the run
                 cluster.toml           cluster of the prediction, if run.cluster sets it
                 timing.json            seconds of the last step's instructions, and peak bytes, by pipeline rank
                 timeline.json          start and end of each instruction of the last step, by pipeline rank
                 calibration.jsonl      the run as a row of `atoll doctor --calibrate`, written by `atoll report`
                 sample.txt             text generated at the end
                 tokenizer.json         the tokenizer, unless tokens are bytes
                 tokenizer_config.json, generation_config.json
                                        roles of its tokens, if they are known
                 checkpoints/step-000100
                 tensorboard/
                 .lock                  the process that writes here (`atoll.training.output.lock`)

Only rank 0 writes. Checkpoints are written by all ranks, through `atoll.runtime.checkpoint`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import median
from types import NoneType
from typing import Any

from atoll.base.digests import read_sealed, seal
from atoll.base.documents import parse_json, whole_number
from atoll.base.errors import CheckpointError, ConfigError, RunError
from atoll.training.data.tokenizer import BESIDE, TOKENIZER

WARM_UP = 3
"""Number of first steps of a start that are slower than later ones."""

NUMBERS = frozenset({"loss", "grad_norm", "tokens_per_second", "seconds", "lr", "bubble", "memory_bytes", "mfu"})
"""Numeric fields of step and evaluation records; None if unknown."""
LARGEST_LINE = 1 << 20
"""Maximum length of a record's line in bytes."""


ROUNDS = "rounds.jsonl"
"""One line for each thing that an island of a federation did."""


class Start(Enum):
    """How a run treats an existing folder.

    AUTO: continue from the newest complete checkpoint; begin if there is none.
    CONTINUE: continue, and fail if there is none.  NEW: begin, and refuse a folder that holds a run.
    OVERWRITE: begin, and delete the run in the folder.
    """

    AUTO = "auto"
    CONTINUE = "always"
    NEW = "never"
    OVERWRITE = "overwrite"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run's files, and the functions that write them."""

    root: Path

    @property
    def identity(self) -> Path:
        """The run's id."""
        return self.root / "run.json"

    @property
    def config(self) -> Path:
        """The effective config."""
        return self.root / "config.toml"

    @property
    def plan(self) -> Path:
        """The plan, and the predicted bytes of each rank."""
        return self.root / "plan.json"

    @property
    def metrics(self) -> Path:
        """One line per training step."""
        return self.root / "metrics.jsonl"

    @property
    def validation(self) -> Path:
        """One line per evaluation."""
        return self.root / "validation.jsonl"

    @property
    def incidents(self) -> Path:
        """One line per bad step."""
        return self.root / "incidents.jsonl"

    @property
    def trace(self) -> Path:
        """The timeline of one step."""
        return self.root / "trace.json"

    @property
    def prediction(self) -> Path:
        """Predicted seconds and bytes."""
        return self.root / "prediction.json"

    @property
    def cluster(self) -> Path:
        """The cluster of the prediction."""
        return self.root / "cluster.toml"

    @property
    def timing(self) -> Path:
        """Durations of the last step's instructions, and the bytes of each rank."""
        return self.root / "timing.json"

    @property
    def timeline(self) -> Path:
        """Start and end of each instruction of the last step."""
        return self.root / "timeline.json"

    @property
    def calibration(self) -> Path:
        """The run as a row of `atoll doctor --calibrate`."""
        return self.root / "calibration.jsonl"

    @property
    def sample(self) -> Path:
        """The generated text."""
        return self.root / "sample.txt"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer, as the `tokenizers` library writes it."""
        return self.root / TOKENIZER

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of the event files."""
        return self.root / "tensorboard"

    # ---- before a run

    def check(self, start: Start, *, makes: bool = True) -> None:
        """Create the folder. Raises ConfigError if it cannot be written, or holds a run that `start` refuses.

        makes: if False, only check whether it could be created.

        Raises CheckpointError if `start` requires a checkpoint and there is none.
        """
        try:
            if makes:
                self.root.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.root):
                    pass
            else:
                self._look()
        except OSError as error:
            raise ConfigError(
                f"run.folder = {str(self.root)!r}: cannot be written ({error.strerror or error}); "
                "choose a folder that can, as in --set run.folder=runs/mine"
            ) from error
        if start is Start.CONTINUE and not self.candidates():
            raise CheckpointError(
                f"run.folder = {str(self.root)!r} has no finished checkpoint to resume from; start without "
                "--resume always, which begins a new run where there is none"
            )
        if start is Start.NEW and (held := self._held()):
            raise ConfigError(
                f"run.folder = {str(self.root)!r} holds a run already ({held}); continue it without --resume never, "
                "choose another run.folder, or delete what is there with --overwrite"
            )

    def _look(self) -> None:
        """Raise the OSError of creating the folder and a file in it."""
        path = self.root.absolute()
        nearest = next(each for each in (path, *path.parents) if each.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def candidates(self) -> tuple[Path, ...]:
        """Return the checkpoints to continue from, in the order in which to try them, including damaged ones."""
        from atoll.runtime import checkpoint

        return checkpoint.candidates(self.checkpoints)

    def _held(self) -> str | None:
        """Return a description of what would be lost: steps or checkpoints. A run that ended before its first step has
        nothing."""
        found = self.candidates()
        if found:
            return found[0].name
        lines = read_records(self.metrics)
        return f"{len(lines)} steps" if lines else None

    # ---- identity

    def run_id(self) -> str | None:
        """Return the id of the run in the folder; None if there is none, or it cannot be read."""
        try:
            return str(read_sealed(self.identity)["run"])
        except (OSError, ValueError, KeyError):
            return None

    def write_run_id(self, value: str) -> None:
        """Write the id of the run."""
        write(self.identity, seal({"run": value}).decode())

    # ---- at the start of a run

    def clear(self) -> None:
        """Remove the files of an earlier run, and no others."""
        written = (
            self.identity,
            self.config,
            self.plan,
            self.metrics,
            self.validation,
            self.incidents,
            self.trace,
            self.root / ROUNDS,
        )
        generated = (self.sample, self.tokenizer, *(self.root / name for name in BESIDE))
        compared = (self.prediction, self.cluster, self.timing, self.timeline, self.calibration)
        for path in (*written, *generated, *compared):
            with writing(path):
                path.unlink(missing_ok=True)
        for folder in (self.checkpoints, self.tensorboard):
            if folder.is_dir():
                with writing(folder):
                    shutil.rmtree(folder)

    def rewind(self, step: int) -> None:
        """Remove records after `step`, and predictions and timings of an earlier start, whose plan may have been
        different."""
        for path in (self.prediction, self.cluster, self.timing, self.timeline, self.calibration):
            with writing(path):
                path.unlink(missing_ok=True)
        self.forget(step)

    def forget(self, step: int) -> None:
        """Remove the records of steps after `step`, which will run again, and lines truncated by a crash."""
        for path in (self.metrics, self.validation):
            if not path.is_file():
                continue
            kept = [record for record in read_records(path) if record["step"] <= step]
            write(path, "".join(f"{json.dumps(record)}\n" for record in kept))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file that have a step; [] if there is no file. Invalid lines are skipped, and so
    are objects in which one of `NUMBERS` is not a number."""
    if not path.is_file():
        return []
    found = []
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(LARGEST_LINE), b""):
            with suppress(ValueError):
                record = parse_json(line)
                if isinstance(record, dict):
                    whole_number(record.get("step"))
                    if all(type(record.get(name)) in (int, float, NoneType) for name in NUMBERS):
                        found.append(record)
    return found


def typical_seconds(path: Path, first: int = 1) -> float | None:
    """Return the seconds of a step from a file of training steps: the median from step `first` on, without the first
    `WARM_UP` steps if there are more; None without steps."""
    found = [each["seconds"] for each in read_records(path) if each["step"] >= first and is_of(each, "seconds")]
    return median(found[WARM_UP:] or found[-1:]) if found else None


def is_of(record: Mapping[str, Any], *names: str) -> bool:
    """Return True if a record has numbers with these names."""
    return all(record.get(name) is not None for name in names)


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append a line. Floats keep all their digits."""
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(record)}\n")


def write(path: Path, text: str) -> None:
    """Write a whole file. The old one stays until the new one is complete."""
    with writing(path):
        draft = path.with_name(f".{path.name}.new")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an error of the disk to a RunError that names the path."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror or error})") from error
