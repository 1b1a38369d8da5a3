"""Islands that exchange elements, are lost and come back, beside one process that takes the records."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.plans.federation.orders import ElementSource, Orders
from atoll.plans.federation.records import Contribution, Member, Notice, RoundRecord
from atoll.plans.federation.rules import FederationRules
from atoll.runtime.federation.elements import PartElements, TensorPart, manifest_of
from atoll.runtime.federation.exchange import IslandExchange
from atoll.runtime.federation.following import FollowingRank, Loops
from atoll.runtime.federation.http import Peer, Showcase
from atoll.runtime.federation.link import are_here
from atoll.runtime.federation.rank import ElementExchange
from atoll.runtime.federation.seat import IslandAddress
from atoll.testing.clock import Clock
from atoll.testing.progress import wait_until

SECRET = b"a secret of tests"
RATE = 0.7
SIZES = {0: {"embed": 12, "norm": 3}, 1: {"head": 20}}
"""Parameters of each fragment, with their elements."""
RULES = FederationRules(("a", "b", "c"), fragments=2, quorum=1, grace=2.0, silent=3.0, away=1e6, lost=5.0)


ROUNDS: dict[str, int] = {}
"""The round in which a contribution was made, by its digest: a later one counts it if members alone change before."""


class Anchors:
    """Anchors of one rank of several, in float64. Each has an equal share of every parameter, the last the rest."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.values = {name: np.zeros(size) for sizes in SIZES.values() for name, size in sizes.items()}
        self.versions = dict.fromkeys(SIZES, -1)

    def parts(self, fragment: int) -> Sequence[TensorPart]:
        return [
            TensorPart(name, size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks)
            for name, size in SIZES[fragment].items()
        ]

    state_parts = parts

    def contribution_bytes(self, part: TensorPart) -> int:
        return (part.stop - part.start) * 8

    state_bytes = contribution_bytes

    def check(self, fragment: int, elements: PartElements) -> None:
        """Tests cut parts of whole parameters."""

    def version(self, fragment: int) -> int:
        return self.versions[fragment]

    def step(self, fragment: int, version: int, averaged: Sequence[tuple[Contribution, PartElements]]) -> None:
        total = sum(each.tokens for each, _ in averaged)
        for own in self.parts(fragment):
            mean = np.zeros_like(self.values[own.name])
            for each, elements in averaged:
                for part, held in elements.items():
                    if part.name == own.name:
                        mean[part.start : part.stop] += each.tokens / total * np.frombuffer(held)
            self.values[own.name][own.start : own.stop] -= RATE * mean[own.start : own.stop]
        self.versions[fragment] = version

    def show(self, fragment: int) -> PartElements:
        parts = self.parts(fragment)
        return {part: memoryview(self.values[part.name][part.start : part.stop].tobytes()) for part in parts}

    def take(self, fragment: int, version: int, elements: PartElements) -> None:
        for own in self.parts(fragment) if elements else ():
            whole = np.zeros_like(self.values[own.name])
            for part, held in elements.items():
                if part.name == own.name:
                    whole[part.start : part.stop] = np.frombuffer(held)
            self.values[own.name][own.start : own.stop] = whole[own.start : own.stop]
        self.versions[fragment] = version


@dataclass
class Island:
    """An island of a test: what it trains is drawn from its name and the round. anchors: of each rank."""

    name: str
    exchange: IslandExchange
    followers: Sequence[FollowingRank]
    anchors: Sequence[Anchors]

    def train(self, *, cuts: int = 1) -> None:
        """Contribute to the round, if it may. cuts: parts into which a rank divides what it sends of a parameter."""
        exchange = self.exchange
        ranks = [exchange.exchange, *(each.exchange for each in self.followers)]
        with exchange.lock:
            own = exchange.notice
            fragment = RULES.turn(own) % RULES.fragments
            has = any(each.fragment == fragment for each in own.contributions)
            if not exchange.is_member or own.anchors != own.round or has:
                return
            flows = gradient(self.name, fragment, own.round)
            shares = [elements(flows, held.parts(fragment), cuts) for held in self.anchors]
            rows = [rank.offer(share) for rank, share in zip(ranks, shares, strict=True)]
            manifest = manifest_of([*chain(*rows)])
            for rank in ranks:
                rank.hold(manifest)
            base = self.anchors[0].version(fragment)
            made = exchange.contribute(fragment, manifest, base=base, tokens=tokens(self.name), used=1)
            ROUNDS[made.digest] = own.round

    def close(self) -> None:
        for each in (*self.followers, self.exchange):
            each.close()


def tokens(name: str) -> int:
    return 100 * (1 + "abc".index(name))


def gradient(name: str, fragment: int, round_number: int) -> Mapping[str, np.ndarray]:
    draw = np.random.default_rng([ord(name), fragment, round_number])
    return {each: draw.normal(size=size) for each, size in SIZES[fragment].items()}


def elements(flows: Mapping[str, np.ndarray], own: Sequence[TensorPart], cuts: int) -> PartElements:
    found = {}
    for part in own:
        edges = np.linspace(part.start, part.stop, cuts + 1).astype(int)
        for start, stop in pairwise(edges):
            if start < stop:
                found[TensorPart(part.name, int(start), int(stop))] = memoryview(flows[part.name][start:stop].tobytes())
    return found


def replayed(records: Mapping[int, RoundRecord], last: int) -> Mapping[str, np.ndarray]:
    """One process that takes the records: the same means, of the same gradients."""
    values = {name: np.zeros(size) for sizes in SIZES.values() for name, size in sizes.items()}
    for number in range(last + 1):
        record = records[number]
        total = record.tokens
        for each in record.contributions:
            for name, flow in gradient(each.island, each.fragment, ROUNDS[each.digest]).items():
                values[name] = values[name] - RATE * each.tokens / total * flow
    return values


class Islands:
    """Three islands at free ports of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports: dict[str, int] = {}
        self.islands: dict[str, Island] = {}
        self.records: dict[int, RoundRecord] = {}
        self.clock = Clock()
        # Bound and not listening: islands can listen there, and nobody else gets these ports meanwhile.
        self.held = [socket.socket() for _ in "abc"]
        for each in self.held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        self.ports = {name: each.getsockname()[1] for name, each in zip("abc", self.held, strict=True)}

    def start(self, name: str, *, ranks: int = 1) -> Island:
        anchors = [Anchors(rank, ranks) for rank in range(ranks)]
        addresses = {each: IslandAddress("127.0.0.1", port) for each, port in self.ports.items()}
        exchange = IslandExchange(
            name,
            anchors[0],
            RULES,
            run="ab",
            secret=SECRET,
            own=addresses.pop(name),
            others=addresses,
            folder=self.folder / name,
            stock=4,
            poll=0.05,
            clock=self.clock,
        )
        followers = [
            FollowingRank(
                held, rank=rank, fragments=2, host="127.0.0.1", first=exchange.address, secret=SECRET, poll=0.05
            ).start()
            for rank, held in enumerate(anchors)
            if rank
        ]
        exchange.start([each.address for each in followers])
        self.islands[name] = Island(name, exchange, followers, anchors)
        return self.islands[name]

    def stop(self, name: str) -> None:
        island = self.islands.pop(name)
        self.note(island)
        island.close()

    def note(self, island: Island) -> None:
        for record in island.exchange.exchange.records():
            assert self.records.setdefault(record.round, record) == record

    def train_until(self, rounds: int, *, seconds: float = 0.0) -> None:
        """Train until every island that is up has the anchors of so many rounds.

        seconds: that each turn takes; if none, everybody waits for the islands that were heard.
        """

        turns = count()

        def turn() -> bool:
            # Islands that wait for each other read each other all the time, which is progress to `wait_until`.
            assert next(turns) < 10_000, {name: each.exchange.notice for name, each in self.islands.items()}
            for at, island in enumerate(self.islands.values()):
                island.train(cuts=1 + at)
                island.exchange.wait(lambda: False, 0.005)
                self.note(island)
            self.clock.advance(seconds)
            return all(each.exchange.notice.anchors >= rounds for each in self.islands.values())

        wait_until(turn)

    def check(self) -> None:
        """Anchors are bitwise equal on islands that are of the same record, and those of one process."""
        of: dict[int, list[bytes]] = {}
        for island in self.islands.values():
            at, values = self.snapshot(island)
            of.setdefault(at, []).append(b"".join(value.tobytes() for value in values.values()))
            for name, value in replayed(self.records, at - 1).items():
                np.testing.assert_allclose(values[name], value, atol=1e-12)
        assert all(len(set(each)) == 1 for each in of.values())

    def snapshot(self, island: Island) -> tuple[int, Mapping[str, np.ndarray]]:
        """Rounds, and anchors after them, of a moment in which all ranks are equally far."""
        ranks = [island.exchange.exchange, *(each.exchange for each in island.followers)]
        found: list[tuple[int, Mapping[str, np.ndarray]]] = []

        def look() -> bool:
            with ExitStack() as locks:
                for rank in ranks:
                    locks.enter_context(rank.lock)
                if len({rank.answer.anchors for rank in ranks}) == 1:
                    values = {name: sum(each.values[name] for each in island.anchors) for name in replayed({}, -1)}
                    found.append((ranks[0].answer.anchors, values))
            self.note(island)
            return bool(found)

        wait_until(look)
        return found[0]


@pytest.fixture
def islands(tmp_path: Path) -> Iterator[Islands]:
    made = Islands(tmp_path)
    yield made
    for name in [*made.islands]:
        made.stop(name)
    for each in made.held:
        each.close()


def test_islands_average_by_tokens_and_hold_the_same_bits(islands: Islands) -> None:
    for ranks, name in enumerate("abc", start=1):
        islands.start(name, ranks=ranks)
    islands.train_until(5)
    islands.check()
    record = islands.records[4]
    assert [each.island for each in record.contributions] == ["a", "b", "c"]
    assert record.tokens == 600


def test_an_island_that_is_lost_is_not_missed_and_comes_back(islands: Islands) -> None:
    for name in "abc":
        islands.start(name)
    islands.train_until(3)
    islands.stop("a")  # the first member, which proposes
    islands.clock.advance(10.0)
    before = max(islands.records)
    islands.train_until(before + 4, seconds=0.02)  # both may try to decide, so one has to give way
    # The round that goes on may have begun while time passed; the next one waits for everybody who is heard.
    before = max(each.exchange.notice.round for each in islands.islands.values())
    islands.train_until(before + 3, seconds=0.001)  # who has to give way for seconds needs some
    assert [each.island for each in islands.records[before + 2].contributions] == ["b", "c"]
    # Its process has no anchors of its own: it takes those of the others over, and takes part again.
    back = islands.start("a", ranks=2)  # with another division of its anchors, too
    wait_until(lambda: back.exchange.notice.anchors == back.exchange.notice.round > before)
    islands.train_until(max(islands.records) + 4)
    islands.check()
    assert [each.island for each in islands.records[max(islands.records) - 1].contributions] == ["a", "b", "c"]


def test_an_island_of_another_run_is_not_heard(islands: Islands) -> None:
    for name in "ab":
        islands.start(name)
    addresses = {each: IslandAddress("127.0.0.1", port) for each, port in islands.ports.items()}
    stranger = IslandExchange(
        "c",
        Anchors(),
        RULES,
        run="cd",
        secret=SECRET,
        own=addresses.pop("c"),
        others=addresses,
        folder=islands.folder / "c",
        poll=0.05,
    ).start()
    a = islands.islands["a"].exchange
    wait_until(lambda: "c" in a.refused and {"a", "b"} <= stranger.refused.keys())
    assert "trains something else" in a.refused["c"]
    assert "trains something else" in stranger.refused["a"]
    stranger.close()


def test_a_notice_of_another_run_is_not_overwritten(islands: Islands) -> None:
    islands.start("a")
    islands.stop("a")
    with pytest.raises(ValueError, match=r"notice.json is of island 'a' and run ab, not of 'a' and cd"):
        IslandExchange(
            "a",
            Anchors(),
            RULES,
            run="cd",
            secret=SECRET,
            own=IslandAddress("127.0.0.1", 0),
            others={},
            folder=islands.folder / "a",
        )


def test_an_error_of_a_thread_is_raised_where_training_waits(islands: Islands) -> None:
    for name in "ab":
        islands.start(name)
    island = islands.start("c")

    def fail(*_: object) -> None:
        raise MemoryError("of a test")

    island.anchors[0].step = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="of a test"):
        islands.train_until(2)
    islands.islands.pop("c").close()
    # The others do not notice, but for what is missing.
    islands.clock.advance(10.0)
    islands.train_until(3, seconds=0.02)


def test_an_island_that_is_cut_off_for_a_moment_is_not_alone(islands: Islands) -> None:
    """At the end of a run an island that is alone gives up what it waits for."""
    a = islands.start("a").exchange
    islands.start("b")
    islands.start("c")
    islands.train_until(2)
    islands.stop("b")
    islands.stop("c")
    wait_until(lambda: not a.reached)
    # Nobody steps with what only an island has that is gone.
    wait_until(lambda: a._orders is not None and not a._orders.sources)
    assert not a.is_alone
    assert not a.is_free
    islands.clock.advance(RULES.silent + 1.0)
    assert a.is_alone
    assert a.is_free


@pytest.mark.slow
def test_a_returning_island_may_be_slower_than_rounds_are(islands: Islands) -> None:
    """It takes the anchors of one record over, while the others go on and another one reads theirs as well."""
    for name in "abc":
        islands.start(name)
    islands.train_until(3)
    islands.stop("a")
    islands.clock.advance(10.0)
    before = max(islands.records)
    islands.train_until(before + 6, seconds=0.02)
    back = islands.start("a")
    anchors, taken = back.anchors[0], list[tuple[int, int]]()
    goes_on, has_begun = threading.Event(), threading.Event()
    take, size_of = anchors.take, anchors.state_bytes

    def count(fragment: int, version: int, elements: PartElements) -> None:
        taken.append((fragment, version))
        take(fragment, version, elements)

    def wait(part: TensorPart) -> int:
        has_begun.set()
        assert goes_on.wait(600)
        return size_of(part)

    anchors.take, anchors.state_bytes = count, wait  # type: ignore[method-assign]
    wait_until(has_begun.is_set)
    others = {name: island for name, island in islands.islands.items() if name != "a"}
    begun = max(island.exchange.notice.anchors for island in others.values())
    islands.islands.pop("a")
    islands.train_until(begun + 2, seconds=0.02)
    for name in "bc":
        another = Peer(SECRET, "127.0.0.1", islands.ports[name])
        another.document("/anchors")
        another.close()
    islands.islands["a"] = back
    goes_on.set()
    wait_until(lambda: back.exchange.notice.anchors == back.exchange.notice.round > begun + 1)
    assert [fragment for fragment, _ in taken] == [0, 1], "what was read is of use"
    assert max(version for _, version in taken) < begun, "the anchors are those of the moment at which it began"
    islands.train_until(max(islands.records) + 4)
    islands.check()


class Stalled(dict[str, memoryview]):
    """Elements that nobody gets before `goes_on`."""

    def __init__(self, goes_on: threading.Event) -> None:
        super().__init__()
        self.goes_on = goes_on

    def get(self, digest: str, default: object = None) -> memoryview | None:  # type: ignore[override]
        assert self.goes_on.wait(600)
        return super().get(digest)


def test_an_island_that_stalls_delays_what_it_has_made_and_nothing_else() -> None:
    goes_on = threading.Event()
    makers = {name: Showcase(SECRET, "127.0.0.1") for name in "ab"}
    makers["a"].elements = Stalled(goes_on)
    made, sources = {}, []
    for name, shown in makers.items():
        maker = ElementExchange(Anchors(), rank=0, fragments=2, showcase=shown, secret=SECRET, orders=lambda: None)
        manifest = manifest_of(maker.offer(elements(gradient(name, 0, 0), Anchors().parts(0), 1)))
        digest = maker.hold(manifest)
        made[name] = Contribution(name, 0, -1, 1, 1, digest=digest)
        sources.append(ElementSource(name, (f"127.0.0.1:{shown.port}",), (digest,), anchors=0))
    a, b = made["a"], made["b"]
    orders = [Orders(0, (a, b), (a.digest, b.digest), records=(), sources=tuple(sources))]
    shown, threads = Showcase(SECRET, "127.0.0.1"), list[threading.Thread]()

    def run(act: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=act, daemon=True))
        threads[-1].start()

    reader = ElementExchange(
        Anchors(), rank=0, fragments=2, showcase=shown, secret=SECRET, orders=lambda: orders[0], patience=600, run=run
    )
    reader.turn()
    wait_until(lambda: reader.answer.held == (b.digest,))
    reader.turn()
    reader.turn()
    assert len(threads) == 2, "an island is asked for one thing at a time"
    # Nobody needs it any more, so it is not held when it comes after all; later it is asked for again.
    orders[0] = replace(orders[0], wanted=(), needed=(b.digest,))
    reader.turn()
    goes_on.set()
    for thread in threads:
        thread.join()
    reader.turn()
    assert reader.answer.held == (b.digest,)
    orders[0] = replace(orders[0], wanted=(a,), needed=(a.digest, b.digest))
    reader.turn()
    wait_until(lambda: set(reader.answer.held) == {a.digest, b.digest})
    for each in (shown, *makers.values()):
        each.close()


def test_what_its_maker_does_not_give_another_island_does() -> None:
    holder, shown = Showcase(SECRET, "127.0.0.1"), Showcase(SECRET, "127.0.0.1")
    gone = Showcase(SECRET, "127.0.0.1")
    gone.close()
    other = ElementExchange(Anchors(), rank=0, fragments=2, showcase=holder, secret=SECRET, orders=lambda: None)
    digest = other.hold(manifest_of(other.offer(elements(gradient("a", 0, 0), Anchors().parts(0), 1))))
    made = Contribution("a", 0, -1, 1, 1, digest=digest)
    sources = [
        ElementSource(name, (f"127.0.0.1:{each.port}",), (digest,), anchors=0)
        for name, each in (("a", gone), ("b", holder))
    ]
    orders = Orders(0, (made,), (digest,), records=(), sources=tuple(sources))
    reader = ElementExchange(
        Anchors(), rank=0, fragments=2, showcase=shown, secret=SECRET, orders=lambda: orders, patience=5
    )
    reader.turn()
    assert not reader.answer.held
    reader.turn()
    assert reader.answer.held == (digest,)
    for each in (shown, holder):
        each.close()


def test_orders_from_before_a_contribution_do_not_drop_it() -> None:
    """A rank that follows reads its orders a moment before its island contributes."""
    orders = [Orders(0, (), (), records=(), sources=())]
    shown = Showcase(SECRET, "127.0.0.1")
    rank = ElementExchange(Anchors(), rank=0, fragments=2, showcase=shown, secret=SECRET, orders=lambda: orders[0])
    share = elements(gradient("a", 0, 0), rank.holdings.parts(0), 1)
    digest = rank.hold(manifest_of(rank.offer(share)))
    rank.turn()
    assert rank.answer.held == (digest,)
    orders[0] = replace(orders[0], needed=(digest,))
    rank.turn()
    orders[0] = replace(orders[0], needed=())
    rank.turn()
    assert rank.answer.held == ()
    shown.close()


def test_threads_end_after_what_they_are_doing() -> None:
    """Anchors may be read once an exchange is closed: no thread writes them any more."""
    loops, done = Loops(0.0, threading.Condition()), list[int]()
    has_begun = threading.Event()

    def turn() -> None:
        has_begun.set()
        loops._ends.wait()
        done.append(sum(range(1_000_000)))

    loops.begin(turn)
    assert has_begun.wait(60)
    loops.end()
    assert len(done) == 1


def test_who_ends_stays_for_members_that_may_return() -> None:
    def own(*members: str) -> Notice:
        record = RoundRecord(3, "", (), members=tuple(Member(each, "1") for each in members), turn=4, bases=(3, 2))
        return Notice("a", "1", "ab", round=4, records=(record,), at=record)

    def exchange(members: str, heard: Mapping[str, int], left: str = "") -> Any:
        notices = {name: SimpleNamespace(anchors=anchors) for name, anchors in heard.items()}
        return SimpleNamespace(rules=RULES, notice=own(*members), heard=lambda: notices, left=lambda: set(left))

    assert are_here(exchange("abc", {"b": 4, "c": 5}))
    assert not are_here(exchange("abc", {"b": 4, "c": 3})), "it needs what this island has"
    assert not are_here(exchange("abc", {"b": 4})), "it may return"
    assert are_here(exchange("ab", {"b": 4})), "it is no member any more"
    assert are_here(exchange("abc", {"b": 4}, left="c"))
    assert are_here(exchange("c", {}, left="bc")), "all leave at the same time"
