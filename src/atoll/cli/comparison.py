"""Runs compared with their predictions and with each other, for `atoll report`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.base.units import format_bytes, format_count, format_seconds
from atoll.cli.arguments import read_cluster

if TYPE_CHECKING:
    from atoll.prediction.cost import Prediction
    from atoll.prediction.cost.comparison import Difference
    from atoll.training.report.rounds import RoundsSummary
    from atoll.training.run.measurements import RunRecords

_SHOWN = 10
"""Number of differences that are printed."""


@dataclass(frozen=True)
class Compared:
    """A run beside its prediction. differences: of its timed step, the largest first; () if it has none."""

    run: RunRecords
    prediction: Prediction
    differences: tuple[Difference, ...]

    @classmethod
    def read(cls, path: Path, cluster: Path | None) -> Compared:
        """Read a run, predict it on `cluster`, by default its own, and write its row for `atoll doctor --calibrate`.

        Raises ConfigError if records are missing or damaged, or no cluster is known.
        """
        from atoll.prediction.cost.comparison import compare
        from atoll.training.output.folder import write
        from atoll.training.run.measurements import read_run

        run = read_run(path)
        prediction = run.measured.predict(read_cluster(cluster or run.measured.cluster))
        differences = compare(prediction, run.timed) if run.timed else ()
        write(run.folder.calibration, f"{json.dumps(run.measured.row())}\n")
        return cls(run, prediction, differences)

    @property
    def error(self) -> float:
        """Relative error of the prediction: measured over predicted step time, minus one."""
        return self.run.measured.seconds / self.prediction.seconds - 1.0

    def values(self) -> dict[str, Any]:
        """Return the JSON object of `atoll report`."""
        return _values(self.run, self.prediction, self.differences)

    def describe(self) -> Iterator[str]:
        """Yield the step, its parts on each pipeline rank, the largest differences, and the memory."""
        predicted, measured = self.prediction.seconds, self.run.measured.seconds
        yield (f"a step  {format_seconds(predicted)} predicted, {format_seconds(measured)} measured, {self.error:+.1%}")
        yield from _describe(self.run, self.prediction, self.differences)


# ---- runs beside each other


def side_by_side(paths: Sequence[Path]) -> Iterator[str]:
    """Yield a table of measured figures of several runs, with their ratio to the first, and the keys in which their
    configs differ. Raises ConfigError if records are missing or damaged."""
    from atoll.training.run.measurements import read_run

    runs = [read_run(path) for path in paths]
    columns = [_figures(run) for run in runs]
    short = [path.name for path in paths]
    names = short if len({*short}) == len(short) else [str(path) for path in paths]
    width = max(14, *(len(name) + 2 for name in names))
    yield f"{'':24}{''.join(f'{name:>{width}}' for name in names)}"
    for figure, (read, show) in _FIGURES.items():
        found = [read(column) for column in columns]
        if all(value is None for value in found):
            continue
        cells = "".join(f"{'-' if value is None else show(value):>{width}}" for value in found)
        first, others = found[0], found[1:]
        ratios = [f"{value / first - 1.0:+.1%}" for value in others if first and value is not None]
        yield f"{figure:24}{cells}  {', '.join(ratios)}".rstrip()
    settings = [_flat(run.measured.config.model_dump(mode="json")) for run in runs]
    keys = dict.fromkeys(key for each in settings for key in each)
    changed = [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]
    if changed:
        yield "\nkeys that differ"
    for key in changed:
        yield f"{key:24}{''.join(f'{each.get(key)!s:>{width}}' for each in settings)}"


def _figures(run: RunRecords) -> dict[str, Any]:
    """Return the measured figures of a run; None for those that it has not recorded."""
    from statistics import median

    from atoll.training.output.folder import is_of, read_records

    folder, seconds = run.folder, run.measured.seconds
    steps = read_records(folder.metrics)
    rates = [each["tokens_per_second"] for each in steps if is_of(each, "tokens_per_second")]
    losses = [each["loss"] for each in steps if is_of(each, "loss")]
    validations = [each["loss"] for each in read_records(folder.validation) if is_of(each, "loss")]
    rounds = _rounds(run.folder.root)
    return {
        "seconds": seconds,
        "rate": median(rates) if rates else None,
        "steps": steps[-1]["step"] if steps else None,
        "loss": losses[-1] if losses else None,
        "validation": min(validations, default=None),
        "peak": max(run.peaks, default=None),
        "counted_in": None if rounds is None else rounds.own,
        "counted_tokens": None if rounds is None else rounds.tokens.get(rounds.island, 0.0),
        "lost_tokens": None if rounds is None else rounds.lost,
        "goodput": None if rounds is None else rounds.goodput,
        "full_time": None if rounds is None else rounds.full_time,
        "waited": None if rounds is None else rounds.waited,
        "sent_bytes": None if rounds is None else rounds.sent,
        "received_bytes": None if rounds is None else rounds.received,
    }


_Shown = tuple[Callable[[dict[str, Any]], Any], Callable[[Any], str]]

_FIGURES: dict[str, _Shown] = {
    "seconds of a step": (lambda of: of["seconds"], format_seconds),
    "tokens per second": (lambda of: of["rate"], format_count),
    "highest peak memory": (lambda of: of["peak"], format_bytes),
    "steps": (lambda of: of["steps"], str),
    "last loss": (lambda of: of["loss"], lambda loss: f"{loss:.4f}"),
    "lowest validation loss": (lambda of: of["validation"], lambda loss: f"{loss:.4f}"),
    "rounds that count it": (lambda of: of["counted_in"], str),
    "counted tokens": (lambda of: of["counted_tokens"], format_count),
    "lost tokens": (lambda of: of["lost_tokens"], format_count),
    "goodput, of members": (lambda of: of["goodput"], lambda share: f"{share:.1%}"),
    "goodput, full time": (lambda of: of["full_time"], lambda share: f"{share:.1%}"),
    "waited for rounds": (lambda of: of["waited"], format_seconds),
    "sent to islands": (lambda of: of["sent_bytes"], format_bytes),
    "received from islands": (lambda of: of["received_bytes"], format_bytes),
}


def _flat(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found


def describe_rounds(path: Path) -> Iterator[str]:
    """Yield the rounds of a run that is an island of a federation; nothing of other runs."""
    from atoll.training.report.rounds import round_figures, round_notes

    rounds = _rounds(path)
    if rounds is None:
        return
    yield ""
    for name, value in round_figures(rounds).items():
        yield f"{name:30}{value}"
    yield from (f"note: {note}" for note in round_notes(rounds))


def _rounds(path: Path) -> RoundsSummary | None:
    from atoll.training.output.folder import ROUNDS, read_records
    from atoll.training.report.rounds import summarize_rounds

    return summarize_rounds(read_records(path / ROUNDS))


# ---- JSON


def _values(run: RunRecords, prediction: Prediction, differences: tuple[Difference, ...]) -> dict[str, Any]:
    from atoll.prediction.cost.comparison import by_part
    from atoll.prediction.cost.summary import bytes_of

    ranks = range(len(run.timed))
    rounds = _rounds(run.folder.root)
    return {
        "run": str(run.folder.root),
        "seconds": {"predicted": prediction.seconds, "measured": run.measured.seconds},
        "error": run.measured.seconds / prediction.seconds - 1.0,
        "timed_seconds": run.timed_seconds if run.timed else None,
        "parts": [
            {"rank": rank, "part": part, "predicted": predicted, "measured": measured}
            for rank in ranks
            for part, (predicted, measured) in by_part(differences, rank).items()
        ],
        "differences": [
            {
                "rank": each.rank,
                "do": str(each.do),
                "block": each.of if each.do.is_of_block else None,
                "unit": each.of if each.do.is_of_unit else None,
                "name": _name(run, each),
                "predicted": each.predicted._asdict(),
                "measured": each.measured._asdict(),
                "seconds": each.seconds,
                "cause": each.cause,
            }
            for each in differences
        ],
        "ranks": [
            {
                "rank": rank,
                "predicted": bytes_of(prediction.peak(rank)),
                "measured_bytes": peak,
                "memory": run.memory,
            }
            for rank, peak in enumerate(run.peaks)
        ],
        "calibration": str(run.folder.calibration),
        **({} if rounds is None else {"rounds": rounds.to_json()}),
    }


# ---- text


def _describe(run: RunRecords, prediction: Prediction, differences: tuple[Difference, ...]) -> Iterator[str]:
    if not run.timed:
        yield "the run did not reach its last step, whose instructions are timed: there is nothing else to compare"
        return
    yield from _parts(run, prediction, differences)
    yield f"\nthe largest differences{'rank':>9}{'times':>7}{'predicted':>12}{'measured':>12}{'difference':>12}"
    for each in differences[:_SHOWN]:
        times = max(each.measured.times, each.predicted.times)
        cells = "".join(f"{format_seconds(one.seconds):>12}" for one in (each.predicted, each.measured))
        yield f"{_name(run, each):23}{each.rank:>9}{times:>7}{cells}{format_seconds(each.seconds):>12}"
        yield f"    {each.cause}"
    yield f"\n{_title(run)}"
    for rank, peak in enumerate(run.peaks):
        held = prediction.peak(rank)
        parts = ", ".join(f"{name} {format_bytes(each)}" for name, each in held._asdict().items() if each)
        yield f"rank {rank}: {format_bytes(held.allocated)} predicted, {format_bytes(peak)} measured ({parts})"


def _parts(run: RunRecords, prediction: Prediction, differences: tuple[Difference, ...]) -> Iterator[str]:
    """Yield the breakdown of the timed step on each pipeline rank, and the time between its instructions."""
    from atoll.prediction.cost.breakdown import PARTS
    from atoll.prediction.cost.comparison import by_part

    for rank in range(len(run.timed)):
        parts = {PARTS[part]: pair for part, pair in by_part(differences, rank).items()}
        left = run.timed_seconds - sum(measured for _, measured in parts.values())
        parts |= {"between instructions": (0.0, left), "the timed step": (prediction.seconds, run.timed_seconds)}
        yield f"\n{f'rank {rank}':28}{'predicted':>12}{'measured':>12}{'difference':>12}"
        for name, (predicted, measured) in parts.items():
            cells = "".join(f"{format_seconds(each):>12}" for each in (predicted, measured, measured - predicted))
            yield f"{name:28}{cells}"


def _title(run: RunRecords) -> str:
    of = "memory of the process, with interpreter and libraries" if run.memory == "resident" else "tensors"
    return f"bytes at the peak: predicted of tensors, measured of {of}"


def _name(run: RunRecords, each: Difference) -> str:
    """Return an instruction with the name of its block."""
    if each.do.is_of_block:
        return f"{each.do} {run.blocks[each.of]}"
    return f"{each.do} unit {each.of}" if each.do.is_of_unit else str(each.do)
