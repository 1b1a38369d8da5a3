"""Text of the prediction of islands that train one model together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from atoll.base.units import format_bytes, format_count, format_rate, format_seconds
from atoll.plans.federation.rounds import KEPT_RECORDS
from atoll.prediction.cost.federation import FederatedPrediction, IslandRow
from atoll.prediction.cost.rounds import ReturnCost
from atoll.prediction.cost.summary import held_bytes
from atoll.prediction.explain.phrases import columns, percent


def describe_islands(found: FederatedPrediction) -> Iterator[str]:
    """Yield what islands do in an interval, what each needs, and what the interval waits for."""
    first = next(iter(found.predictions.values()))
    outer, model = first.plan.outer, first.workload
    assert outer is not None, "islands have outer steps"
    fragments = len(next(iter(found.islands.values())).parts.fragments)
    rounds = "one round" if fragments == 1 else f"{fragments} rounds"
    yield f"{model.name}, {format_count(model.parameters)} parameters, {outer.apart}"
    yield (
        f"an interval of {format_seconds(found.seconds)} has {rounds}; all islands "
        f"{format_rate(found.tokens_a_second, 'tokens')}"
    )
    yield ""
    yield from _paces(found.rows)
    yield ""
    yield from _needs(found.rows)
    yield ""
    yield from bound_sentences(found)
    yield from _notes(found)


def _paces(rows: tuple[IslandRow, ...]) -> list[str]:
    headers = ["island", "devices", "a step", "samples", "steps", "interval", "waits", "tokens", "share"]
    return columns(
        headers,
        [
            [
                row.name,
                str(row.devices),
                format_seconds(row.step),
                str(row.batch),
                str(row.every),
                format_seconds(row.interval),
                format_seconds(row.waited),
                format_count(row.tokens),
                percent(row.share),
            ]
            for row in rows
        ],
    )


def _needs(rows: tuple[IslandRow, ...]) -> list[str]:
    headers = ["island", "peak", "free", "host memory", "uplink", "busy", "to return", "in"]
    return columns(
        headers,
        [
            [
                row.name,
                format_bytes(row.peak),
                format_bytes(row.margin) if row.margin >= 0 else f"-{format_bytes(-row.margin)}",
                format_bytes(row.held.total),
                format_bytes(row.sent),
                "unknown" if row.busy is None else percent(row.busy),
                format_bytes(row.returns.nbytes),
                _returned(row.returns),
            ]
            for row in rows
        ],
    )


def _returned(cost: ReturnCost) -> str:
    if not cost.catches_up:
        return "never"
    return "unknown" if cost.seconds is None else format_seconds(cost.seconds)


def bound_sentences(found: FederatedPrediction) -> Iterator[str]:
    """Yield which island or link bounds the interval, and who is late."""
    rows = {row.name: row for row in found.rows}
    name, is_uplink = found.bound
    own = rows[name]
    if is_uplink:
        yield (
            f"The uplink of island {name} bounds the interval: its transfers take {percent(own.busy or 0.0)} of the "
            f"time, and every island waits {format_seconds(min(row.waited for row in rows.values()))} or more. A "
            "codec, a longer delay or more steps make that less."
        )
    else:
        waits = {row.name: row.waited for row in rows.values() if row.name not in (name, *found.late)}
        others = ""
        if waits:
            most = max(waits, key=waits.__getitem__)
            share = percent(waits[most] / rows[most].interval)
            others = f" Of the others island {most} waits longest: {format_seconds(waits[most])}, {share} of its time."
        yield (
            f"The {own.every} steps of island {name} bound the interval: it waits {format_seconds(own.waited)} for "
            f"rounds.{others}"
        )
    if found.is_overdue:
        yield (
            "Some waits end after parallel.outer.grace: islands then train on, and follow these rounds later than "
            "parallel.outer.delay says."
        )
    if found.late:
        yield (
            f"{_named(found.late)}: rounds leave behind what is slower by more than parallel.outer.grace, and count "
            "its tokens late or not at all. Take fewer steps there, a longer grace or a larger quorum."
        )
    stranded = [row.name for row in rows.values() if not row.returns.catches_up]
    if stranded:
        yield (
            f"{_named(stranded)} cannot return while the others train: when its anchors have arrived, the others keep "
            f"no record of the round after them ({KEPT_RECORDS} are kept). Take more steps in an interval."
        )
    for row in rows.values():
        if row.margin < 0:
            yield f"The plan of island {row.name} does not fit: it needs {format_bytes(-row.margin)} more."


def _named(islands: Sequence[str]) -> str:
    return f"Island {islands[0]}" if len(islands) == 1 else f"Islands {', '.join(islands)}"


def _notes(found: FederatedPrediction) -> Iterator[str]:
    for name, island in found.islands.items():
        yield from (f"note: island {name}: {note}" for note in island.speeds.notes)


def describe_outer_alternatives(found: FederatedPrediction) -> list[str]:
    """Return a table of other numbers of steps and codecs."""
    rows = [
        [
            each.setting,
            format_seconds(each.interval),
            format_rate(each.rate, "tokens"),
            percent(each.waited),
            f"{format_bytes(each.sent, decimal=True)}/s",
            ", ".join(each.late) or "none",
        ]
        for each in found.alternatives()
    ]
    headers = ["parallel.outer", "interval", "all islands", "waiting", "all uplinks", "left behind"]
    return [*columns(headers, rows), "Each of these changes the results of a run."]


def islands_summary(found: FederatedPrediction, *, explains: bool = False) -> dict[str, Any]:
    """Return the JSON object of islands. explains: with other settings of outer steps."""
    rows = {
        row.name: {**row._asdict(), "held": held_bytes(row.held), "returns": row.returns._asdict()}
        for row in found.rows
    }
    summary: dict[str, Any] = {
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_a_second,
        "bound": found.bound._asdict(),
        "late": list(found.late),
        "is_overdue": found.is_overdue,
        "fits": found.fits,
        "islands": rows,
    }
    if explains:
        summary["alternatives"] = [{**each._asdict(), "late": list(each.late)} for each in found.alternatives()]
    return summary
