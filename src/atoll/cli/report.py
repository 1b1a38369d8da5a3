"""`atoll report RUN|PLAN...`: a page about runs and plans, and runs compared with their predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.base.units import format_bytes
from atoll.cli.arguments import CLUSTER, Overrides, with_cluster

if TYPE_CHECKING:
    from atoll.training.report import Sheet


def report_command(
    run_or_plan: Annotated[list[Path], typer.Argument(help="Folders of runs, and config files.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; report.html by default.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help=f"{CLUSTER} By default run.cluster, or that of the run's prediction."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page of one RUN on the loopback address until Ctrl-C.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="With --live: port of the server; any free one by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each RUN.")] = False,
) -> None:
    """Write one self-contained HTML page about runs and plans, and compare the runs with their predictions and with
    each other.

    The page shows the timeline of all pipeline ranks, predicted above measured; where the time of a step goes; memory
    over time; traffic by link; the layout; metrics; and the plan in words. Several runs and plans are side by side.

    A PLAN is a config file; it is predicted, and nothing runs. Without a cluster there is no predicted step time and no
    predicted timeline.

    For a RUN, its measured step time and memory are printed beside the prediction, instruction by instruction: the step
    time is the median of the run; instructions are those of its last step; those that differ most have their likely
    cause. For several runs, their measured figures and the keys in which their configs differ are printed side by side.
    A row for `atoll doctor --calibrate` is written to calibration.jsonl in the folder of each run. For an island of a
    federation there are its rounds, too.

    With --live the page follows a run that goes on. The folder is only read, and may still be empty: the page waits for
    the run to start. With --json the page is written only if -o names it.

    Keys of the JSON object: run; seconds, predicted and measured; error, relative; timed_seconds, of the last step on
    rank 0, null where it was not reached; parts, one object a pipeline rank and part of its step with rank, part,
    predicted and measured; differences, the largest first, with rank, do, block or unit (null for neither), name,
    predicted and measured (times, seconds of all times, shortest), seconds (what it took longer) and cause; ranks, one
    object a pipeline rank with rank, predicted (bytes by component), measured_bytes and memory, what these are of:
    "allocated" tensors or "resident" memory; calibration, the file that was written; for an island of a federation also
    rounds, see docs/report.md.
    """
    from atoll.base.errors import ConfigError

    if live:
        _serve(run_or_plan, port, cluster, without={"--output": output, "--set": overrides, "--json": as_json})
        return
    if port is not None:
        raise ConfigError(f"--port {port} is for --live, which serves the page")
    if as_json:
        _print_json(run_or_plan, cluster)
    if output is not None or not as_json:
        _write(run_or_plan, output or Path("report.html"), tuple(overrides or ()), cluster, quiet=as_json)
    if not as_json:
        _print([path for path in run_or_plan if path.is_dir()], cluster)


def _serve(paths: list[Path], port: int | None, cluster: Path | None, *, without: Mapping[str, object]) -> None:
    """Serve the page of one run. Raises ConfigError for options that have no effect on it."""
    from atoll.base.errors import ConfigError
    from atoll.cli.live import serve_until_interrupted
    from atoll.training.sheet import RunReader

    useless = [option for option, value in without.items() if value]
    if useless:
        raise ConfigError(f"{', '.join(useless)}: no effect with --live, which serves the page; leave out one of them")
    if len(paths) != 1 or paths[0].is_file():
        raise ConfigError(f"--live serves one run: give one folder instead of {' '.join(map(str, paths))}")
    serve_until_interrupted(RunReader(paths[0], cluster), port or 0)


def _print_json(paths: list[Path], cluster: Path | None) -> None:
    import json

    from atoll.base.errors import ConfigError
    from atoll.cli.comparison import Compared

    plans = [str(path) for path in paths if path.is_file()]
    if plans:
        raise ConfigError(f"{' '.join(plans)}: --json compares runs; `atoll predict CONFIG --json` predicts a plan")
    for line in [json.dumps(Compared.read(path, cluster).values()) for path in paths]:
        typer.echo(line)


def _print(runs: list[Path], cluster: Path | None) -> None:
    """Print each run beside its prediction with its rounds, and several runs beside each other."""
    from atoll.base.errors import AtollError
    from atoll.cli.comparison import Compared, describe_rounds, side_by_side

    for path in runs:
        rounds = [*describe_rounds(path)]
        try:
            found = Compared.read(path, cluster)
            lines = list(found.describe())
        except AtollError as error:  # the page is written; a run that has just begun has nothing to compare
            typer.echo(f"note: {path} is not compared with its prediction: {error}", err=True)
            if rounds:
                typer.echo("\n".join([*(["", str(path)] if len(runs) > 1 else []), *rounds]))
            continue
        typer.echo("\n".join(["", *([str(path)] if len(runs) > 1 else []), *lines, *rounds]))
        typer.echo(f"wrote {found.run.folder.calibration}, a row for atoll doctor --calibrate", err=True)
    if len(runs) > 1:
        try:
            typer.echo("\n".join(["", *side_by_side(runs)]))
        except AtollError as error:
            typer.echo(f"note: the runs are not compared with each other: {error}", err=True)


def _write(paths: list[Path], output: Path, overrides: tuple[str, ...], cluster: Path | None, *, quiet: bool) -> None:
    """Write the page, and print its name, on stderr if `quiet`."""
    from atoll.training.output.folder import write
    from atoll.training.report import page

    sheets = [_sheet(path, overrides, cluster) for path in paths]
    names = Counter(sheet.name for sheet in sheets)
    both = zip(sheets, paths, strict=True)
    sheets = [replace(sheet, name=str(path)) if names[sheet.name] > 1 else sheet for sheet, path in both]
    for sheet in sheets:
        for note in sheet.notes:
            typer.echo(f"note: {sheet.name}: {note}", err=True)
    text = page(sheets)
    write(output, text)
    typer.echo(f"wrote {output}, {format_bytes(len(text.encode()), decimal=True)}", err=quiet)


def _sheet(path: Path, overrides: tuple[str, ...], cluster: Path | None) -> Sheet:
    from atoll.base.errors import ConfigError
    from atoll.training.sheet import RunReader, is_run, sheet_of_config

    if path.is_dir():
        if not is_run(path):
            raise ConfigError(f"{path} is not the folder of a run: it has no config.toml, which `atoll train` writes")
        return RunReader(path, cluster).sheet()
    return sheet_of_config(path, with_cluster(overrides, cluster))
