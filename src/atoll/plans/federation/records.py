"""Messages between islands: contributions, records of rounds, and the notice that each island publishes.

All are values of JSON: nothing that another island sends is executed or unpickled. `parse_notice` checks every field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from atoll.base.digests import digest
from atoll.plans.federation.lots import NO_LOTS, LotRange, Lots, LotsHeld, count_lots

_T = TypeVar("_T")

MOST_MEMBERS = 1000
"""Most islands of a federation."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DIGEST = re.compile(r"[0-9a-f]{0,64}")
_LARGEST = 1 << 62


class Wish(StrEnum):
    """IN: takes part, or wants to.  OUT: leaves; its contributions still count."""

    IN = "in"
    OUT = "out"


class Member(NamedTuple):
    """An island that decides. life: of the folder that its votes are kept in; empty: any, before the first round."""

    island: str
    life: str


class Ballot(NamedTuple):
    """An attempt to decide a round, numbered from 1. Ballots of two islands differ."""

    attempt: int = 0
    island: str = ""


NO_BALLOT = Ballot()


@dataclass(frozen=True, slots=True)
class Contribution:
    """An island's outer gradient of a fragment: the anchors less its parameters.

    base: the round that last set the fragment's anchors, -1 for the initial values.  tokens: those that it learned
    from.  used: lots that the island has read since it became a member.  digest: of the elements.
    """

    island: str
    fragment: int
    base: int
    tokens: int
    used: int
    digest: str


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The decision of a round, equal on every island.

    round: from 0.  before: name of the record before, empty for the first.  contributions: those that are averaged, in
    the order of the members; none if the round changes the members alone.  members: islands that decide the next
    round, the one that has been a member for longest first.  turn: rounds so far that averaged, so the next one that
    does is of fragment `turn` modulo their number.  bases: of each fragment, the round that last set its anchors.
    lots: after the round.  restored: None, or the anchors from which all islands continue, if those of later rounds
    are lost: those before round `restored`.
    """

    round: int
    before: str
    contributions: tuple[Contribution, ...]
    members: tuple[Member, ...]
    turn: int
    bases: tuple[int, ...]
    lots: Lots = NO_LOTS
    restored: int | None = None

    @property
    def name(self) -> str:
        """Digest of the record, and so of all records before it."""
        return digest(json.dumps(asdict(self), sort_keys=True).encode())

    def to_json(self) -> dict[str, Any]:
        """Return the values of a JSON document, which `read_record` reads."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    @property
    def tokens(self) -> int:
        """Tokens that the round counts."""
        return sum(each.tokens for each in self.contributions)


def rounds_before(at: RoundRecord | None) -> int:
    """Return how many rounds anchors are after. at: the record that they are of, None for the initial values."""
    return 0 if at is None else at.round + 1


@dataclass(frozen=True, slots=True)
class Notice:
    """State of an island, which it writes to its disk and then publishes.

    life: differs if the island has lost what it kept.  run: digest of what all islands must have in common.  initial:
    digest of the anchors before the first round, empty if the island does not know them any more.  beat: number of the
    notice.  round: the one that is to be decided.  chain: name of the record before it.  records: the
    last ones.  at: the record that its anchors are of, None for the initial values.  contributions: its own, of each
    fragment one at most.  holds: digests of the contributions that it has the elements of.  stock: lots that it wants
    to have.

    promised, trying, proposal, accepted: of the round, see [Note: deciding a round] in rounds.py.
    """

    island: str
    life: str
    run: str
    beat: int = 0
    round: int = 0
    chain: str = ""
    records: tuple[RoundRecord, ...] = ()
    at: RoundRecord | None = None
    wish: Wish = Wish.IN
    contributions: tuple[Contribution, ...] = ()
    holds: frozenset[str] = frozenset()
    stock: int = 0
    initial: str = ""
    promised: Ballot = NO_BALLOT
    trying: Ballot = NO_BALLOT
    proposal: RoundRecord | None = None
    accepted: tuple[Ballot, RoundRecord] | None = None

    @property
    def anchors(self) -> int:
        """Rounds that the island's anchors are after."""
        return rounds_before(self.at)

    @property
    def own(self) -> Member:
        """The member that this island is, if it is one."""
        return Member(self.island, self.life)

    def is_one_of(self, members: Collection[Member]) -> bool:
        """Return True if this island is a member."""
        return self.own in members or Member(self.island, "") in members

    def has(self, record: RoundRecord) -> bool:
        """Return True if the island has all that a record averages."""
        return all(each.digest in self.holds for each in record.contributions)

    def after(self, record: RoundRecord, *, kept: int) -> Notice:
        """Return the notice once `record` is known, which is that of its round."""
        valid = tuple(each for each in self.contributions if record.bases[each.fragment] == each.base)
        return replace(
            self,
            round=record.round + 1,
            chain=record.name,
            records=(*self.records, record)[-kept:],
            at=record if self.anchors == record.restored else self.at,
            contributions=valid,
            promised=NO_BALLOT,
            trying=NO_BALLOT,
            proposal=None,
            accepted=None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the values of a JSON document, which `parse_notice` reads."""
        found: dict[str, Any] = json.loads(json.dumps({**asdict(self), "holds": sorted(self.holds)}))
        return found


def parse_notice(content: object) -> Notice:
    """Return the notice of a JSON document. Raises ValueError with the field that is not as `Notice` says."""
    fields = Fields(content, "notice", Notice.__slots__)
    notice = Notice(
        island=fields.read("island", read_name),
        life=fields.read("life", read_digest),
        run=fields.read("run", read_digest),
        beat=fields.read("beat", read_count),
        round=fields.read("round", read_count),
        chain=fields.read("chain", read_digest),
        records=fields.read("records", read_tuple(read_record)),
        at=fields.read("at", read_optional(read_record)),
        wish=fields.read("wish", Wish),
        contributions=fields.read("contributions", read_tuple(read_contribution)),
        holds=frozenset(fields.read("holds", read_tuple(read_digest))),
        stock=fields.read("stock", read_count),
        initial=fields.read("initial", read_digest),
        promised=fields.read("promised", _ballot),
        trying=fields.read("trying", _ballot),
        proposal=fields.read("proposal", read_optional(read_record)),
        accepted=fields.read("accepted", read_optional(_vote)),
    )
    numbers = [record.round for record in notice.records]
    if numbers != list(range(notice.round - len(numbers), notice.round)) or (notice.round and not numbers):
        raise ValueError(f"records of rounds {numbers} before round {notice.round}")
    if notice.anchors > notice.round:
        raise ValueError(f"anchors after round {notice.anchors - 1} in round {notice.round}")
    for record, following in pairwise(notice.records):
        if following.before != record.name:
            raise ValueError(f"the record of round {following.round} does not follow that of round {record.round}")
    if notice.chain != (notice.records[-1].name if notice.records else ""):
        raise ValueError(f"chain {notice.chain} is not the name of the record of round {notice.round - 1}")
    for what in (notice.proposal, notice.accepted[1] if notice.accepted else None):
        if what is not None and (what.round, what.before) != (notice.round, notice.chain):
            raise ValueError(f"a proposal of round {what.round} in round {notice.round}")
    if any(each.island != notice.island for each in notice.contributions):
        raise ValueError(f"contributions of another island than {notice.island}")
    return notice


class Fields:
    """Fields of a JSON object: all of them, and no others."""

    def __init__(self, content: object, what: str, names: Sequence[str]) -> None:
        if not isinstance(content, dict) or set(content) != set(names):
            raise ValueError(f"{what}: expected an object with {', '.join(names)}")
        self._content: Mapping[str, object] = content
        self._what = what

    def read(self, name: str, kind: Callable[[Any], _T]) -> _T:
        """Return the value of a field. Raises ValueError with its name."""
        try:
            return kind(self._content[name])
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self._what}.{name}: {error}") from None


def read_count(value: object) -> int:
    """Return a count. Raises ValueError for anything else, as all that read fields."""
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"expected a count, found {value!r:.40}")
    return value


def read_base(value: object) -> int:
    """Return a round, or -1."""
    return -1 if type(value) is int and value == -1 else read_count(value)


def _text(pattern: re.Pattern[str]) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"found {value!r:.80}")
        return value

    return read


read_name, read_digest = _text(_NAME), _text(_DIGEST)


def read_optional(kind: Callable[[Any], _T]) -> Callable[[object], _T | None]:
    """Return what reads None, or a value of a kind."""
    return lambda value: None if value is None else kind(value)


def read_tuple(kind: Callable[[Any], _T]) -> Callable[[object], tuple[_T, ...]]:
    """Return what reads a list of values of a kind."""

    def read(value: object) -> tuple[_T, ...]:
        if not isinstance(value, list):
            raise ValueError(f"expected a list, found {type(value).__name__}")
        return tuple(map(kind, value))

    return read


def _values(value: object, count: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"expected {count} values, found {value!r:.80}")
    return value


def _ballot(value: object) -> Ballot:
    count, island = _values(value, 2)
    return Ballot(read_count(count), read_name(island) if island else "")


def _member(value: object) -> Member:
    island, life = _values(value, 2)
    return Member(read_name(island), read_digest(life))


def _vote(value: object) -> tuple[Ballot, RoundRecord]:
    ballot, record = _values(value, 2)
    return _ballot(ballot), read_record(record)


def _range(value: object) -> LotRange:
    start, stop = map(read_count, _values(value, 2))
    if start >= stop:
        raise ValueError(f"lots {start} to {stop}")
    return LotRange(start, stop)


def _held(value: object) -> LotsHeld:
    island, counted, ranges = _values(value, 3)
    return LotsHeld(read_name(island), read_count(counted), read_tuple(_range)(ranges))


def _lots(value: object) -> Lots:
    fields = Fields(value, "lots", Lots.__slots__)
    lots = Lots(
        fresh=fields.read("fresh", read_count),
        returned=fields.read("returned", read_tuple(_range)),
        held=fields.read("held", read_tuple(_held)),
    )
    known = sorted([*lots.returned, *(each for one in lots.held for each in one.ranges)])
    if any(one.stop > two.start for one, two in pairwise(known)):
        raise ValueError("a lot is granted twice")
    if (known and known[-1].stop > lots.fresh) or count_lots(known) > lots.fresh:
        raise ValueError(f"lots from {lots.fresh} on are granted before they are counted")
    return lots


def read_contribution(value: object) -> Contribution:
    """Return a contribution."""
    fields = Fields(value, "contribution", Contribution.__slots__)
    return Contribution(
        island=fields.read("island", read_name),
        fragment=fields.read("fragment", read_count),
        base=fields.read("base", read_base),
        tokens=fields.read("tokens", read_count),
        used=fields.read("used", read_count),
        digest=fields.read("digest", read_digest),
    )


def read_record(value: object) -> RoundRecord:
    """Return the record of a round."""
    fields = Fields(value, "record", RoundRecord.__slots__)
    record = RoundRecord(
        round=fields.read("round", read_count),
        before=fields.read("before", read_digest),
        contributions=fields.read("contributions", read_tuple(read_contribution)),
        members=fields.read("members", read_tuple(_member)),
        turn=fields.read("turn", read_count),
        bases=fields.read("bases", read_tuple(read_base)),
        lots=fields.read("lots", _lots),
        restored=fields.read("restored", read_optional(read_count)),
    )
    if not 0 < len({each.island for each in record.members}) == len(record.members) <= MOST_MEMBERS:
        raise ValueError(f"record of round {record.round}: members {record.members!r:.80}")
    if any(each.fragment >= len(record.bases) for each in record.contributions):
        raise ValueError(f"record of round {record.round}: a fragment beyond {len(record.bases)}")
    return record
