"""The command `atoll`: its subcommands and its exit codes.

    0    success
    1    failure
    2    invalid request: an unknown option, a wrong key, an impossible size
    130  stopped by SIGINT, 143 by SIGTERM; `atoll train` has saved a checkpoint

Results go to stdout, progress and errors to stderr. Commands import heavy modules inside their functions, so that
`atoll --help` and the pure commands start without torch.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from atoll.base.errors import AtollError
from atoll.base.unexpected import print_unexpected
from atoll.cli import (
    calibrate,
    compare,
    convert,
    doctor,
    explain,
    interchange,
    layouts,
    plan,
    predict,
    program,
    report,
    schedule,
    train,
    verify,
    watch,
)

app = typer.Typer(
    name="atoll",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.command("train")(train.command)
app.command("plan")(plan.command)
app.command("predict")(predict.command)
app.command("explain")(explain.command)
app.command("verify")(verify.command)
app.command("compare")(compare.command)
app.command("report")(report.command)
app.command("watch")(watch.command)
app.command("calibrate")(calibrate.command)
app.command("schedule")(schedule.command)
app.command("layouts")(layouts.command)
app.command("program")(program.command)
app.command("convert")(convert.command)
app.command("import")(interchange.import_command)
app.command("export")(interchange.export_command)
app.command("doctor")(doctor.command)


def main() -> None:
    """Run the command line and exit with the code of its outcome."""
    try:
        app(prog_name="atoll")
    except AtollError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit:
        raise
    except BaseException as error:  # panics of libraries in Rust are no Exception
        print_unexpected(error)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        from atoll import __version__

        typer.echo(f"atoll {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Any sharding layout with any pipeline schedule, for PyTorch models."""
