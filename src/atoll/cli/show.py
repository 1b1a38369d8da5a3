"""`atoll show WHAT`: figures and pictures of layouts, schedules and programs."""

from __future__ import annotations

import typer

from atoll.cli import layouts, program, schedule

app = typer.Typer(no_args_is_help=True, help="Show layouts, a schedule or a program: figures and pictures.")

app.command("layouts")(layouts.command)
app.command("schedule")(schedule.command)
app.command("program")(program.command)
