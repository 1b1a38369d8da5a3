"""`atoll compare RUN`: compare a run with its prediction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.base.units import format_bytes, format_seconds
from atoll.cli.arguments import CLUSTER, AsJson, read_cluster

if TYPE_CHECKING:
    from atoll.prediction.cost import Prediction
    from atoll.prediction.cost.comparison import Difference
    from atoll.training.measurements import Run

SHOWN = 10
"""Number of differences that are printed."""


def command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    cluster: Annotated[Path | None, typer.Option(help=f"{CLUSTER} By default that of the run's prediction.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the measured step time and memory of RUN with the prediction, instruction by instruction.

    The step time is the median of the run; instructions are those of its last step. The instructions that differ most
    are printed with their likely cause. The command also writes calibration.jsonl to the run folder, a row for
    `atoll calibrate`.

    Keys of the JSON object: run; seconds, predicted and measured; error, relative; timed_seconds, of the last step on
    rank 0, null where it was not reached; parts, one object a pipeline rank and part of its step with rank, part,
    predicted and measured; differences, the largest first, with rank, do, block or unit (null for neither), name,
    predicted and measured (times, seconds of all times, shortest), seconds (what it took longer) and cause; ranks, one
    object a pipeline rank with rank, predicted (bytes by component), measured_bytes and memory, what these are of:
    "allocated" tensors or "resident" memory; calibration, the file that was written.
    """
    from atoll.prediction.cost.comparison import compare
    from atoll.training.folder import write
    from atoll.training.measurements import read_run

    found = read_run(run)
    prediction = found.measured.predict(read_cluster(cluster or found.measured.cluster))
    differences = compare(prediction, found.timed) if found.timed else ()
    seconds = prediction.seconds
    write(found.folder.calibration, f"{json.dumps(found.measured.row())}\n")
    if as_json:
        typer.echo(json.dumps(_values(found, prediction, differences)))
        return
    measured = found.measured.seconds
    typer.echo(
        f"a step  {format_seconds(seconds)} predicted, {format_seconds(measured)} measured, {_error(found, seconds)}"
    )
    typer.echo("\n".join(_describe(found, prediction, differences)))
    typer.echo(f"wrote {found.folder.calibration}, a row for atoll calibrate", err=True)


def _error(run: Run, predicted: float) -> str:
    return f"{run.measured.seconds / predicted - 1.0:+.1%}"


# ---- JSON


def _values(run: Run, prediction: Prediction, differences: tuple[Difference, ...]) -> dict[str, Any]:
    from atoll.prediction.cost.comparison import by_part
    from atoll.prediction.cost.summary import bytes_of

    ranks = range(len(run.timed))
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
    }


# ---- text


def _describe(run: Run, prediction: Prediction, differences: tuple[Difference, ...]) -> Iterator[str]:
    if not run.timed:
        yield "the run did not reach its last step, whose instructions are timed: there is nothing else to compare"
        return
    yield from _parts(run, prediction, differences)
    yield f"\nthe largest differences{'rank':>9}{'times':>7}{'predicted':>12}{'measured':>12}{'difference':>12}"
    for each in differences[:SHOWN]:
        times = max(each.measured.times, each.predicted.times)
        cells = "".join(f"{format_seconds(one.seconds):>12}" for one in (each.predicted, each.measured))
        yield f"{_name(run, each):23}{each.rank:>9}{times:>7}{cells}{format_seconds(each.seconds):>12}"
        yield f"    {each.cause}"
    yield f"\n{_title(run)}"
    for rank, peak in enumerate(run.peaks):
        held = prediction.peak(rank)
        parts = ", ".join(f"{name} {format_bytes(each)}" for name, each in held._asdict().items() if each)
        yield f"rank {rank}: {format_bytes(held.allocated)} predicted, {format_bytes(peak)} measured ({parts})"


def _parts(run: Run, prediction: Prediction, differences: tuple[Difference, ...]) -> Iterator[str]:
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


def _title(run: Run) -> str:
    of = "memory of the process, with interpreter and libraries" if run.memory == "resident" else "tensors"
    return f"bytes at the peak: predicted of tensors, measured of {of}"


def _name(run: Run, each: Difference) -> str:
    """Return an instruction with the name of its block."""
    if each.do.is_of_block:
        return f"{each.do} {run.blocks[each.of]}"
    return f"{each.do} unit {each.of}" if each.do.is_of_unit else str(each.do)
