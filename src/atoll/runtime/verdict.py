"""Find the rank that keeps the others waiting, from the last reported states of all ranks.

A rank reports its position, the ranks it waits for, and its process. The monitor's clock gives the time of its last
heartbeat, and the time since which it has reported the same. Nothing here reads a clock or a socket.

[Note: whom to blame] A silent rank comes first: it is stopped, or its machine or network has failed, and it may be the
cause of all waits. Otherwise, start at the rank that has waited longest and follow the ranks waited for. The walk ends
at a rank that waits for nobody, which is busy or stuck in code outside Atoll, or at a rank visited before: those ranks
wait for each other, so a message between them was lost. In a collective that waits for all its ranks, a message lost in
one direction may be blamed on the wrong sender.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SILENT_SECONDS = 3.0
"""Seconds of silence after which a rank is blamed before ranks that report what they wait for. Heartbeats are far more
frequent; only a process that is stopped, or holds Python's interpreter lock, misses so many."""

TOGETHER_SECONDS = 1.0
"""Ranks that fell silent within so many seconds did so for one reason, such as a cut link: their last heartbeats
differ."""

START_SECONDS = 60.0
"""Minimum time limit for a rank's first heartbeat: a busy machine starts processes slowly."""

OUTSIDE = "code outside the engine"
"""Position of a rank outside all calls of the engine."""

LONGEST_SECONDS = 600.0
"""Seconds for which a rank may be silent, or keep another one waiting, if no duration is known: while the engine
is built, in the first steps, while a checkpoint is saved or loaded, and in code outside the engine."""
SHORTEST_SECONDS = 60.0
"""Minimum of this limit for short steps: a busy machine or file system may stall for a long time."""
TIMES, MEASURED, RECENT = 10.0, 3, 32
"""A step may take `TIMES` the longest of the last `RECENT` ones, after `MEASURED` of them."""

RUNS = "runs"
STATUS = {
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "D": "waits in the kernel, as for a disk,",
    "Z": "has ended",
    "X": "has ended",
}
"""Status of a silent process by its letter in `/proc`; `RUNS` for all others."""

SHOWN = 6
"""Maximum number of waiting ranks in a message."""


@dataclass(frozen=True, slots=True)
class RankState:
    """The known state of a rank. doing: its position, as in "step 3, 0F1".  waits_for: the ranks that must act before
    it can continue, none for a busy rank.  host, pid: its process.  heard, since: the time of its last heartbeat, and
    the time since which it has reported the same, in seconds of the monitor's clock.

    host: empty until the first heartbeat.  patience: seconds that its current work may take.  page: the descriptor of
    its page (`atoll.runtime.page`).  status: of a silent rank's process, as observed on its machine; see `STATUS`.
    program, at: the program that it executes, 0 for none, and its progress; numbers of one program can be compared.
    """

    doing: str
    waits_for: tuple[int, ...]
    host: str
    pid: int
    heard: float
    since: float
    patience: float = LONGEST_SECONDS
    page: int = -1
    status: str = ""
    program: int = 0
    at: int = 0

    def order(self, other: RankState) -> int:
        """Return -1 if this rank is behind another one in the same program, 1 if it is ahead, 0 if this is unknown."""
        return (self.at > other.at) - (self.at < other.at) if self.program == other.program != 0 else 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """ranks: those to blame, the first one first.  message: which rank, where, since when, and who waits for what."""

    ranks: tuple[int, ...]
    message: str


def patience(seconds: Sequence[float]) -> float:
    """Return the time limit of a step after steps of these seconds, the latest last."""
    if len(seconds) < MEASURED:
        return LONGEST_SECONDS
    return min(LONGEST_SECONDS, max(SHORTEST_SECONDS, TIMES * max(seconds[-RECENT:])))


def transport_patience(limit: float | None) -> float:
    """Return the seconds for which gloo and NCCL wait for a peer. They do not know whom to blame, so they leave a busy
    machine ten more minutes for a verdict under `limit`, and end only waits that no verdict ends."""
    return (limit or LONGEST_SECONDS) + LONGEST_SECONDS


def judge(states: Mapping[int, RankState], now: float, limit: float | None) -> Verdict | None:
    """Return a verdict if any rank has been silent, or has waited for others, for longer than `limit` seconds.

    limit: None: the longest time limit of any rank's own work.
    """
    if limit is None:
        limit = max((state.patience for state in states.values()), default=LONGEST_SECONDS)
    starting = max(limit, START_SECONDS)
    silent = [rank for rank, state in states.items() if now - state.heard > (limit if state.host else starting)]
    if silent:
        return _silent(silent, states, now)
    starts = {rank for rank, state in states.items() if not state.host}
    waiting = sorted(
        (state.since, rank)
        for rank, state in states.items()
        if state.waits_for and now - state.since > (starting if starts & set(state.waits_for) else limit)
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
        # A busy rank first: of many peers, most have arrived and wait as well. One that is ahead has done its part.
        own = states[walked[-1]]
        at = min(
            peers,
            key=lambda rank: (
                bool(states[rank].waits_for),
                states[rank].order(own),
                rank in walked,
                states[rank].since,
            ),
        )
        if at in walked:
            return _circle(walked[walked.index(at) :], states, now)
        walked.append(at)


def _silent(found: Sequence[int], states: Mapping[int, RankState], now: float) -> Verdict:
    """Return the verdict on silent ranks, including those that fell silent at the same time."""
    last = max(states[rank].heard for rank in found)
    heard = {rank: state.heard for rank, state in states.items() if rank in found or state.host}
    ranks = [rank for at, rank in sorted((at, rank) for rank, at in heard.items()) if at <= last + TOGETHER_SECONDS]
    seen = [rank for rank in ranks if states[rank].status]
    unseen = [rank for rank in ranks if not states[rank].status]
    sentences = [
        silence(
            rank,
            states[rank].status,
            states[rank].doing,
            missed=f"sent no heartbeat for {now - states[rank].heard:.0f} s",
        )
        for rank in seen
    ]
    if unseen:
        sentences.append(
            f"{named(unseen)} sent no heartbeat for {now - states[unseen[0]].heard:.0f} s; last heard in "
            f"{_where(unseen, states)}. The process is stopped, or its machine or network has failed"
        )
    return Verdict(tuple(ranks), f"{'. '.join(sentences)}{_waiting(ranks, states)}")


def silence(rank: int, status: str, doing: str, *, missed: str) -> str:
    """Return the message about a silent rank whose process was inspected. missed: the missing reaction."""
    does = STATUS.get(status, RUNS)
    why = ": code that holds Python's interpreter, or its connection is cut" if does == RUNS else ""
    return f"rank {rank} {does} in {doing} and {missed}{why}"


def _stuck(ranks: Sequence[int], states: Mapping[int, RankState], now: float) -> Verdict:
    seconds = now - states[ranks[0]].since
    return Verdict(
        tuple(ranks),
        f"{named(ranks)} did not advance for {seconds:.0f} s in {_where(ranks, states)}, where it waits for no other "
        f"rank{_waiting(ranks, states)}",
    )


def _circle(ranks: Sequence[int], states: Mapping[int, RankState], now: float) -> Verdict:
    seconds = now - max(states[rank].since for rank in ranks)
    lines = [f"rank {rank} in {states[rank].doing} for {named(states[rank].waits_for)}" for rank in ranks]
    return Verdict(
        tuple(ranks),
        f"{named(sorted(ranks))} wait for each other since {seconds:.0f} s: {'; '.join(lines)}. What was sent "
        f"between them did not arrive{_waiting(ranks, states)}",
    )


def _where(ranks: Sequence[int], states: Mapping[int, RankState]) -> str:
    """Return the positions of ranks; if they differ, by rank."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(states[rank].doing, []).append(rank)
    if len(places) == 1:
        return next(iter(places))
    return " and ".join(f"{doing} ({named(found)})" for doing, found in list(places.items())[:SHOWN])


def _waiting(blamed: Sequence[int], states: Mapping[int, RankState]) -> str:
    found = [(state.since, rank) for rank, state in states.items() if rank not in blamed and set(state.waits_for)]
    if not found:
        return ""
    shown = [
        f"rank {rank} in {states[rank].doing} for {named(states[rank].waits_for)}" for _, rank in sorted(found)[:SHOWN]
    ]
    more = f"; {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f". Waiting: {'; '.join(shown)}{more}"


def named(ranks: Iterable[int]) -> str:
    """Return `rank 3`, `ranks 0, 2 to 5`."""
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
