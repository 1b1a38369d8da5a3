"""`atoll doctor --calibrate ROWS`: fit a cluster's constants to measured steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from atoll.base.units import format_seconds
from atoll.cli.arguments import read_cluster

if TYPE_CHECKING:
    from atoll.prediction.cost import Cluster
    from atoll.prediction.cost.calibration import Fitted, Step

WIDEST = 0.99
"""Largest spread that a cluster may have."""


def fit_constants(rows: Path, output: Path, cluster: Path | None, constants: str | None, *, as_json: bool) -> None:
    """Fit the constants of a cluster to the measured steps in `rows`, write it to `output`, and print the fit."""
    from atoll.prediction.cost.calibration import calibrate, changed
    from atoll.training.folder import write
    from atoll.training.measurements import read_rows, steps_of

    found = read_rows(rows)
    own = next((row.cluster for row in found if row.cluster is not None), None)
    before = read_cluster(cluster or own)
    steps = steps_of(rows, found, before)
    fitted = calibrate(steps, tuple(name.strip() for name in constants.split(",")) if constants else ())
    rounded = {name: float(f"{value:.4g}") for name, value in fitted.constants.items()}
    count = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
    source = f"fitted to {count} of {rows} by atoll doctor --calibrate"
    write(output, _described(changed(before, rounded), min(fitted.spread, WIDEST), source).dump())
    after = [step.on(fitted.cluster).predicted for step in steps]
    if as_json:
        typer.echo(json.dumps(_values(output, steps, after, fitted)))
    else:
        typer.echo("\n".join(_describe(steps, after, fitted)))
        typer.echo(f"wrote {output}", err=True)


def _described(cluster: Cluster, spread: float, source: str) -> Cluster:
    """Return the cluster with the source and spread of its constants."""
    device = cluster.device
    said = device.efficiency.model_copy(update={"spread": float(f"{spread:.4g}"), "source": source})
    return cluster.model_copy(update={"device": device.model_copy(update={"efficiency": said})})


def _values(output: Path, steps: Sequence[Step], after: Sequence[float], fitted: Fitted) -> dict[str, Any]:
    return {
        "file": str(output),
        "error": fitted.error,
        "spread": fitted.spread,
        "steps": [
            {
                "name": step.name,
                "measured": step.seconds,
                "before": step.predicted,
                "after": fit,
                "error": fit / step.seconds - 1.0,
            }
            for step, fit in zip(steps, after, strict=True)
        ],
        "constants": [
            {"name": name, "before": fitted.before[name], "after": value} for name, value in fitted.constants.items()
        ],
    }


def _describe(steps: Sequence[Step], after: Sequence[float], fitted: Fitted) -> Iterator[str]:
    width = max(len("step"), *(len(step.name) for step in steps)) + 2
    yield f"{'step':{width}}{'measured':>12}{'before':>12}{'after':>12}{'error':>9}"
    for step, fit in zip(steps, after, strict=True):
        cells = "".join(f"{format_seconds(each):>12}" for each in (step.seconds, step.predicted, fit))
        yield f"{step.name:{width}}{cells}{fit / step.seconds - 1.0:>+9.1%}"
    yield f"\n{'constant':{width}}{'before':>12}{'after':>12}"
    for name, value in fitted.constants.items():
        yield f"{name:{width}}{fitted.before[name]:>12.4g}{value:>12.4g}"
    yield f"\nmean error {fitted.error:.1%}, spread {fitted.spread:.1%}"
