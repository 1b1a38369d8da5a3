"""State of a federation, from the notices that its islands show. Pure: nothing here reads a clock or a socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from atoll.base.units import format_count, format_seconds
from atoll.plans.federation.lots import Lots
from atoll.plans.federation.records import Contribution, Notice, RoundRecord, Wish
from atoll.plans.federation.rules import FederationRules


class IslandState(StrEnum):
    """TRAINS: it is a member.  JOINING: it is none yet.  LEAVING: it wants to be none, or is none any more.

    SILENT: it answers, and its notice has not changed for the seconds after which no round waits for it.
    UNREACHABLE: it does not answer.  REFUSED: what it answers is not of this federation.
    """

    TRAINS = "trains"
    JOINING = "joining"
    LEAVING = "leaving"
    SILENT = "silent"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class IslandReading:
    """What was read of an island. notice: None if it cannot be read; `problem` says why.

    is_refused: it answers, but with something else than a notice of this federation.  unchanged: seconds since another
    notice was read before; with a problem, seconds since it last answered, None if it never has.
    """

    island: str
    address: str
    notice: Notice | None = None
    problem: str | None = None
    is_refused: bool = False
    unchanged: float | None = None


@dataclass(frozen=True, slots=True)
class WatchedIsland:
    """One island of a federation.

    round: the one that it is to decide next.  anchors: rounds that its anchors are after.  behind: how many fewer than
    the federation has decided.  contributed: it offers a contribution to the round that is to be decided.  samples:
    granted to it, and not read when it last contributed.  tokens: of its last contribution.  All are None where they
    are not known.
    """

    island: str
    address: str
    state: IslandState
    problem: str | None = None
    round: int | None = None
    anchors: int | None = None
    behind: int | None = None
    contributed: bool | None = None
    samples: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DecidedRound:
    """A record. fragment: None if it averages nothing.  counted: tokens by island.

    restored: None, or the round before which the anchors were from which all islands continue.
    """

    round: int
    fragment: int | None
    counted: Mapping[str, int]
    tokens: int
    members: tuple[str, ...]
    restored: int | None


@dataclass(frozen=True, slots=True)
class FederationState:
    """State of a federation. round: the one that is to be decided, None if no island answers.

    fragment: whose anchors it sets.  fragments: of the model, None before the first record.  averaged: rounds so far
    that averaged.  quorum: contributions that the round needs.  members, contributed: islands.  records: the last ones.
    """

    quorum: int
    islands: tuple[WatchedIsland, ...]
    round: int | None = None
    fragment: int | None = None
    fragments: int | None = None
    averaged: int | None = None
    members: tuple[str, ...] = ()
    contributed: tuple[str, ...] = ()
    records: tuple[DecidedRound, ...] = ()

    @property
    def answering(self) -> int:
        """Islands that show a notice of this federation."""
        return sum(each.round is not None for each in self.islands)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object of `atoll watch`."""
        return asdict(self)


def federation_state(
    readings: Sequence[IslandReading], *, founders: Sequence[str], quorum: int, silent: float
) -> FederationState:
    """Return the state of a federation. founders, quorum, silent: of its config.

    What most islands train is taken for the federation's; the rest are refused. Of these the island that knows most
    rounds says which one is to be decided.
    """
    runs = Counter(each.notice.run for each in readings if each.notice is not None)
    run = runs.most_common(1)[0][0] if runs else None
    ours = [each.notice for each in readings if each.notice is not None and each.notice.run == run]
    if not ours:
        return FederationState(quorum, tuple(_unread(each) for each in readings))
    newest = max(ours, key=lambda notice: notice.round)
    last = newest.records[-1] if newest.records else None
    fragments = None if last is None else len(last.bases)
    # Before the first record every contribution is of the first fragment.
    rules = FederationRules(tuple(founders), fragments or 1)
    members = tuple(each.island for each in rules.members(newest))
    islands = tuple(_watched(each, newest, rules, silent=silent, run=run) for each in readings)
    return FederationState(
        quorum,
        islands,
        round=newest.round,
        fragment=rules.turn(newest) % rules.fragments,
        fragments=fragments,
        averaged=rules.turn(newest),
        members=members,
        contributed=tuple(each.island for each in islands if each.contributed),
        records=tuple(map(_decided, newest.records)),
    )


def _unread(reading: IslandReading) -> WatchedIsland:
    state = IslandState.REFUSED if reading.is_refused else IslandState.UNREACHABLE
    problem = reading.problem
    if problem is not None and not reading.is_refused and reading.unchanged is not None:
        problem = f"{problem}; it answered {format_seconds(reading.unchanged)} ago"
    return WatchedIsland(reading.island, reading.address, state, problem)


def _watched(
    reading: IslandReading,
    newest: Notice,
    rules: FederationRules,
    *,
    silent: float,
    run: str | None,
) -> WatchedIsland:
    notice = reading.notice
    if notice is None:
        return _unread(reading)
    problem = _difference(notice, newest, run)
    if problem is not None:
        return WatchedIsland(reading.island, reading.address, IslandState.REFUSED, problem)
    is_member = notice.is_one_of(rules.members(newest))
    # A round counts members, and what those have left behind that are none any more.
    counts = is_member or notice.wish is Wish.OUT
    state = IslandState.TRAINS if is_member else IslandState.JOINING
    if notice.wish is Wish.OUT:
        state = IslandState.LEAVING
    if reading.unchanged is not None and reading.unchanged >= silent:
        state = IslandState.SILENT
        problem = f"its notice has not changed for {format_seconds(reading.unchanged)}"
    elif state is IslandState.JOINING and reading.island in {each.island for each in rules.members(newest)}:
        problem = "it has lost its run folder; the member of its name was one with another"
    last = _last_contribution(notice, newest)
    return WatchedIsland(
        reading.island,
        reading.address,
        state,
        problem,
        round=notice.round,
        anchors=notice.anchors,
        behind=newest.round - notice.anchors,
        contributed=counts and any(rules.is_valid(each, newest) for each in notice.contributions),
        samples=_samples(rules.lots(newest), notice),
        tokens=None if last is None else last.tokens,
    )


def _difference(notice: Notice, newest: Notice, run: str | None) -> str | None:
    """Return why an island is not of the federation, None if it is."""
    if notice.run != run:
        return f"trains something else (run {notice.run}, most islands {run}): compare its config with the others'"
    names = {record.round: record.name for record in newest.records}
    others = [record.round for record in notice.records if names.get(record.round, record.name) != record.name]
    if others or (notice.round == newest.round and notice.chain != newest.chain):
        return (
            f"has another history than island {newest.island} before round {notice.round}: start one of them in an "
            "empty run folder"
        )
    return None


def _samples(lots: Lots, notice: Notice) -> int:
    held = lots.of(notice.island)
    used = max((each.used for each in notice.contributions), default=0)
    return held.end - min(max(held.counted, used), held.end)


def _last_contribution(notice: Notice, newest: Notice) -> Contribution | None:
    """Return what an island contributed last: offered now, or counted by one of the last records."""
    counted = [each for record in newest.records for each in record.contributions if each.island == notice.island]
    offered = sorted(notice.contributions, key=lambda each: each.used)
    return next(reversed([*counted, *offered]), None)


def _decided(record: RoundRecord) -> DecidedRound:
    counted = record.contributions
    return DecidedRound(
        record.round,
        counted[0].fragment if counted else None,
        {each.island: each.tokens for each in counted},
        record.tokens,
        members=tuple(each.island for each in record.members),
        restored=record.restored,
    )


# ---- text


def describe_federation(state: FederationState) -> Iterator[str]:
    """Yield the lines of `atoll watch`."""
    if state.round is None:
        yield f"no round is known: none of {len(state.islands)} islands shows a notice of this federation"
    else:
        of = "" if state.fragments is None else f" of {state.fragments}"
        yield f"round {state.round} is to be decided, of fragment {state.fragment}{of}; {state.averaged} have averaged"
        missing = [name for name in state.members if name not in state.contributed]
        yield f"members      {', '.join(state.members)}"
        waits = f"; not yet {', '.join(missing)}" if missing else ""
        yield f"contributed  {', '.join(state.contributed) or 'none'}{waits}; quorum {state.quorum}"
    yield ""
    heads = ("island", "state", "anchors after", "behind", "contributed", "samples left", "last tokens")
    rows = [heads, *map(_row, state.islands)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for each in state.islands:
        if each.problem is not None:
            yield f"{each.island} is {each.state}: {each.problem}"
    if state.records:
        yield "\ndecided last"
    for record in reversed(state.records):
        yield _record_line(record)


def _row(island: WatchedIsland) -> tuple[str, ...]:
    def shown(count: int | None, noun: str = "") -> str:
        return "-" if count is None else f"{count}{noun and f' {noun}'}{'s' if noun and count != 1 else ''}"

    return (
        island.island,
        str(island.state),
        "initial" if island.anchors == 0 else shown(None if island.anchors is None else island.anchors - 1),
        shown(island.behind, "round"),
        {None: "-", True: "yes", False: "no"}[island.contributed],
        shown(island.samples),
        "-" if island.tokens is None else format_count(island.tokens),
    )


def _record_line(record: DecidedRound) -> str:
    members = f"members {', '.join(record.members)}"
    if record.restored is not None:
        at = "the initial values" if record.restored == 0 else f"the anchors after round {record.restored - 1}"
        return f"round {record.round}  continues from {at}; {members}"
    if not record.counted:
        return f"round {record.round}  averages nothing; {members}"
    missing = [name for name in record.members if name not in record.counted]
    without = f", without {', '.join(missing)}" if missing else ""
    counted = f"counts {', '.join(record.counted)}{without}"
    return f"round {record.round}  fragment {record.fragment}, {counted}: {format_count(record.tokens)} tokens"
