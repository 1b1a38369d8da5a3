"""`atoll train CONFIG`: train a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from atoll.base.errors import ConfigError, UserError
from atoll.cli.arguments import CLUSTER, ConfigFile, Overrides, with_cluster
from atoll.cli.predict import report

if TYPE_CHECKING:
    from atoll.training.process import Request


def train_command(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        Literal["auto", "always", "never"],
        typer.Option(
            "--resume",
            help="auto: continue from the newest complete checkpoint, under any world size and layout; start if there "
            "is none. always: fail if there is none. never: fail if the folder contains a run.",
        ),
    ] = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in the folder and start over.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the run and predict it without starting or writing anything.")
    ] = False,
    cluster: Annotated[
        Path | None, typer.Option(help=f"{CLUSTER} Replaces run.cluster; the predicted step time is recorded.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Run the training of CONFIG, in parallel.ranks local processes, or as a rank of torchrun or Slurm.

    The same command starts a run and continues it after any interruption. One run at a time writes to a folder. Ranks
    that a launcher has restarted continue, regardless of --resume and --overwrite.

    A run writes to run.folder: metrics.jsonl, validation.jsonl, plan.json, trace.json, prediction.json,
    timing.json, checkpoints.
    SIGINT and SIGTERM save a checkpoint after the current step and exit with 130 and 143; a second one kills.

    With --dry-run one process makes the checks of a run for each pipeline rank, and prints the output of
    `atoll predict`, without a cluster only memory. With --cluster the run is assumed to be on that cluster, and the
    devices of this machine are not checked.

    Keys of the JSON object: folder; step, the last one done; stopped, the signal's name or null; tokens and seconds of
    this start; validation_loss, the first and the last, or null; checkpoint; sample, the generated text or null;
    step_seconds and peak_bytes, each predicted (null if unknown) and measured: the seconds of a typical step, and a
    list with one number per pipeline rank. With --dry-run the keys of `atoll predict`.
    """
    from atoll.training.output.folder import Start
    from atoll.training.process import Request, train

    if overwrite and resume == "always":
        raise ConfigError("--resume always continues a run and --overwrite deletes it; keep one")
    start = Start.OVERWRITE if overwrite else Start(resume)
    request = Request(config, tuple(with_cluster(overrides, cluster)), start, as_json)
    if dry_run:
        _dry_run(request, elsewhere=cluster is not None)
        return
    code = train(request)
    if code:
        raise typer.Exit(code)


def _dry_run(request: Request, *, elsewhere: bool) -> None:
    """Print the prediction of the run. Raises the errors of a start. elsewhere: the run is for other machines."""
    from atoll.training.dry_run import check_run
    from atoll.training.setup.here import measured_cluster
    from atoll.training.setup.prediction import named_cluster, predict_plan

    def say(line: str) -> None:
        typer.echo(line, err=True)

    checked = check_run(request, elsewhere=elsewhere, say=say)
    here = None if elsewhere else measured_cluster(checked.config, checked.plan.mesh.world, checked.device)
    cluster = named_cluster(checked.config) or here
    for note in checked.config.notes:
        say(f"note: {note}")
    try:
        found = predict_plan(
            checked.config,
            checked.plan,
            cluster,
            vocabulary=checked.vocabulary,
            reads_in_place=checked.device == "cpu",
            device=checked.device,
        )
        report(found, as_json=request.as_json, keeps=checked.config.checkpoint.memory > 0)
    except UserError as error:
        say(f"note: the run can start but cannot be predicted: {error}")
