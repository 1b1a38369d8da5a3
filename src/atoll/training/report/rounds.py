"""Rounds of a run that is an island of a federation, from its rounds.jsonl. Pure, and imports no torch.

[Note: counted tokens] An outer gradient is of one fragment, and a round counts the tokens that it was learned from. So
with k fragments each token is counted k times, once for each of them. Tokens here are those of the records divided by
k: an island's sum is what it has trained on and all of the anchors have learned.

[Note: goodput] Tokens that rounds counted, of those that the members would have made had all taken part all the time.
k is the number of fragments, round r follows the round that averaged before it d_r seconds later, and c_ri are the
tokens that it counts of island i (0 for an island that it does not count):

    full(r)   r and the k rounds before it count all of their members: nobody is missing, and nothing is made up for
    pace_i    sum of c_ri over full rounds with member i / sum of their d_r       tokens a second
    goodput   sum of c_ri over all rounds and islands / sum of d_r * pace_i over all rounds and their members
    full_time the same with all islands in place of the members: those that are a member in any of the rounds

Without absences goodput is 1, however long rounds take: waits of a round that all are counted in are a part of the
pace. An island that is away costs goodput while it is a member, and so do those that wait for it. What it makes up
for counts once it is counted. A round whose anchors were lost counts nothing, and its seconds stay. The first k rounds
count shorter intervals and are left out, and so are rounds whose predecessor the island does not know. Seconds are
those at which this island followed: one that was there from the first round to the last knows best.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from atoll.base.units import format_bytes, format_count, format_seconds
from atoll.plans.federation.records import RoundRecord, read_record

_NUMBERS = ("time", "tokens", "lost", "waited", "sent_bytes", "received_bytes")
"""Fields of a line that are numbers."""
PAUSE = 10.0
"""Multiple of the usual seconds between two rounds from which a report says that the island may have been away."""


@dataclass(frozen=True, slots=True)
class RoundsSummary:
    """Rounds of an island's run.

    averaged: rounds of the federation that averaged, as far as the island knows.  known: those of them whose records it
    has.  undone: known ones whose anchors were lost.  counted: known ones that count an island, by its name.
    tokens: counted of each island; see [Note: counted tokens].  goodput, full_time: see [Note: goodput]; None if no
    round is full, or `unpaced` names members that are in no full round.
    pause: None, or a round before which the island saw no other for far longer than usual, and these seconds.
    waited: seconds of the island's training in which it waited for rounds.  takeovers: times that it took over anchors,
    and what it had learned since was lost: `lost` tokens.
    sent, received: bytes that the first rank's exchange sent to others, and elements that it read.
    distances: root mean square of |parameters - anchor| / |anchor| when it first and last sent an outer gradient.
    """

    island: str
    averaged: int = 0
    known: int = 0
    undone: int = 0
    counted: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, float] = field(default_factory=dict)
    goodput: float | None = None
    full_time: float | None = None
    unpaced: tuple[str, ...] = ()
    pause: tuple[int, float] | None = None
    waited: float = 0.0
    takeovers: int = 0
    lost: int = 0
    sent: int = 0
    received: int = 0
    distances: tuple[float, float] | None = None

    @property
    def own(self) -> int:
        """Known rounds that count the island."""
        return self.counted.get(self.island, 0)

    @property
    def waited_each(self) -> float:
        """Seconds that the island waited for a round, on average over those that it knows."""
        return self.waited / self.known if self.known else 0.0

    @property
    def all_tokens(self) -> float:
        """Counted tokens of all islands."""
        return sum(self.tokens.values())

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `atoll report` prints for an island's run."""
        return {
            "island": self.island,
            "averaged": self.averaged,
            "known": self.known,
            "undone": self.undone,
            "counted": dict(self.counted),
            "tokens": dict(self.tokens),
            "goodput": self.goodput,
            "full_time": self.full_time,
            "waited_seconds": self.waited,
            "takeovers": self.takeovers,
            "lost_tokens": self.lost,
            "sent_bytes": self.sent,
            "received_bytes": self.received,
            "distances": None if self.distances is None else list(self.distances),
        }


def summarize_rounds(lines: Iterable[Mapping[str, Any]]) -> RoundsSummary | None:
    """Return the summary of the lines of a rounds.jsonl; None if there is none that can be read.

    Lines without the fields that a run writes, or with others in them, are skipped.
    """
    events = [event for event in map(_event, lines) if event is not None]
    if not events:
        return None
    records: dict[int, RoundRecord] = {}
    times: dict[int, float] = {}
    for event in events:
        for record in event.records:
            # An island that has restarted from a checkpoint follows some rounds once more.
            records.setdefault(record.round, record)
            times.setdefault(record.round, event.time)
    last = records[max(records)] if records else None
    undone = {at for each in records.values() if each.restored is not None for at in range(each.restored, each.round)}
    averaged = [records[at] for at in sorted(records) if records[at].contributions]
    valid = [record for record in averaged if record.round not in undone]
    counted = Counter(each.island for record in valid for each in record.contributions)
    tokens: dict[str, float] = {}
    for record in valid:
        for name, count in _tokens(record).items():
            tokens[name] = tokens.get(name, 0.0) + count
    intervals = list(_intervals(records, times, averaged, undone))
    shares, unpaced = _goodput(intervals)
    distances = [event.distance for event in events if event.distance is not None]
    return RoundsSummary(
        events[-1].island,
        averaged=0 if last is None else last.turn,
        known=len(averaged),
        undone=sum(record.round in undone for record in averaged),
        counted=dict(sorted(counted.items())),
        tokens=dict(sorted(tokens.items())),
        goodput=shares[0],
        full_time=shares[1],
        unpaced=unpaced,
        pause=_pause(intervals),
        waited=sum(event.waited for event in events),
        takeovers=sum(event.what == "restarted" for event in events),
        lost=sum(event.lost for event in events),
        sent=_grown([event.sent for event in events]),
        received=_grown([event.received for event in events]),
        distances=(distances[0], distances[-1]) if distances else None,
    )


@dataclass(frozen=True, slots=True)
class _Event:
    island: str
    what: str
    time: float
    records: tuple[RoundRecord, ...]
    waited: float
    lost: int
    sent: int
    received: int
    distance: float | None


def _event(line: Mapping[str, Any]) -> _Event | None:
    """Return what a line says; None for one that is damaged."""
    distance = line.get("distance")
    if not all(_is_number(line.get(name)) for name in _NUMBERS):
        return None
    if not all(isinstance(line.get(name), str) for name in ("island", "what")):
        return None
    if not (distance is None or _is_number(distance)) or not isinstance(line.get("records"), list):
        return None
    with suppress(ValueError):
        return _Event(
            line["island"],
            line["what"],
            float(line["time"]),
            tuple(map(read_record, line["records"])),
            float(line["waited"]),
            int(line["lost"]),
            int(line["sent_bytes"]),
            int(line["received_bytes"]),
            distance,
        )
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _grown(counts: Sequence[int]) -> int:
    """Return the sum of a counter that begins at 0 with each process."""
    return sum(after - before if after >= before else after for before, after in pairwise([0, *counts]))


def _tokens(record: RoundRecord) -> dict[str, float]:
    """Return counted tokens by island: see [Note: counted tokens]."""
    return {each.island: each.tokens / len(record.bases) for each in record.contributions}


# ---- goodput


@dataclass(frozen=True, slots=True)
class _Interval:
    """From one round that averaged to the next one, `round`. tokens: that this one counts, by island.

    is_full: see [Note: goodput].
    """

    round: int
    seconds: float
    members: tuple[str, ...]
    tokens: Mapping[str, float]
    is_full: bool


def _intervals(
    records: Mapping[int, RoundRecord],
    times: Mapping[int, float],
    averaged: Sequence[RoundRecord],
    undone: set[int],
) -> Iterator[_Interval]:
    # Rounds in a row so far that count all their members.
    row = 0
    for at, record in enumerate(averaged):
        before, deciders = averaged[at - 1] if at else None, records.get(record.round - 1)
        follows = before is not None and record.turn == before.turn + 1
        members = () if deciders is None else tuple(each.island for each in deciders.members)
        counted = _tokens(record)
        is_whole = bool(members) and set(members) <= counted.keys() and record.round not in undone
        is_full = follows and is_whole and row >= len(record.bases)
        row = (row + 1 if follows else 1) if is_whole else 0
        if before is None or not follows or not members or record.turn <= len(record.bases):
            continue
        seconds = max(0.0, times[record.round] - times[before.round])
        tokens = {} if record.round in undone else counted
        yield _Interval(record.round, seconds, members, tokens, is_full=is_full)


def _goodput(intervals: Sequence[_Interval]) -> tuple[tuple[float | None, float | None], tuple[str, ...]]:
    """Return goodput and full_time, and the members whose pace is not known, without which there is neither."""
    names = sorted({name for each in intervals for name in each.members})
    paces: dict[str, float] = {}
    for name in names:
        full = [each for each in intervals if each.is_full and name in each.members]
        seconds = sum(each.seconds for each in full)
        if seconds > 0:
            paces[name] = sum(each.tokens[name] for each in full) / seconds
    unpaced = tuple(name for name in names if name not in paces)
    could = sum(each.seconds * paces.get(name, 0.0) for each in intervals for name in each.members)
    if unpaced or not could:
        return (None, None), unpaced
    counted = sum(sum(each.tokens.values()) for each in intervals)
    always = sum(each.seconds for each in intervals) * sum(paces.values())
    return (counted / could, counted / always), ()


def _pause(intervals: Sequence[_Interval]) -> tuple[int, float] | None:
    longest = max(intervals, key=lambda each: each.seconds, default=None)
    if longest is None or longest.seconds <= PAUSE * median(each.seconds for each in intervals):
        return None
    return longest.round, longest.seconds


# ---- text


def round_figures(summary: RoundsSummary) -> dict[str, str]:
    """Return the rows of a report."""
    rounds = f"{summary.averaged} averaged"
    if summary.known < summary.averaged:
        rounds += f", {summary.known} of them known here"
    if summary.undone:
        rounds += f", {summary.undone} undone"
    found = {
        "island": summary.island,
        "rounds": f"{rounds}, {summary.own} count this island",
        "rounds that count an island": ", ".join(f"{name} {count}" for name, count in summary.counted.items()),
        "counted tokens": f"{format_count(summary.all_tokens)}, of this island "
        f"{format_count(summary.tokens.get(summary.island, 0.0))}",
        "goodput": _shares(summary),
        "waited for rounds": f"{format_seconds(summary.waited)}, {format_seconds(summary.waited_each)} a round",
        "took over anchors": _times(summary.takeovers, summary.lost),
        "between islands": f"{format_bytes(summary.sent)} sent, {format_bytes(summary.received)} received",
    }
    if summary.distances is not None:
        first, last = summary.distances
        found["distance from anchors"] = f"{first:.3g} at first, {last:.3g} at last"
    return {name: value for name, value in found.items() if value}


def round_notes(summary: RoundsSummary) -> list[str]:
    """Return what the rows leave out, as sentences."""
    found = []
    if summary.known < summary.averaged:
        found.append(
            f"{summary.averaged - summary.known} rounds averaged while this island was away. Its record does not have "
            "them, so they are in no figure but the number of rounds."
        )
    if summary.unpaced:
        names = ", ".join(summary.unpaced)
        found.append(f"Goodput is not known: no round that all members took part in has {names} among them.")
    if summary.pause is not None:
        at, seconds = summary.pause
        found.append(
            f"This island saw no round in the {format_seconds(seconds)} before round {at}. If it was away, and the "
            "others were not, read goodput in the report of another island."
        )
    return found


def _shares(summary: RoundsSummary) -> str:
    if summary.goodput is None or summary.full_time is None:
        return ""
    return f"{summary.goodput:.1%} of the members, {summary.full_time:.1%} of islands that never leave"


def _times(count: int, lost: int) -> str:
    if not count:
        return "never"
    times = "once" if count == 1 else f"{count} times"
    return f"{times}, {format_count(lost)} tokens were lost" if lost else f"{times}, nothing was lost"
