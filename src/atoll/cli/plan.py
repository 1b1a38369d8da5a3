"""`atoll plan CONFIG`: the fastest plan for a model on a cluster, and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.arguments import CLUSTER, AsJson, ConfigFile, Overrides, read_cluster, with_cluster
from atoll.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from atoll.config import Config
    from atoll.cost import Prediction
    from atoll.planner import Answer, Candidate

SHOWN = 0.005
"""Share of a step that a part has to have to be named among what binds."""


def command(
    config: ConfigFile,
    overrides: Overrides = None,
    cluster: Annotated[Path | None, typer.Option(help=CLUSTER)] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the config with the plan in it here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose mesh, layout, schedule, microbatch and all else of [parallel] for a model on a cluster.

    The plan is for parallel.ranks, or all devices of the cluster if that is not written, with train.global_batch,
    data.sequence and train.precision as they are. Where parallel.auto is true, what is written beside it is kept, and
    so is train.microbatch; else [parallel] is a plan of its own, which is shown beside.

    Keys of the JSON object: plan, its choices; settings, by section of a config; seconds of a step; gap, the share by
    which another plan may be faster at most; tokens_per_second; predicted, how many plans were played, and frames, how
    many meshes with microbatches there are; prediction, as `atoll predict --json` has it; runners_up, each with plan
    and seconds; undone, by choice, other and its seconds; changes, each with what, same and best (seconds or null) and
    plan; own, the seconds of the config's own plan, or null.
    """
    from atoll.config import load
    from atoll.training.choosing import choose, load_chosen, overrides_of

    sets = with_cluster(overrides, cluster)
    loaded = load(config, sets)
    answer = choose(loaded, read_cluster(loaded.run.cluster))
    for note in loaded.notes:
        typer.echo(f"note: {note}", err=True)
    own = None if loaded.parallel.auto else _own(loaded)
    if output is not None:
        chosen, _ = load_chosen(config, [*sets, *overrides_of(answer.best)])
        output.write_text(chosen.dump(), encoding="utf-8")
    if as_json:
        import json

        typer.echo(json.dumps(summary(answer, own)))
        return
    lines = list(describe(answer, own))
    typer.echo("\n".join(lines))


def _own(config: Config) -> Prediction | None:
    """The config's own plan; None where it is none."""
    from atoll.errors import UserError
    from atoll.training.prediction import predict_on

    try:
        found = predict_on(config, read_cluster(config.run.cluster))
        _ = found.seconds
    except UserError:
        return None
    return found


# ---- values


def summary(answer: Answer, own: Prediction | None = None) -> dict[str, Any]:
    """The JSON object of `atoll plan`."""
    from atoll.cost.summary import summary as predicted
    from atoll.planner import choices, settings

    def row(candidate: Candidate) -> dict[str, Any]:
        return {"plan": choices(candidate), "seconds": candidate.seconds}

    return {
        **row(answer.best),
        "settings": settings(answer.best),
        "gap": answer.gap,
        "tokens_per_second": answer.prediction.tokens_a_second,
        "predicted": answer.found.predicted,
        "frames": answer.found.frames,
        "prediction": predicted(answer.prediction),
        "runners_up": [row(each) for each in answer.runners_up],
        "undone": {each.choice: {"other": each.other, "seconds": each.seconds} for each in answer.undone},
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


# ---- text


def describe(answer: Answer, own: Prediction | None = None) -> Iterator[str]:
    """The plan, what binds, the others, and what would change."""
    from atoll.planner import choices

    best, prediction = answer.best, answer.prediction
    devices = prediction.plan.mesh.world
    rate = prediction.tokens_a_second
    yield f"{prediction.workload.name} on {devices} device{'s' if devices > 1 else ''}, {_batch(answer)}"
    yield ""
    yield from _table([(name, value) for name, value in choices(best).items()])
    yield ""
    yield (
        f"a step  {format_seconds(best.seconds)}: {format_rate(rate, 'tokens')}, "
        f"{format_rate(rate / devices, 'tokens')} a device, MFU {prediction.mfu:.1%}"
    )
    yield f"memory  {_memory(prediction)}"
    yield f"binds   {_binding(prediction)}"
    yield f"proof   {_proof(answer)}"
    if own is not None:
        yield f"yours   {_compared(own.seconds, best.seconds)}{'' if own.fits else ', and does not fit'}"
    if answer.runners_up:
        yield from ("", "runners-up, each different in two of mesh, microbatch, recompute, schedule and layout")
        yield from _table([_row(each, best) for each in answer.runners_up])
    yield from ("", "what another choice would cost, everything else chosen anew")
    yield from _table(
        [
            (each.choice, each.other or "any other", _more(each.seconds, best.seconds))
            for each in answer.undone
            if each.seconds is not None or each.choice == "layout"
        ]
    )
    yield from ("", "if the question changes", *_table(list(_changes(answer))))


def _batch(answer: Answer) -> str:
    goal = answer.search.goal
    return f"{goal.global_batch} samples of {goal.sequence} tokens a step, {goal.precision}"


def _memory(prediction: Prediction) -> str:
    ranks = range(prediction.plan.mesh.pipeline)
    fullest = min(ranks, key=prediction.margin)
    held = prediction.peak(fullest)
    largest = max(held._fields, key=lambda name: getattr(held, name))
    share = getattr(held, largest) / held.total
    return (
        f"rank {fullest} of the pipeline is the fullest: {format_bytes(held.total)} of "
        f"{format_bytes(prediction.device.memory)}, {share:.0%} of it {largest}"
    )


def _binding(prediction: Prediction) -> str:
    """The largest parts of the busiest rank's step."""
    from atoll.cost.breakdown import PARTS, busiest_rank

    busiest = prediction.breakdown[busiest_rank(prediction.breakdown)]
    parts = {PARTS[name]: value / busiest.total for name, value in busiest._asdict().items()}
    named = sorted((share, name) for name, share in parts.items() if share >= SHOWN)
    return ", ".join(f"{name} {share:.1%}" for share, name in reversed(named))


def _proof(answer: Answer) -> str:
    found = answer.found
    tried = f"{found.predicted} plans played, of {found.frames} meshes with microbatches"
    if answer.gap < 1e-9:
        return f"no plan is faster: {tried}, bounds rule out the rest"
    return f"another plan is at most {answer.gap:.1%} faster: {tried}, bounds rule out what is slower"


def _row(candidate: Candidate, best: Candidate) -> tuple[str, ...]:
    from atoll.planner import choices

    own = choices(candidate)
    names = ("mesh", "schedule", "layout", "microbatch", "recompute")
    return (*(own[name] if name != "recompute" else f"recompute {own[name]}" for name in names),
            format_seconds(candidate.seconds), _more(candidate.seconds, best.seconds))  # fmt: skip


def _changes(answer: Answer) -> Iterator[tuple[str, ...]]:
    from atoll.planner import choices

    best = choices(answer.best)
    for each in answer.changes:
        same = "" if each.same is None else f"this plan {format_seconds(each.same)}"
        if each.best is None:
            yield each.what, same or "this plan does not fit", "no plan fits"
            continue
        own = choices(each.best)
        other = [f"{name} {value}" for name, value in own.items() if value != best[name]]
        plan = ", ".join(other[:4]) if other else "the same plan"
        yield each.what, same, f"best {format_seconds(each.best.seconds)}: {plan}"


def _more(seconds: float | None, best: float) -> str:
    if seconds is None:
        return "none found that fits"
    return f"+{seconds / best - 1.0:.1%}"


def _compared(own: float, best: float) -> str:
    return f"the config's own plan takes {format_seconds(own)}, {own / best - 1.0:+.1%}"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as their cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
