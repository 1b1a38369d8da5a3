"""Run folders and configs as sheets of a report. No torch, unless the model has to be counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from atoll.base.documents import LARGEST_JSON, read_text, whole_number
from atoll.base.errors import ConfigError, UserError
from atoll.base.units import format_bytes, format_rate, format_seconds
from atoll.prediction.cost import Prediction
from atoll.program.trace import from_chrome
from atoll.training.config import load
from atoll.training.output.folder import ROUNDS, WARM_UP, RunFolder, is_of, read_records
from atoll.training.report import (
    Curves,
    Sheet,
    StepTimeline,
    predicted_sheet,
    recorded_timeline,
    traced_timeline,
    with_measurements,
)
from atoll.training.report.rounds import round_figures, round_notes, summarize_rounds
from atoll.training.run.measurements import read_run_file, read_started, read_timing
from atoll.training.setup.choosing import load_chosen
from atoll.training.setup.here import measured_cluster
from atoll.training.setup.optimizers import planned
from atoll.training.setup.prediction import named_cluster, predict, predict_plan

_SHOWN = ("loss", "grad_norm", "tokens_per_second", "seconds", "lr", "bubble", "memory_bytes")
"""Keys of metrics.jsonl that are drawn."""
_MEASURED = ("seconds", "tokens_per_second", "bubble")
"""Keys that a typical step must have."""


def sheet_of_config(path: Path, overrides: Sequence[str] = ()) -> Sheet:
    """Return the sheet of a config's predicted plan. Without run.cluster it has no seconds.

    Raises ConfigError or PlanError if config, cluster and model do not match.
    """
    config, _ = load_chosen(path, overrides)
    found = named_cluster(config) or measured_cluster(config, config.parallel.ranks)
    named = [override for override in overrides if not override.startswith("run.cluster=")]  # a path is a poor name
    return predicted_sheet(predict(config, found), " ".join([path.stem, *named]))


def is_run(path: Path) -> bool:
    """Return True if a path is the folder of a run."""
    return RunFolder(path).config.is_file()


@dataclass
class RunReader:
    """Reads the folder of a run, repeatedly while the run goes on.

    cluster: the one to predict the run on; by default the one it was started with.
    """

    root: Path
    cluster: Path | None = None
    _seen: tuple[object, ...] = field(default=(), init=False)
    _predicted: Sheet | None = field(default=None, init=False)

    @property
    def folder(self) -> RunFolder:
        """The paths of the run."""
        return RunFolder(self.root)

    def stamp(self) -> tuple[object, ...]:
        """Return a value that changes when a file of the sheet does."""
        folder = self.folder
        drawn = (folder.metrics, folder.validation, folder.root / ROUNDS, folder.trace, folder.timing, folder.timeline)
        return _stamp((folder.config, folder.plan, folder.cluster, *drawn))

    def sheet(self) -> Sheet:
        """Return the sheet of the run. Records that are not written yet are left out.

        Raises ConfigError if the folder holds no run.
        """
        folder = self.folder
        if not folder.config.is_file():
            raise ConfigError(
                f"{self.root} is not the folder of a run: it has no config.toml; `atoll train` writes one"
            )
        seen = _stamp((folder.config, folder.plan, self.cluster or folder.cluster))
        if self._predicted is None or seen != self._seen:
            self._predicted, self._seen = self._predict(), seen
        return self._measured(self._predicted)

    def _predict(self) -> Sheet:
        folder, name = self.folder, self.root.name or str(self.root)
        if not folder.plan.is_file():
            return Sheet(name, "run", notes=("The run has not built its plan yet.",))
        cluster = self.cluster or (folder.cluster if folder.cluster.is_file() else None)
        started = read_started(folder.plan)
        try:
            config = load(folder.config)
            found = predict_plan(
                config,
                planned(config, started.world),
                None if cluster is None else named_cluster(config, cluster),
                vocabulary=started.vocabulary,
                reads_in_place=started.reads_in_place,
                device=started.device,
            )
            return _of_prediction(found, name)
        except UserError as error:
            return Sheet(name, "run", notes=(f"The run is not predicted: {error}",))

    def _measured(self, sheet: Sheet) -> Sheet:
        folder, notes = self.folder, [*sheet.notes]
        started = read_started(folder.plan) if folder.plan.is_file() else None
        first = 1 if started is None else started.first_step
        notes += [] if started is None else [f"Corpus: {note}." for note in started.corpus]
        records = read_records(folder.metrics)
        steps = [each for each in records if each["step"] >= first and is_of(each, *_MEASURED)]
        figures = _figures(steps[WARM_UP:] or steps[-1:])
        timelines = [*sheet.timelines]
        try:
            timelines += _measured_timeline(folder)
        except UserError as error:
            notes.append(f"The measured timeline cannot be read: {error}")
        memory = sheet.memory
        if folder.timing.is_file():
            timing = read_timing(folder.timing)
            figures["peak memory"] = f"{format_bytes(max(timing.peaks))} {timing.memory}"
            memory = None if memory is None else replace(memory, peaks=timing.peaks, measured=timing.memory)
        rounds = summarize_rounds(read_records(folder.root / ROUNDS))
        if rounds is not None:
            figures |= round_figures(rounds)
            notes += round_notes(rounds)
        curves = Curves(
            _columns(records, ("step", *_SHOWN)),
            _columns(read_records(folder.validation), ("step", "loss")),
        )
        return with_measurements(
            sheet, figures, timelines=tuple(timelines), memory=memory, curves=curves, notes=tuple(notes)
        )


def _of_prediction(prediction: Prediction, name: str) -> Sheet:
    sheet = predicted_sheet(prediction, name, "run")
    if prediction.cluster is not None:
        return sheet
    note = (
        "Seconds are not predicted: the run knew no cluster. Name one with --cluster, or as run.cluster before the "
        "next run; a run in local processes measures this machine, unless ATOLL_MEASURE=0 is set."
    )
    return replace(sheet, notes=(note,))


def _measured_timeline(folder: RunFolder) -> list[StepTimeline]:
    """Return the step with timed instructions, otherwise the traced one; None if there is neither."""
    if folder.timeline.is_file():
        values = read_run_file(folder.timeline)
        try:
            return [recorded_timeline(values["ranks"], f"measured, step {whole_number(values['step'])}")]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder.timeline} is not what a run writes: {error}; run it again") from error
    if folder.trace.is_file():
        try:
            text = read_text(folder.trace, limit=LARGEST_JSON)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {folder.trace}, which `atoll train` writes: {error}") from error
        return [traced_timeline(from_chrome(text), "measured, by action")]
    return []


def _figures(steps: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the figures of typical steps."""
    if not steps:
        return {}
    found = {
        "step": f"{format_seconds(median(each['seconds'] for each in steps))}, median",
        "tokens": format_rate(median(each["tokens_per_second"] for each in steps), "tokens"),
        "bubble, mean over ranks": f"{fmean(each['bubble'] for each in steps):.1%}",
    }
    loss = steps[-1].get("loss")
    return found if loss is None else {**found, "loss": f"{loss:.4g}, step {steps[-1]['step']}"}


def _columns(records: Sequence[dict[str, Any]], names: Iterable[str]) -> dict[str, list[float]]:
    """Return the columns of the names that any record has, NaN for missing values."""
    return {
        name: [math.nan if record.get(name) is None else float(record[name]) for record in records]
        for name in names
        if any(record.get(name) is not None for record in records)
    }


def _stamp(paths: Iterable[Path]) -> tuple[object, ...]:
    found: list[object] = []
    for path in paths:
        try:
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size))
        except OSError:
            found.append(None)
    return tuple(found)
