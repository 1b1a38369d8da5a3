"""`atoll show WHAT`: figures and pictures of layouts, schedules and programs."""

from __future__ import annotations

import typer

from atoll.cli import layouts, program, schedule

show_app = typer.Typer(no_args_is_help=True, help="Show layouts, a schedule or a program: figures and pictures.")

show_app.command("layouts")(layouts.layouts_command)
show_app.command("schedule")(schedule.schedule_command)
show_app.command("program")(program.program_command)
