"""The output of `atoll plan`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.base.units import format_bytes, format_count, format_rate, format_seconds
from atoll.prediction.cost import Prediction
from atoll.prediction.cost.breakdown import PARTS, busiest_rank
from atoll.prediction.planner.candidate import Candidate, choices

if TYPE_CHECKING:
    from atoll.prediction.planner.answer import Answer

SMALLEST_SHARE = 0.005
"""Smallest share of a step for which a part is listed."""


def describe_answer(answer: Answer, own: Prediction | None = None) -> Iterator[str]:
    """Yield the plan, its memory and time, the runners-up, and the effect of other choices and conditions."""
    best, prediction = answer.best, answer.prediction
    devices = prediction.plan.mesh.world
    rate = prediction.tokens_a_second
    model = prediction.workload
    active = (
        f" ({format_count(model.parameters)} parameters, {format_count(model.active)} active)" if model.experts else ""
    )
    yield f"{model.name}{active} on {devices} device{'s' if devices > 1 else ''}, {_batch(answer)}"
    yield ""
    yield from _table([(name, value) for name, value in choices(best).items()])
    yield ""
    yield (
        f"a step  {format_seconds(best.seconds)}: {format_rate(rate, 'tokens')}, "
        f"{format_rate(rate / devices, 'tokens')} a device, MFU {prediction.mfu:.1%}"
    )
    yield f"memory  {_memory(prediction)}"
    if best.nodes:
        yield f"nodes   {_nodes(prediction)}"
    yield f"time    {_time(prediction)}"
    yield f"proof   {_proof(answer)}"
    if model.mixture is not None:
        yield f"experts {_experts(prediction)}"
    if own is not None:
        yield f"yours   {_compared(own.seconds, best.seconds)}{'' if own.fits else ', and does not fit'}"
    if answer.runners_up:
        yield from ("", "runners-up, each different in two of mesh, microbatch, recompute, schedule and layout")
        yield from _table([_row(each, best) for each in answer.runners_up])
    yield from ("", "cost of another choice, with all others chosen again")
    yield from _table(
        [
            (each.choice, each.other or "any other", _more(each.seconds, best.seconds))
            for each in answer.alternatives
            if each.seconds is not None or each.choice == "layout"
        ]
    )
    yield from ("", "under other conditions (found with less effort)", *_table(list(_changes(answer))))


def _batch(answer: Answer) -> str:
    goal = answer.search.goal
    return f"{goal.global_batch} samples of {goal.sequence} tokens a step"


def _memory(prediction: Prediction) -> str:
    ranks = range(prediction.plan.mesh.pipeline)
    fullest = min(ranks, key=prediction.margin)
    held = prediction.peak(fullest)
    largest = max(held._fields, key=lambda name: getattr(held, name))
    share = getattr(held, largest) / held.total
    return (
        f"pipeline {prediction.seats.name(fullest)} {prediction.seats.is_fullest}: {format_bytes(held.total)} of "
        f"{format_bytes(prediction.seats.memory(fullest))}, {share:.0%} of it {largest}"
    )


def _nodes(prediction: Prediction) -> str:
    """Return which ranks to start on which nodes."""
    world, found = prediction.plan.mesh.world, []
    for kind, ranks in prediction.given.ranks_of_kinds():
        if ranks.start < world:
            found.append(f"ranks {ranks.start} to {min(ranks.stop, world) - 1} on {kind.name}")
    return f"start {', '.join(found)}"


def _time(prediction: Prediction) -> str:
    """Return the largest parts of the busiest rank's step."""
    busiest = prediction.breakdown[busiest_rank(prediction.breakdown)]
    parts = {PARTS[name]: value / busiest.total for name, value in busiest._asdict().items()}
    named = sorted((share, name) for name, share in parts.items() if share >= SMALLEST_SHARE)
    return ", ".join(f"{name} {share:.1%}" for share, name in reversed(named))


def _proof(answer: Answer) -> str:
    found = answer.found
    tried = f"{found.predicted} plans simulated, of {found.frames} meshes with microbatches"
    if answer.best.order.made is not None:
        return f"the order was searched for this plan, after {tried}; no bound on faster plans is known"
    if answer.best.order.layers is not None:
        return f"the split was searched for this plan, after {tried}; another plan is at most {answer.gap:.1%} faster"
    if answer.gap < 1e-9:
        return f"no plan is faster: {tried}, bounds exclude the rest"
    return f"another plan is at most {answer.gap:.1%} faster: {tried}, bounds exclude slower ones"


def _experts(prediction: Prediction) -> str:
    """Return what an exchange of rows sends, compared with gathers of experts."""
    mixture, tokens = prediction.workload.mixture, prediction.use.tokens
    assert mixture is not None, "the model has experts"
    return (
        f"an exchange of rows sends less than gathers of experts below {mixture.break_even:,.0f} tokens a microbatch; "
        f"here it has {tokens:,}"
    )


def _row(candidate: Candidate, best: Candidate) -> tuple[str, ...]:
    own = choices(candidate)
    names = ("mesh", "schedule", "layout", "microbatch", "recompute")
    return (*(own[name] if name != "recompute" else f"recompute {own[name]}" for name in names),
            format_seconds(candidate.seconds), _more(candidate.seconds, best.seconds))  # fmt: skip


def _changes(answer: Answer) -> Iterator[tuple[str, ...]]:
    best = choices(answer.best)
    for each in answer.changes:
        same = "" if each.same is None else f"this plan {format_seconds(each.same)}"
        if each.best is None:
            yield each.what, same, "found no plan that fits"
            continue
        own = choices(each.best)
        other = [f"{name} {value}" for name, value in own.items() if value != best.get(name)]
        plan = ", ".join(other[:4]) if other else "the same plan"
        yield each.what, same, f"best {format_seconds(each.best.seconds)}: {plan}"


def _more(seconds: float | None, best: float) -> str:
    if seconds is None:
        return "found none that fits"
    return f"+{seconds / best - 1.0:.1%}"


def _compared(own: float, best: float) -> str:
    return f"the config's own plan takes {format_seconds(own)}, {own / best - 1.0:+.1%}"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield the rows in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
