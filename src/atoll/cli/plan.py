"""`atoll plan CONFIG`: find the fastest plan for a model on a cluster, and explain it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.arguments import CLUSTER, AsJson, ConfigFile, Overrides, cluster_of, with_cluster
from atoll.cli.islands import archipelago_of, plan_all

if TYPE_CHECKING:
    from atoll.prediction.cost import Cluster, Prediction
    from atoll.prediction.planner import Answer, Candidate
    from atoll.training.config import Config


def plan_command(
    config: ConfigFile,
    overrides: Overrides = None,
    cluster: Annotated[Path | None, typer.Option(help=CLUSTER)] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the config with the plan to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose mesh, layout, schedule, microbatch and every other parallel setting for a model on a cluster.

    The plan is for parallel.ranks, or all devices of the cluster if that is not set, with train.global_batch and
    data.sequence unchanged. If parallel.auto is true, the settings beside it are kept, and so are train.microbatch and
    train.precision; otherwise train.precision is kept, and the plan of the config is shown for comparison.

    On a cluster file with islands: a plan for each on all its devices, with a batch and a number of inner steps so that
    all arrive together. -o writes a config for each, with its name before the ending.

    Keys of the JSON object: plan, its choices; settings, by section of a config; seconds of a step; gap, the share by
    which another plan may be faster at most; tokens_per_second; predicted, the number of simulated plans, and frames,
    of meshes with microbatches; prediction, as `atoll predict --json` has it; runners_up, each with plan and seconds;
    alternatives, by choice, other and its seconds (undone is their old name); changes, each with what, same and best
    (seconds or null) and plan; own, the seconds of the config's own plan, or null. With islands: those of `atoll
    predict`, and plans, by island, with plan, settings and set (overrides for --set).
    """
    from atoll.prediction.planner.text import describe_answer
    from atoll.training.config import load
    from atoll.training.setup.choosing import load_chosen, overrides_of, plan

    sets = with_cluster(overrides, cluster)
    loaded = load(config, sets)
    every = archipelago_of(loaded)
    if every is not None:
        plan_all(loaded, every, path=config, sets=sets, output=output, as_json=as_json)
        return
    cluster_found = cluster_of(loaded)
    answer = plan(loaded, cluster_found)
    for note in loaded.notes:
        typer.echo(f"note: {note}", err=True)
    own = None if loaded.parallel.auto else _own(loaded, cluster_found)
    if output is not None:
        chosen, _ = load_chosen(config, [*sets, *overrides_of(answer.best)])
        output.write_text(chosen.dump(), encoding="utf-8")
    if as_json:
        import json

        typer.echo(json.dumps(_summary(answer, own)))
        return
    typer.echo("\n".join(describe_answer(answer, own)))


def _own(config: Config, cluster: Cluster) -> Prediction | None:
    """Return the config's own plan, or None if it has none."""
    from atoll.base.errors import UserError
    from atoll.training.setup.prediction import predict

    try:
        found = predict(config, cluster)
        _ = found.seconds
    except UserError:
        return None
    return found


# ---- values


def _summary(answer: Answer, own: Prediction | None = None) -> dict[str, Any]:
    """Return the JSON object of `atoll plan`."""
    from atoll.prediction.cost.summary import summary as predicted
    from atoll.prediction.planner import choices, settings

    def row(candidate: Candidate) -> dict[str, Any]:
        return {"plan": choices(candidate), "seconds": candidate.seconds}

    alternatives = {each.choice: {"other": each.other, "seconds": each.seconds} for each in answer.alternatives}
    return {
        **row(answer.best),
        "settings": settings(answer.best),
        "gap": answer.gap,
        "tokens_per_second": answer.prediction.tokens_a_second,
        "predicted": answer.found.predicted,
        "frames": answer.found.frames,
        "prediction": predicted(answer.prediction),
        "runners_up": [row(each) for each in answer.runners_up],
        "alternatives": alternatives,
        "undone": alternatives,  # the former name, kept for one version
        "changes": [
            {
                "what": each.what,
                "same": each.same,
                "best": None if each.best is None else each.best.seconds,
                "plan": None if each.best is None else choices(each.best),
            }
            for each in answer.changes
        ],
        "own": None if own is None else own.seconds,
    }
