"""`atoll report RUN|PLAN...`: write one HTML page about runs and plans."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.base.units import format_bytes
from atoll.cli.arguments import CLUSTER, Overrides, with_cluster

if TYPE_CHECKING:
    from atoll.training.report import Sheet


def command(
    run_or_plan: Annotated[list[Path], typer.Argument(help="Folders of runs, and config files.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    overrides: Overrides = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help=f"{CLUSTER} By default run.cluster, or that of the run's prediction."),
    ] = None,
) -> None:
    """Write one self-contained HTML page about runs and plans.

    It shows the timeline of all pipeline ranks, predicted above measured; where the time of a step goes; memory over
    time; traffic by link; the layout; metrics; and the plan in words. Several runs and plans are shown side by side.

    A PLAN is a config file; it is predicted, and nothing runs. Without a cluster there is no predicted step time and no
    predicted timeline.
    """
    from atoll.training.folder import write
    from atoll.training.report import page

    sheets = [_sheet(path, tuple(overrides or ()), cluster) for path in run_or_plan]
    names = Counter(sheet.name for sheet in sheets)
    both = zip(sheets, run_or_plan, strict=True)
    sheets = [replace(sheet, name=str(path)) if names[sheet.name] > 1 else sheet for sheet, path in both]
    for sheet in sheets:
        for note in sheet.notes:
            typer.echo(f"note: {sheet.name}: {note}", err=True)
    text = page(sheets)
    write(output, text)
    typer.echo(f"wrote {output}, {format_bytes(len(text.encode()), decimal=True)}")


def _sheet(path: Path, overrides: tuple[str, ...], cluster: Path | None) -> Sheet:
    from atoll.base.errors import ConfigError
    from atoll.training.sheet import RunReader, is_run, sheet_of_config

    if path.is_dir():
        if not is_run(path):
            raise ConfigError(f"{path} is not the folder of a run: it has no config.toml, which `atoll train` writes")
        return RunReader(path, cluster).sheet()
    return sheet_of_config(path, with_cluster(overrides, cluster))
