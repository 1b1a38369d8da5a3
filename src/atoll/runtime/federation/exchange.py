"""The exchange of an island with the others: what the rank that decides does, beside what every rank does.

It shows at its address, which the others know, beside what every rank shows (`atoll.runtime.federation.rank`)

    /notice        what it knows, wants and votes for (`atoll.plans.federation.records.Notice`)
    /ranks         the addresses of all ranks of the island
    /orders        what the island's ranks do next (`atoll.plans.federation.orders.Orders`)

and reads the first two of the others, and the answers of its island's ranks. One thread decides, one steps the anchors,
one reads each other island, and one each other rank, all of them as soon as there is something new; elements are read
in jobs of their own. The training thread calls `contribute`, `wait` and `leave`; no island keeps it waiting for longer
than it asks to.

[Note: what is on the disk] The notice, whenever anything in it changes that others rely on, before they can read it.
What it holds is not written; a restart continues with a number that no beat before it can have reached.

[Note: signs of life] Readers are answered at least once in `HOLD_SECONDS`, by "not modified" if nothing is new. That is
refused once the deciding thread has hung for `silent` seconds, though the thread that answers goes on. A notice that
does not change is shown with another beat twice in `silent` seconds: a watcher takes one beat for an island that hangs.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.base import digests
from atoll.plans.federation.orders import (
    ElementSource,
    Orders,
    RankAnswer,
    island_answer,
    parse_answer,
    parse_ranks,
)
from atoll.plans.federation.records import Contribution, Notice, RoundRecord, Wish, parse_notice
from atoll.plans.federation.rounds import advance, begin, hear, wanted
from atoll.plans.federation.rules import FederationRules
from atoll.runtime.federation.elements import Holdings
from atoll.runtime.federation.following import FederatedRank
from atoll.runtime.federation.http import HOLD_SECONDS, READ_SECONDS, Peer, PeerError, Showcase
from atoll.runtime.federation.rank import logger
from atoll.runtime.federation.seat import POLL_SECONDS, IslandAddress

RESTART_BEATS = 1 << 32
"""More beats than a process can publish."""
NOTICE = "notice.json"
"""File with the notice, in the island's folder."""


class IslandExchange(FederatedRank):
    """The exchange of one island, on the rank that decides.

    name, run, initial: of the notice.  folder: for it.  own, others: where the islands are found.  listen: where this
    one listens, if not there.  stock: lots that the island wants to have.  options: of `ElementExchange`.
    """

    def __init__(
        self,
        name: str,
        holdings: Holdings,
        rules: FederationRules,
        *,
        run: str,
        initial: str = "",
        secret: bytes,
        own: IslandAddress,
        others: Mapping[str, IslandAddress],
        folder: Path,
        listen: IslandAddress | None = None,
        at: RoundRecord | None = None,
        stock: int = 0,
        poll: float = POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        self.rules, self.stock = rules, stock
        self.refused: dict[str, str] = {}
        self._secret, self._folder, self._clock = secret, folder, clock
        self._ranks: tuple[IslandAddress, ...] = ()
        # What was read since the last decision: the notice of each other island that has answered. What was read last:
        # of each its notice and its ranks, and of each other rank its answer.
        self._new: dict[str, Notice] = {}
        self._notices: dict[str, Notice] = {}
        self._places: dict[str, tuple[str, ...]] = {}
        self._answers: dict[int, RankAnswer] = {}
        # Islands that answered when they were read last.
        self.reached: set[str] = set()
        # When a contribution was first seen, by digest.
        self._seen: dict[str, float] = {}
        self._published: Notice | None = None
        self._beat = clock()
        notice = replace(self._kept(name, run, at), initial=initial)
        self._view = begin(notice, rules, clock())
        at_home = listen or own
        self._turned = clock()
        hold = min(HOLD_SECONDS, rules.silent / 4)
        shown = Showcase(secret, at_home.host, at_home.port, hold=hold, is_alive=self._is_alive)
        self._own = own
        self._others = tuple(others)
        # A read that has waited for so long is given up for another connection: the one at hand may wait for packets to
        # be sent again that were lost in a link that is up by now.
        limit = min(READ_SECONDS, HOLD_SECONDS + rules.silent / 2)
        self._peers = {island: Peer(secret, each.host, each.port, seconds=limit) for island, each in others.items()}
        self._wake: Callable[[], None] = lambda: None
        facts = {"rank": 0, "fragments": rules.fragments, "secret": secret, "at": at, **options}
        super().__init__(holdings, shown, poll=poll, told=self._tell, **facts)
        self.lock = self.exchange.lock
        self._publish(notice)

    @property
    def address(self) -> IslandAddress:
        """Where the others find what the rank shows."""
        return IslandAddress(self._own.host, self._own.port or self._showcase.port)

    def start(self, ranks: Sequence[IslandAddress] = ()) -> IslandExchange:
        """Start the threads. ranks: addresses of the island's other ranks, in order."""
        self._ranks = tuple(ranks)
        self._showcase.show("/ranks", [str(each) for each in (self.address, *self._ranks)])
        for at, each in enumerate(self._ranks, start=1):
            self._loops.begin(self._follower(at, each))
        for island in self._others:
            self._loops.begin(self._reader(island))
        self._wake = self._loops.begin(self._decide)
        self._begin_turns()
        return self

    def close(self) -> None:
        """End the threads and stop showing."""
        super().close()
        for peer in self._peers.values():
            peer.close()

    # ---- for the training thread

    @property
    def notice(self) -> Notice:
        """The island's notice."""
        return self._view.own

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
        self._wake()
        return made

    def behind(self) -> float:
        """Return the seconds since the first contribution of another island came that the open round may count, 0 if
        there is none."""
        with self.lock:
            offered = (each for notice in self._view.others.values() for each in notice.contributions)
            came = [self._seen[each.digest] for each in offered if self.rules.is_valid(each, self.notice)]
            return self._clock() - min(came) if came else 0.0

    def since(self, record: RoundRecord, own: str | None = None) -> float:
        """Return the seconds since the first contribution came that a round has counted; until one of this island came,
        of digest `own`, if that is given. 0 if one of them is not known."""
        with self.lock:
            came = [self._seen[each.digest] for each in record.contributions if each.digest in self._seen]
            until = self._clock() if own is None else self._seen.get(own)
            return until - min(came) if came and until is not None else 0.0

    def leave(self) -> None:
        """Say that the island leaves. Its contributions count as long as others hold them."""
        with self.lock:
            self._publish(replace(self.notice, wish=Wish.OUT))
        self._wake()

    def heard(self) -> dict[str, Notice]:
        """Return the notices of the other islands that take part and are not silent."""
        view, now = self._view, self._clock()
        return {
            island: notice
            for island, notice in view.others.items()
            if notice.wish is Wish.IN and now - view.heard.get(island, float("-inf")) <= self.rules.silent
        }

    def left(self) -> set[str]:
        """Return the other islands that have said that they leave."""
        return {island for island, notice in self._view.others.items() if notice.wish is Wish.OUT}

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

    # ---- the thread that decides

    def _decide(self) -> None:
        with self.lock:
            self._turned = self._clock()
            new, self._new = self._new, {}
            for island, notice in new.items():
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
            orders = self._made_orders()
            if orders != self._orders:
                self._showcase.show("/orders", orders.to_json())
                self._set_orders(orders)
            self.lock.notify_all()

    def _tell(self) -> None:
        """Have what ranks hold be taken into account, and the next elements be read."""
        self._wake()
        self._wake_turn()

    def _is_alive(self) -> bool:
        return self._clock() - self._turned <= self.rules.silent

    def _made_orders(self) -> Orders:
        own, others = self.notice, self._view.others
        missing = wanted(replace(self._view, own=replace(own, holds=frozenset())), self.rules)
        # What ranks hold and the island does not, since not all of them have it yet, is needed as well.
        needed = {*own.holds, *(each.digest for each in (*missing, *own.contributions))}
        sources = tuple(
            ElementSource(island, self._places[island], tuple(sorted(notice.holds)), anchors=notice.anchors)
            for island, notice in others.items()
            if island in self._places and island in self.reached
        )
        return Orders(own.round, tuple(missing), tuple(sorted(needed)), records=own.records, sources=sources)

    def _refuse(self, island: str, why: str) -> None:
        if self.refused.get(island) != why:
            self.refused[island] = why
            logger.warning("island %s is not heard: %s", island, why)

    def _publish(self, own: Notice) -> None:
        """Write the notice and show it, if it has changed or is old: see [Note: signs of life]."""
        before, now = self._published, self._clock()
        if own == before and now - self._beat < self.rules.silent / 2:
            return
        self._beat = now
        own = replace(own, beat=own.beat + 1)
        if before is None or replace(before, beat=own.beat, holds=own.holds) != own:
            _write(self._folder / NOTICE, digests.seal(own.to_json()))
        self._published = own
        self._view = replace(self._view, own=own)
        self._showcase.show("/notice", own.to_json())

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

    def _reader(self, island: str) -> Callable[[], bool]:
        """Read an island's notice; silence is what `silent` and `away` of the rules are about."""
        peer = self._peers[island]

        def read() -> bool:
            try:
                found = peer.news("/notice")
                if found is not None or island not in self._notices:
                    self._notices.pop(island, None)
                    notice = self._parsed(island, peer.document("/notice") if found is None else found)
                    self._places[island] = parse_ranks(peer.document("/ranks"))
                    self._notices[island] = notice
            except PeerError:
                self.reached.discard(island)
                return False
            except ValueError as error:
                self._refuse(island, str(error))
                return False
            with self.lock:
                self._new[island] = self._notices[island]
                self.reached.add(island)
            if found is not None:
                self._wake()
            return True

        return read

    def _parsed(self, island: str, content: object) -> Notice:
        notice = parse_notice(content)
        if notice.island != island:
            raise ValueError(f"{self._peers[island]} is island {notice.island!r}")
        if any(len(record.bases) != self.rules.fragments for record in notice.records):
            raise ValueError(f"island {island!r} has another number of fragments than {self.rules.fragments}")
        return notice

    def _follower(self, at: int, address: IslandAddress) -> Callable[[], bool]:
        peer = Peer(self._secret, address.host, address.port)
        self._peers[f"rank {at}"] = peer  # closed with the others

        def read() -> bool:
            try:
                found = peer.news("/answer")
            except PeerError:
                self._answers.pop(at, None)
                return False
            if found is None and at not in self._answers:
                found = peer.document("/answer")
            if found is not None:
                self._answers[at] = parse_answer(found)
                self._wake()
            return True

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
