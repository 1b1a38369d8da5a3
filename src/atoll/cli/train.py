"""`atoll train CONFIG`: train a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    config: Annotated[Path, typer.Argument(help="A TOML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the file, as in --set train.steps=5."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint, on any ranks and layout.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Train as CONFIG says, in parallel.ranks local processes, or as a rank of torchrun or Slurm.

    Everything a run makes lies in run.folder: metrics.jsonl, validation.jsonl, plan.json, trace.json, checkpoints.
    SIGINT and SIGTERM save a checkpoint after the step under way and leave with 130 and 143; a second one kills.

    Keys of the JSON object: folder; step, the last one done; stopped, the signal's name or null; tokens and seconds of
    this start; validation_loss, the first and the last, or null; checkpoint; sample, the generated text or null.
    """
    from atoll.training.process import Request, train

    code = train(Request(config, tuple(overrides or ()), resume, as_json))
    if code:
        raise typer.Exit(code)
