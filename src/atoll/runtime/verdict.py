"""Which rank keeps the others waiting: what each rank last said of itself -> the ranks to blame.

A rank says what it does, which ranks must act before that can end, and what its process is. From the monitor's own
clock comes when it was last heard, and since when it has said the same. Nothing here reads a clock or a socket.

[Note: whom to blame] A rank that is not heard any more comes first: it is stopped, or its machine or network is gone,
and whatever the others wait for may be its doing. Otherwise the rank that has waited longest is asked whom it waits
for, that one the same, and so on. The walk ends at a rank that waits for nobody, which is busy or stuck in code that is
not Atoll's, or where it comes back: those ranks wait for each other, so what travels between them was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SILENT_SECONDS = 3.0
"""A rank that was not heard for so long is blamed before those that say what they wait for. Heartbeats are far more
frequent; only a process that is stopped, or holds Python's interpreter, misses so many."""

START_SECONDS = 60.0
"""How long a rank has at least until its first heartbeat: a busy machine starts processes slowly."""

OUTSIDE = "code outside the engine"
"""What a rank does that is in none of the engine's calls."""

SHOWN = 6
"""Waiting ranks that a message names."""


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a rank. doing: where it is, as in "step 3, 0F1".  waits_for: the ranks that must act before it
    can go on, none for a rank that is busy.  host, pid: its process.  heard, since: when its last heartbeat came, and
    since when it has said the same, in seconds of the monitor's clock.

    host: empty until the first heartbeat.
    """

    doing: str
    waits_for: tuple[int, ...]
    host: str
    pid: int
    heard: float
    since: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """ranks: those to blame, the first one first.  message: who, where, since when, and who waits for what."""

    ranks: tuple[int, ...]
    message: str


def judge(states: Mapping[int, State], now: float, limit: float) -> Verdict | None:
    """Say who is late, if anyone has been silent, or has waited for others, for longer than `limit` seconds."""
    starting = max(limit, START_SECONDS)
    silent = sorted(
        (state.heard, rank) for rank, state in states.items() if now - state.heard > (limit if state.host else starting)
    )
    if silent:
        return _silent([rank for _, rank in silent], states, now)
    waiting = sorted(
        (state.since, rank) for rank, state in states.items() if state.waits_for and now - state.since > limit
    )
    if not waiting:
        return None
    walked = [waiting[0][1]]
    while True:
        peers = [rank for rank in states[walked[-1]].waits_for if rank in states]
        if not peers:
            return _stuck(walked[-1:], states, now)
        unheard = [rank for rank in peers if now - states[rank].heard > SILENT_SECONDS]
        if unheard:
            return _silent(unheard, states, now)
        # A busy one first, then the one that has not moved for longest: of many peers most have come, and wait as well.
        at = min(peers, key=lambda rank: (bool(states[rank].waits_for), rank in walked, states[rank].since))
        if at in walked:
            return _circle(walked[walked.index(at) :], states, now)
        walked.append(at)


def _silent(ranks: Sequence[int], states: Mapping[int, State], now: float) -> Verdict:
    seconds = now - states[ranks[0]].heard
    return Verdict(
        tuple(ranks),
        f"{named(ranks)} sent no heartbeat for {seconds:.0f} s; last heard in {_where(ranks, states)}. Stopped, or "
        f"machine or network are gone{_waiting(ranks, states, now)}",
    )


def _stuck(ranks: Sequence[int], states: Mapping[int, State], now: float) -> Verdict:
    seconds = now - states[ranks[0]].since
    return Verdict(
        tuple(ranks),
        f"{named(ranks)} did not advance for {seconds:.0f} s in {_where(ranks, states)}, where it waits for no other "
        f"rank{_waiting(ranks, states, now)}",
    )


def _circle(ranks: Sequence[int], states: Mapping[int, State], now: float) -> Verdict:
    seconds = now - max(states[rank].since for rank in ranks)
    lines = [f"rank {rank} in {states[rank].doing} for {named(states[rank].waits_for)}" for rank in ranks]
    return Verdict(
        tuple(ranks),
        f"{named(sorted(ranks))} wait for each other since {seconds:.0f} s: {'; '.join(lines)}. What was sent between "
        f"them did not arrive{_waiting(ranks, states, now)}",
    )


def _where(ranks: Sequence[int], states: Mapping[int, State]) -> str:
    places = dict.fromkeys(states[rank].doing for rank in ranks)
    return ", ".join(list(places)[:SHOWN])


def _waiting(blamed: Sequence[int], states: Mapping[int, State], now: float) -> str:
    found = [(state.since, rank) for rank, state in states.items() if rank not in blamed and set(state.waits_for)]
    if not found:
        return ""
    shown = [
        f"rank {rank} in {states[rank].doing} for {named(states[rank].waits_for)}" for _, rank in sorted(found)[:SHOWN]
    ]
    more = f"; {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f". Waiting: {'; '.join(shown)}{more}"


def named(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2 to 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = []
    for first, last in runs:
        between = " to " if last > first + 1 else ", "
        words.append(str(first) if first == last else f"{first}{between}{last}")
    several = len(runs) > 1 or (bool(runs) and runs[0][0] != runs[0][1])
    return f"rank{'s' if several else ''} {', '.join(words)}"
