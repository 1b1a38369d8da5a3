"""The folder of a run, and who may write to it. No torch.

    <run.folder>/run.json               the run's id, which its checkpoints repeat
                 config.toml            the effective config
                 plan.json              mesh, layout, schedule, precision; what each rank does and holds
                 metrics.jsonl          one object a training step
                 validation.jsonl       one object an evaluation, the first as step 0
                 incidents.jsonl        one object a bad step that was skipped or rolled back; never rewound
                 trace.json             one measured step, for chrome://tracing or Perfetto
                 prediction.json        what `atoll predict --json` prints of the run
                 cluster.toml           what it is predicted on, where run.cluster names it
                 timing.json            seconds of the last step's instructions, and peak bytes, by pipeline rank
                 timeline.json          when each instruction of the last step was played, on each pipeline rank
                 calibration.jsonl      the run as a row of `atoll calibrate`, once `atoll compare` has written it
                 sample.txt             text generated at the end
                 tokenizer.json         what the tokens mean, but where they are bytes
                 checkpoints/step-000100
                 tensorboard/
                 .lock                  who writes here (`atoll.training.lock`)

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

from atoll.digests import read_sealed, seal
from atoll.documents import count, parse_json
from atoll.errors import CheckpointError, ConfigError, RunError

WARM_UP = 3
"""Steps of a start that are slower than those that follow."""

NUMBERS = frozenset({"loss", "grad_norm", "tokens_per_second", "seconds", "lr", "bubble", "memory_bytes", "mfu"})
"""Fields of step and evaluation records; None if unknown."""
LARGEST_LINE = 1 << 20
"""Bytes of the longest line that is a record."""


class Start(Enum):
    """How a run treats an existing folder.

    AUTO: continue from the newest checkpoint that is whole; begin where there is none at all.
    CONTINUE: the same, and refuse to begin.  NEW: begin, and refuse a folder that holds a run.
    OVERWRITE: begin, and delete the run that the folder holds.
    """

    AUTO = "auto"
    CONTINUE = "always"
    NEW = "never"
    OVERWRITE = "overwrite"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run, and the few ways in which they are written."""

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
        """A line a training step."""
        return self.root / "metrics.jsonl"

    @property
    def validation(self) -> Path:
        """A line an evaluation."""
        return self.root / "validation.jsonl"

    @property
    def incidents(self) -> Path:
        """A line a bad step."""
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
        """The run as a row of `atoll calibrate`."""
        return self.root / "calibration.jsonl"

    @property
    def sample(self) -> Path:
        """The generated text."""
        return self.root / "sample.txt"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer, as the `tokenizers` library writes it."""
        return self.root / "tokenizer.json"

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
        """Make the folder. ConfigError if it cannot be written or holds a run that `start` would not leave alone.

        makes: if False, look only at whether it could be made.

        CheckpointError if there is nothing to continue from and there has to be.
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
        """Raise the OSError that making the folder, and a file in it, would raise."""
        path = self.root.absolute()
        nearest = next(each for each in (path, *path.parents) if each.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def candidates(self) -> tuple[Path, ...]:
        """The checkpoints to continue from, in the order in which to try them; damaged ones are among them."""
        from atoll.runtime import checkpoint

        return checkpoint.candidates(self.checkpoints)

    def _held(self) -> str | None:
        """Return what would be lost: steps or checkpoints. A run that ended before its first step has nothing."""
        found = self.candidates()
        if found:
            return found[0].name
        lines = read_records(self.metrics)
        return f"{len(lines)} steps" if lines else None

    # ---- whose it is

    def run_id(self) -> str | None:
        """The id of the run that the folder holds; None where there is none, or it cannot be read."""
        try:
            return str(read_sealed(self.identity)["run"])
        except (OSError, ValueError, KeyError):
            return None

    def write_run_id(self, value: str) -> None:
        """Say whose folder it is."""
        write(self.identity, seal({"run": value}).decode())

    # ---- at its start

    def clear(self) -> None:
        """Remove what an earlier run left, and nothing else."""
        written = (self.identity, self.config, self.plan, self.metrics, self.validation, self.incidents, self.trace)
        generated = (self.sample, self.tokenizer)
        compared = (self.prediction, self.cluster, self.timing, self.timeline, self.calibration)
        for path in (*written, *generated, *compared):
            with writing(path):
                path.unlink(missing_ok=True)
        for folder in (self.checkpoints, self.tensorboard):
            if folder.is_dir():
                with writing(folder):
                    shutil.rmtree(folder)

    def rewind(self, step: int) -> None:
        """Forget what follows `step`, and what was predicted and timed of an earlier start, whose plan may have been
        another."""
        for path in (self.prediction, self.cluster, self.timing, self.timeline, self.calibration):
            with writing(path):
                path.unlink(missing_ok=True)
        self.forget(step)

    def forget(self, step: int) -> None:
        """Drop the lines of steps after `step`, which will be run again, and lines cut short by a crash."""
        for path in (self.metrics, self.validation):
            if not path.is_file():
                continue
            kept = [record for record in read_records(path) if record["step"] <= step]
            write(path, "".join(f"{json.dumps(record)}\n" for record in kept))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file with a step; [] if there is no file. Lines that are no such object are left out, and
    so are those of which one of `NUMBERS` is something else."""
    if not path.is_file():
        return []
    found = []
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(LARGEST_LINE), b""):
            with suppress(ValueError):
                record = parse_json(line)
                if isinstance(record, dict):
                    count(record.get("step"))
                    if all(type(record.get(name)) in (int, float, NoneType) for name in NUMBERS):
                        found.append(record)
    return found


def typical_seconds(path: Path, first: int = 1) -> float | None:
    """Seconds of a step from a file of training steps: the median from step `first` on, without the first `WARM_UP`
    steps where there are more; None where there is none."""
    found = [each["seconds"] for each in read_records(path) if each["step"] >= first and is_of(each, "seconds")]
    return median(found[WARM_UP:] or found[-1:]) if found else None


def is_of(record: Mapping[str, Any], *names: str) -> bool:
    """Return True if a record has numbers of these names."""
    return all(record.get(name) is not None for name in names)


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line. Floats keep all their digits."""
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(record)}\n")


def write(path: Path, text: str) -> None:
    """Write a whole file: the old one stays until the new one is complete."""
    with writing(path):
        draft = path.with_name(f".{path.name}.new")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure of the disk into a RunError that names the path."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror or error})") from error
