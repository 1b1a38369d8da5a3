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
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from atoll.base.errors import AtollError
from atoll.base.unexpected import print_unexpected
from atoll.cli import (
    convert,
    doctor,
    explain,
    interchange,
    plan,
    predict,
    report,
    show,
    train,
    verify,
    watch,
)

MOVED = {
    "compare": "report RUN",
    "calibrate": "doctor --calibrate ROWS",
    "layouts": "show layouts",
    "schedule": "show schedule NAME",
    "program": "show program CONFIG",
}
"""Commands of older versions, and what has taken their place."""


class Commands(TyperGroup):
    """The commands. A word of `MOVED` is an error that names its new place."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of the first word. Raises a usage error, exit code 2, if there is none."""
        if args[0] in MOVED:
            ctx.fail(f"`atoll {args[0]}` is now `atoll {MOVED[args[0]]}`, with the same options")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="atoll",
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.command("train")(train.train_command)
app.command("plan")(plan.plan_command)
app.command("predict")(predict.predict_command)
app.command("explain")(explain.explain_command)
app.command("verify")(verify.verify_command)
app.command("report")(report.report_command)
app.command("watch")(watch.watch_command)
app.add_typer(show.show_app, name="show")
app.command("convert")(convert.convert_command)
app.command("import")(interchange.import_command)
app.command("export")(interchange.export_command)
app.command("doctor")(doctor.doctor_command)


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
