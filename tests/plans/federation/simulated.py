"""Islands in one process that crash, are cut off, leave and return, in an order that a test gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from atoll.plans.federation.lots import LotRange
from atoll.plans.federation.records import Contribution, Notice, RoundRecord, Wish, parse_notice
from atoll.plans.federation.rounds import (
    KEPT_RECORDS,
    IslandView,
    advance,
    begin,
    hear,
    wanted,
)
from atoll.plans.federation.rules import FederationRules

LOT_TOKENS = 10
STOCK = 3


def lot_numbers(runs: Iterable[LotRange]) -> Iterator[int]:
    """Yield the number of each lot, in order."""
    for run in runs:
        yield from range(run.start, run.stop)


@dataclass
class Island:
    """name, life.  notice: on its disk, and what others read.  saved: the record and the anchors of its checkpoint.

    view, data, anchors: in its memory: what it knows, elements of contributions that it holds, and of each fragment
    what it was averaged from.
    """

    name: str
    life: int = 0
    notice: Notice | None = None
    saved: tuple[RoundRecord | None, tuple[str, ...]] = (None, ())
    view: IslandView | None = None
    data: set[str] = field(default_factory=set)
    anchors: list[str] = field(default_factory=list)
    read: int = 0
    records: list[RoundRecord] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        return self.view is not None

    @property
    def own(self) -> Notice:
        assert self.view is not None
        return self.view.own


class Federation:
    """Islands, links and the time. `do` is one event; `check` holds after each. stock: lots that each wants."""

    def __init__(self, names: str, rules: FederationRules, *, stock: int = STOCK) -> None:
        self.rules, self.stock = rules, stock
        self.now = 0.0
        self.islands = [Island(name) for name in names]
        self.cut: set[frozenset[str]] = set()
        # Islands whose links are too slow for elements.
        self.thin: set[str] = set()
        self.decided: dict[int, RoundRecord] = {}
        self.made = 0
        for island in self.islands:
            self.start(island)

    # ---- events

    def start(self, island: Island) -> None:
        """Start a process, with what its disk has."""
        rules = self.rules
        record, anchors = island.saved
        if island.notice is None:
            island.life += 1
            notice = Notice(island.name, f"{island.life:x}", "ab", stock=self.stock)
        else:
            # Elements were in memory; the votes are not changed.
            kept = parse_notice(json.loads(json.dumps(island.notice.to_json())))
            assert kept == island.notice
            notice = replace(kept, holds=frozenset(), contributions=(), wish=Wish.IN, at=record)
        island.anchors = list(anchors) or ["initial"] * rules.fragments
        island.data = set()
        island.view = begin(notice, rules, self.now)
        island.records = []
        island.read = self.counted(island)

    def counted(self, island: Island) -> int:
        return self.rules.lots(island.own).of(island.name).counted

    def stop(self, island: Island, *, wipes: bool = False) -> None:
        """Kill a process; its memory is lost, or its disk too."""
        island.view = None
        if wipes:
            island.notice, island.saved = None, (None, ())
            # What no other island knows is gone, as if it had never been decided.
            known = max(other.notice.round if other.notice else 0 for other in self.islands)
            self.decided = {at: record for at, record in self.decided.items() if at < known}

    def save(self, island: Island) -> None:
        """Save a checkpoint: of the anchors that the island has."""
        island.saved = island.own.at, tuple(island.anchors)

    def contribute(self, island: Island, *, reads: int = 1) -> None:
        """Have a contribution of the round's fragment ready, if the island may have one."""
        own = island.own
        is_member = own.is_one_of(self.rules.members(own))
        fragment = self.rules.turn(own) % self.rules.fragments
        if is_member and own.anchors == own.round and not any(each.fragment == fragment for each in own.contributions):
            self._offer(island, (fragment,), reads)

    def leave(self, island: Island) -> None:
        """Hand over what was learned for every fragment."""
        own = island.own
        if own.is_one_of(self.rules.members(own)) and own.anchors == own.round:
            missing = set(range(self.rules.fragments)) - {each.fragment for each in own.contributions}
            self._offer(island, sorted(missing), 0)
            self._publish(island, replace(island.own, wish=Wish.OUT))

    def _offer(self, island: Island, fragments: Iterable[int], reads: int) -> None:
        own = island.own
        lots = self.rules.lots(own).of(island.name)
        left = len(list(lot_numbers(lots.ranges))) - (island.read - lots.counted)
        island.read += min(reads, left)
        offered = list(own.contributions)
        for fragment in fragments:
            self.made += 1
            base = self.rules.bases(own)[fragment]
            digest = f"{self.made:x}"
            offered.append(Contribution(island.name, fragment, base, reads * LOT_TOKENS, island.read, digest=digest))
            island.data.add(digest)
        holds = own.holds | {each.digest for each in offered}
        self._publish(island, replace(own, contributions=tuple(offered), holds=holds))

    def run(self, island: Island, *, sees: int = -1) -> None:
        """What an island does again and again: read, fetch, decide, step anchors, publish. sees: bits of the islands
        whose notices it reads."""
        view = island.view
        assert view is not None
        for other in self.reachable(island):
            if other.notice is not None and sees >> self.islands.index(other) & 1:
                known = view.others.get(other.name)
                # One that hangs says nothing: what it has said before is no sign of life.
                if known is None or (known.life, known.beat) != (other.notice.life, other.notice.beat):
                    view = hear(view, other.notice, self.now)
        for each in wanted(view, self.rules):
            if any(each.digest in other.data for other in self.reachable(island) if self.is_wide(island, other)):
                island.data.add(each.digest)
                view = replace(view, own=replace(view.own, holds=view.own.holds | {each.digest}))
        before = view.own.round
        view = advance(view, self.rules, self.now)
        island.data &= view.own.holds
        island.view = view
        self._note(island, view.own.records, before)
        self._step(island)
        self._publish(island, island.own)

    def _note(self, island: Island, records: Iterable[RoundRecord], before: int) -> None:
        for record in records:
            known = self.decided.setdefault(record.round, record)
            assert known.name == record.name, f"round {record.round} is decided twice"
            if record.round >= before:
                island.records.append(record)
                # What is not counted by others is still in the parameters; the position is kept.
                if record.restored is not None or island.own.own not in record.members:
                    island.read = self.counted(island)

    def _step(self, island: Island) -> None:
        own = island.own
        for record in own.records:
            if record.round == own.anchors and record.restored is None and own.has(record):
                averaged = "+".join(each.digest for each in record.contributions)
                for fragment in {each.fragment for each in record.contributions}:
                    island.anchors[fragment] = f"{hash((island.anchors[fragment], averaged)):x}"
                own = replace(own, at=record)
        if own.anchors < own.round:
            for other in self.reachable(island):
                if self.is_wide(island, other) and own.anchors < other.own.anchors <= own.round:
                    own, island.anchors = replace(own, at=other.own.at), list(other.anchors)
        self._publish(island, own)

    def _publish(self, island: Island, own: Notice) -> None:
        own = replace(own, beat=own.beat + 1)
        assert island.view is not None
        island.view, island.notice = replace(island.view, own=own), own

    def is_wide(self, *islands: Island) -> bool:
        return not any(each.name in self.thin for each in islands)

    def reachable(self, island: Island) -> Iterator[Island]:
        for other in self.islands:
            if other is not island and other.is_up and frozenset((island.name, other.name)) not in self.cut:
                yield other

    # ---- what always holds

    def check(self) -> None:
        """No round is decided twice, nothing is counted twice, anchors of one record are equal, and so on."""
        counted = [each.digest for record in self.decided.values() for each in record.contributions]
        assert len(counted) == len(set(counted)), "a contribution is counted twice"
        at: dict[int, list[str]] = {}
        for island in self.islands:
            if island.is_up:
                assert at.setdefault(island.own.anchors, island.anchors) == island.anchors, "anchors differ"
                assert len(island.own.records) <= KEPT_RECORDS
        for record in self.decided.values():
            held = [number for each in record.lots.held for number in lot_numbers(each.ranges)]
            free = list(lot_numbers(record.lots.returned))
            assert len({*held, *free}) == len(held) + len(free), "a lot is granted twice"

    def settle(self, seconds: float, *, reads: int = 1, until: Callable[[], bool] = lambda: False) -> None:
        """Let every island that is up run, in turns, for so long or until something holds; all of them contribute."""
        end = self.now + seconds
        while self.now < end and not until():
            for island in self.islands:
                if island.is_up:
                    self.run(island)
                    self.contribute(island, reads=reads)
            self.check()
            self.now += 1.0
