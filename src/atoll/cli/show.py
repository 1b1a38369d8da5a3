"""`atoll show WHAT`: figures and pictures of layouts, schedules and programs."""

from __future__ import annotations

import typer

from atoll.cli import layouts, program, schedule

app = typer.Typer(no_args_is_help=True, help="Show layouts, a schedule or a program: figures and pictures.")

app.command("layouts")(layouts.layouts_command)
app.command("schedule")(schedule.schedule_command)
app.command("program")(program.program_command)
