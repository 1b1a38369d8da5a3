"""The exchange of an island with the others: what the rank that decides does, beside what every rank does.

It shows at its address, which the others know, beside what every rank shows (`atoll.runtime.federation.rank`)

    /notice        what it knows, wants and votes for (`atoll.plans.federation.records.Notice`)
    /ranks         the addresses of all ranks of the island
    /orders        what the island's ranks do next (`atoll.plans.federation.orders.Orders`)

and reads the first two of the others, and the answers of its island's ranks. One thread decides, one fetches, one reads
each other island, and one each other rank. The training thread calls `contribute`, `wait` and `leave`; no island keeps
it waiting for longer than it asks to.

[Note: what is on the disk] The notice, whenever anything in it changes that others rely on, before they can read it.
Beats alone are not written; a restart continues with a number that no beat before it can have reached.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.base import digests
from atoll.plans.federation.orders import (
    ElementSource,
    Orders,
    RankAnswer,
    island_answer,
    parse_answer,
    parse_orders,
    parse_ranks,
)
from atoll.plans.federation.records import Contribution, Notice, RoundRecord, Wish, parse_notice
from atoll.plans.federation.rounds import FederationRules, advance, begin, hear, wanted
from atoll.runtime.federation.elements import Holdings
from atoll.runtime.federation.http import Peer, PeerError, Showcase
from atoll.runtime.federation.rank import ElementExchange, logger
from atoll.runtime.federation.seat import POLL_SECONDS, IslandAddress

RESTART_BEATS = 1 << 32
"""More beats than a process can publish."""
NOTICE = "notice.json"
"""File with the notice, in the island's folder."""


class Loops:
    """Threads that do something again and again until they are ended. error: the first that one of them raised."""

    def __init__(self, poll: float, told: threading.Condition) -> None:
        self.error: BaseException | None = None
        self._poll, self._told = poll, told
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, turn: Callable[[], None]) -> None:
        """Start a thread."""
        thread = threading.Thread(target=self._guard, args=(turn,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        """End the threads, after what they are doing."""
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, or for so long; return whether it holds. Raises what a thread has raised."""
        with self._told:
            found = self._told.wait_for(lambda: until() or self.error is not None, seconds)
            if self.error is not None:
                raise self.error
            return found

    def _guard(self, turn: Callable[[], None]) -> None:
        while not self._ends.wait(self._poll):
            try:
                turn()
            except Exception as error:
                with self._told:
                    self.error = self.error or error
                    self._told.notify_all()
                return


class FollowingRank:
    """The exchange of a rank that does not decide. first: the rank of its island that does.

    It shows what it has at any free port of `host`. holdings, at, pace: as of `ElementExchange`.
    """

    def __init__(
        self,
        holdings: Holdings,
        *,
        rank: int,
        fragments: int,
        host: str,
        first: IslandAddress,
        secret: bytes,
        at: RoundRecord | None = None,
        pace: float | None = None,
        poll: float = POLL_SECONDS,
    ) -> None:
        self._showcase = Showcase(secret, host)
        self._first = Peer(secret, first.host, first.port)
        self.exchange = ElementExchange(
            holdings,
            rank=rank,
            fragments=fragments,
            showcase=self._showcase,
            secret=secret,
            orders=self._orders,
            at=at,
            pace=pace,
        )
        self._loops = Loops(poll, self.exchange.lock)

    @property
    def address(self) -> IslandAddress:
        """Where the rank shows what it has."""
        return IslandAddress(self._showcase.host, self._showcase.port)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that others have read here, and those of elements that were read from others."""
        return self._showcase.sent, self.exchange.received

    @property
    def error(self) -> BaseException | None:
        """What the thread has raised."""
        return self._loops.error

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, or for so long; return whether it holds. Raises what the thread has raised."""
        return self._loops.wait(until, seconds)

    def start(self) -> FollowingRank:
        """Start the thread."""
        self._loops.begin(self.exchange.turn)
        return self

    def close(self) -> None:
        """End the thread and stop showing."""
        self._loops.end()
        self._showcase.close()
        self._first.close()

    def _orders(self) -> Orders | None:
        try:
            return parse_orders(self._first.document("/orders"))
        except PeerError:
            return None  # the island's own failure handling ends a run whose first rank is gone


class IslandExchange:
    """The exchange of one island, on the rank that decides.

    name, run: of the notice.  folder: for it.  own, others: where the islands are found.  listen: where this one
    listens, if not there.  stock: lots that the island wants to have.
    holdings, at, pace: as of `ElementExchange`.
    """

    def __init__(
        self,
        name: str,
        holdings: Holdings,
        rules: FederationRules,
        *,
        run: str,
        secret: bytes,
        own: IslandAddress,
        others: Mapping[str, IslandAddress],
        folder: Path,
        listen: IslandAddress | None = None,
        at: RoundRecord | None = None,
        stock: int = 0,
        pace: float | None = None,
        poll: float = POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules, self.stock = rules, stock
        self.refused: dict[str, str] = {}
        self._secret, self._folder, self._clock = secret, folder, clock
        self._ranks: tuple[IslandAddress, ...] = ()
        # What was read last: of each other island the notice and its ranks, of each other rank its answer.
        self._notices: dict[str, Notice] = {}
        self._places: dict[str, tuple[str, ...]] = {}
        self._answers: dict[int, RankAnswer] = {}
        # Islands that answered when they were read last.
        self.reached: set[str] = set()
        # When a contribution was first seen, by digest.
        self._seen: dict[str, float] = {}
        self._published: Notice | None = None
        notice = self._kept(name, run, at)
        self._view = begin(notice, rules, clock())
        at_home = listen or own
        self._showcase = Showcase(secret, at_home.host, at_home.port)
        self._own = own
        self._others = tuple(others)
        self._peers = {island: Peer(secret, each.host, each.port) for island, each in others.items()}
        self.exchange = ElementExchange(
            holdings,
            rank=0,
            fragments=rules.fragments,
            showcase=self._showcase,
            secret=secret,
            orders=self._orders,
            at=at,
            pace=pace,
        )
        self.lock = self.exchange.lock
        self._loops = Loops(poll, self.lock)
        self._publish(notice)
        self._showcase.documents |= {
            "/notice": lambda: self.notice.to_json(),
            "/ranks": lambda: [str(each) for each in (self.address, *self._ranks)],
            "/orders": lambda: self._orders().to_json(),
        }

    @property
    def address(self) -> IslandAddress:
        """Where the others find what the rank shows."""
        return IslandAddress(self._own.host, self._own.port or self._showcase.port)

    def start(self, ranks: Sequence[IslandAddress] = ()) -> IslandExchange:
        """Start the threads. ranks: addresses of the island's other ranks, in order."""
        self._ranks = tuple(ranks)
        for at, each in enumerate(self._ranks, start=1):
            self._loops.begin(self._follower(at, each))
        for island in self._others:
            self._loops.begin(self._reader(island))
        self._loops.begin(self._decide)
        self._loops.begin(self.exchange.turn)
        return self

    def close(self) -> None:
        """End the threads and stop showing."""
        self._loops.end()
        self._showcase.close()
        for peer in self._peers.values():
            peer.close()

    # ---- for the training thread

    @property
    def notice(self) -> Notice:
        """The island's notice."""
        return self._view.own

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that others have read here, and those of elements that were read from others."""
        return self._showcase.sent, self.exchange.received

    @property
    def error(self) -> BaseException | None:
        """What a thread has raised."""
        return self._loops.error

    @property
    def is_member(self) -> bool:
        """Return True if the island takes part in the round."""
        own = self.notice
        return own.is_one_of(self.rules.members(own))

    def contribute(self, fragment: int, manifest: bytes, *, base: int, tokens: int, used: int) -> Contribution:
        """Offer an outer gradient, which every rank of the island holds: see `ElementExchange.offer` and `hold`.

        base: the round that set the anchors from which it started.
        """
        with self.lock:
            own, digest = self.notice, hashlib.sha256(manifest).hexdigest()
            made = Contribution(
                island=own.island, fragment=fragment, base=base, tokens=tokens, used=used, digest=digest
            )
            others = tuple(each for each in own.contributions if each.fragment != fragment)
            self._publish(replace(own, contributions=(*others, made)))
            self._seen[digest] = self._clock()
            return made

    def behind(self, own: str, record: RoundRecord) -> float:
        """Return how many seconds after the last contribution that a round has counted that of this island came."""
        with self.lock:
            before = [self._seen[each.digest] for each in record.contributions if each.digest in self._seen]
            return self._seen[own] - max(before) if before and own in self._seen else 0.0

    def leave(self) -> None:
        """Say that the island leaves. Its contributions count as long as others hold them."""
        with self.lock:
            self._publish(replace(self.notice, wish=Wish.OUT))

    def heard(self) -> dict[str, Notice]:
        """Return the notices of the other islands that take part and are not silent."""
        view, now = self._view, self._clock()
        return {
            island: notice
            for island, notice in view.others.items()
            if notice.wish is Wish.IN and now - view.heard.get(island, float("-inf")) <= self.rules.silent
        }

    @property
    def is_free(self) -> bool:
        """Return True if no round needs this island: it is no member any more, or nobody is left who would decide."""
        return not self.is_member or not self.heard()

    @property
    def is_alone(self) -> bool:
        """Return True if no other island answers, and those that take part have been silent for long enough: a link
        that is cut for a moment is not the end."""
        return not self.reached and not self.heard()

    def is_handed_over(self) -> bool:
        """Return True if another island that stays holds all contributions of this one that may still count."""
        own = {each.digest for each in self.notice.contributions}
        return not own or any(own <= notice.holds for notice in self.heard().values())

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, or for so long; return whether it holds. Raises what a thread has raised."""
        return self._loops.wait(until, seconds)

    # ---- the thread that decides

    def _decide(self) -> None:
        with self.lock:
            for island, notice in [*self._notices.items()]:
                try:
                    self._view = hear(self._view, notice, self._clock())
                    self.refused.pop(island, None)
                except ValueError as error:
                    self._refuse(island, str(error))
            offered = {each.digest for notice in self._view.notices for each in notice.contributions}
            named = {each.digest for record in self.notice.records for each in record.contributions}
            known = {digest: at for digest, at in self._seen.items() if digest in offered | named}
            self._seen = {**dict.fromkeys(offered, self._clock()), **known}
            done = island_answer({0: self.exchange.answer, **self._answers}, 1 + len(self._ranks))
            own = replace(self.notice, at=done.at, holds=frozenset(done.held), stock=self.stock)
            self._view = advance(replace(self._view, own=own), self.rules, self._clock())
            self._publish(self.notice)
            self.lock.notify_all()

    def _orders(self) -> Orders:
        with self.lock:
            own, others = self.notice, self._view.others
            missing = wanted(replace(self._view, own=replace(own, holds=frozenset())), self.rules)
            # What ranks hold and the island does not, since not all of them have it yet, is needed as well.
            needed = {*own.holds, *(each.digest for each in (*missing, *own.contributions))}
            sources = tuple(
                ElementSource(island, self._places[island], tuple(sorted(notice.holds)), anchors=notice.anchors)
                for island, notice in others.items()
                if island in self._places
            )
            return Orders(own.round, tuple(missing), tuple(sorted(needed)), records=own.records, sources=sources)

    def _refuse(self, island: str, why: str) -> None:
        if self.refused.get(island) != why:
            self.refused[island] = why
            logger.warning("island %s is not heard: %s", island, why)

    def _publish(self, own: Notice) -> None:
        """Write the notice and show it: see [Note: what is on the disk]."""
        own = replace(own, beat=own.beat + 1)
        if self._published is None or replace(self._published, beat=own.beat, holds=own.holds) != own:
            _write(self._folder / NOTICE, digests.seal(own.to_json()))
        self._published = own
        self._view = replace(self._view, own=own)

    def _kept(self, name: str, run: str, at: RoundRecord | None) -> Notice:
        path = self._folder / NOTICE
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            return Notice(name, secrets.token_hex(8), run, at=at, stock=self.stock)
        kept = parse_notice(digests.read_sealed(path))
        if (kept.island, kept.run) != (name, run):
            raise ValueError(f"{path} is of island {kept.island!r} and run {kept.run}, not of {name!r} and {run}")
        # Elements were in the memory of a process that has ended, and so were contributions.
        return replace(kept, beat=kept.beat + RESTART_BEATS, at=at, holds=frozenset(), contributions=(), wish=Wish.IN)

    # ---- the threads that read

    def _reader(self, island: str) -> Callable[[], None]:
        """Read an island's notice; silence is what `silent` and `away` of the rules are about."""
        peer = self._peers[island]

        def read() -> None:
            try:
                notice = parse_notice(peer.document("/notice"))
                if notice.island != island:
                    raise ValueError(f"{peer} is island {notice.island!r}")
                if any(len(record.bases) != self.rules.fragments for record in notice.records):
                    raise ValueError(f"island {island!r} has another number of fragments than {self.rules.fragments}")
                self._places[island] = parse_ranks(peer.document("/ranks"))
                self._notices[island] = notice
                self.reached.add(island)
            except PeerError:
                self.reached.discard(island)
            except ValueError as error:
                self._refuse(island, str(error))

        return read

    def _follower(self, at: int, address: IslandAddress) -> Callable[[], None]:
        peer = Peer(self._secret, address.host, address.port)
        self._peers[f"rank {at}"] = peer  # closed with the others

        def read() -> None:
            try:
                self._answers[at] = parse_answer(peer.document("/answer"))
            except PeerError:
                self._answers.pop(at, None)

        return read


def _write(path: Path, content: bytes) -> None:
    """Replace a file, which is on the disk afterwards."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    # The new name, too: after a loss of power the old file would be a vote that was taken back.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
