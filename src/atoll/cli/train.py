"""`atoll train CONFIG`: train a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from atoll.cli.arguments import CLUSTER, ConfigFile, Overrides, with_cluster
from atoll.cli.predict import report
from atoll.errors import ConfigError, UserError

if TYPE_CHECKING:
    from atoll.training.process import Request


def command(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        Literal["auto", "always", "never"],
        typer.Option(
            "--resume",
            help="auto: continue from the newest whole checkpoint, on any ranks and layout; begin where there is none. "
            "always: refuse to begin. never: refuse a folder that holds a run.",
        ),
    ] = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew: delete the run that the folder holds.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the run and predict it; start nothing, write nothing.")
    ] = False,
    cluster: Annotated[
        Path | None, typer.Option(help=f"{CLUSTER} Instead of run.cluster; its seconds are predicted and recorded.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Train as CONFIG says, in parallel.ranks local processes, or as a rank of torchrun or Slurm.

    The same command begins a run and continues it after whatever ended it. One run at a time writes to a folder. Ranks
    that a launcher has restarted continue, whatever --resume and --overwrite say.

    Everything a run makes lies in run.folder: metrics.jsonl, validation.jsonl, plan.json, trace.json, prediction.json,
    timing.json, checkpoints.
    SIGINT and SIGTERM save a checkpoint after the step under way and leave with 130 and 143; a second one kills.

    With --dry-run one process looks for everything that the run would refuse, on each pipeline rank, and prints what
    `atoll predict` says: without a cluster the bytes alone. With --cluster the run is meant for that, and the devices
    of this machine are not looked for.

    Keys of the JSON object: folder; step, the last one done; stopped, the signal's name or null; tokens and seconds of
    this start; validation_loss, the first and the last, or null; checkpoint; sample, the generated text or null;
    step_seconds and peak_bytes, each predicted (null where that is not known) and measured: the seconds of a typical
    step and a list of one number a pipeline rank. With --dry-run those of `atoll predict`.
    """
    from atoll.training.folder import Start
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
    """Print what the run would take. Raises what it would refuse. elsewhere: it is not for this machine."""
    from atoll.cost import Cluster
    from atoll.training.dry_run import check_run
    from atoll.training.prediction import predict

    def say(line: str) -> None:
        typer.echo(line, err=True)

    checked = check_run(request, elsewhere=elsewhere, say=say)
    path = checked.config.run.cluster
    cluster = None if path is None else Cluster.read(path)
    for note in checked.config.notes:
        say(f"note: {note}")
    try:
        found = predict(
            checked.config,
            checked.plan,
            cluster,
            vocabulary=checked.vocabulary,
            reads_in_place=checked.device == "cpu",
            device=checked.device,
        )
        report(found, as_json=request.as_json)
    except UserError as error:
        say(f"note: the run would start, and is not predicted: {error}")
