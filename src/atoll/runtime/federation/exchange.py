"""The exchange of an island with the others: one thread decides, one fetches, one for each other island reads.

An island shows at its address

    /notice        what it knows, wants and votes for (`atoll.plans.federation.records.Notice`)
    /anchors       of each fragment: the round that set it, and the names of its elements
    /elements/X    elements with SHA-256 X: of its own contributions, of those that it holds, of its anchors

and reads the same of the others. The training thread calls `contribute`, `wait` and `leave`; no island keeps it waiting
for longer than it asks to.

[Note: who steps the anchors] The fetching thread alone, and `_at` says of which record they are: by the next record,
once all that it averages is here; or by taking over the anchors of another island, fragment by fragment, in which time
they are of none. The training thread reads them under `lock`.

[Note: what is on the disk] The notice, whenever anything in it changes that others rely on, before they can read it.
Beats alone are not written; a restart continues with a number that no beat before it can have reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.base import digests
from atoll.plans.federation.records import Contribution, Notice, RoundRecord, Wish, parse_notice
from atoll.plans.federation.rounds import FederationRules, advance, begin, hear, wanted
from atoll.runtime.federation.elements import (
    ElementName,
    Holdings,
    PartElements,
    Shelf,
    is_part_of,
    manifest_of,
    read_manifest,
)
from atoll.runtime.federation.http import Peer, PeerError, Showcase

logger = logging.getLogger("atoll.federation")

POLL_SECONDS = 0.2
"""Seconds between two reads of another island's notice."""
RESTART_BEATS = 1 << 32
"""More beats than a process can publish."""
NOTICE = "notice.json"
"""File with the notice, in the island's folder."""


@dataclass(frozen=True, slots=True)
class IslandAddress:
    """Where an island shows what it has."""

    host: str
    port: int


class IslandExchange:
    """The exchange of one island.

    name, run: of the notice.  folder: for it.  at: the record that `holdings` are of, None for the initial values.
    stock: lots that the island wants to have.  pace: bytes a second at which anchors are taken over, at most.
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
        at: RoundRecord | None = None,
        stock: int = 0,
        pace: float | None = None,
        poll: float = POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules, self.holdings, self.stock = rules, holdings, stock
        self.lock = threading.Condition()
        self.error: BaseException | None = None
        self.refused: dict[str, str] = {}
        self._secret, self._folder, self._poll, self._clock, self._pace = secret, folder, poll, clock, pace
        self._others = dict(others)
        self._readers = {island: Peer(secret, each.host, each.port) for island, each in others.items()}
        self._inbox: dict[str, Notice] = {}
        self._at = at
        self._published: Notice | None = None
        self._records: list[RoundRecord] = []
        self._ends = threading.Event()
        notice = self._kept(name, run, at)
        self._showcase = Showcase(secret, own.host, own.port)
        self._shelf = Shelf(self._showcase, holdings, fragments=rules.fragments, lock=self.lock)
        self._view = begin(notice, rules, clock())
        self._publish(notice)
        self._showcase.documents |= {"/notice": lambda: self.notice.to_json(), "/anchors": self._shelf.anchors}
        loops = [self._decide, self._fetch, *(self._reader(island) for island in others)]
        self._threads = [threading.Thread(target=self._guard, args=(loop,), daemon=True) for loop in loops]

    @property
    def address(self) -> IslandAddress:
        """Where the island shows what it has."""
        return IslandAddress(self._showcase.host, self._showcase.port)

    def start(self) -> IslandExchange:
        """Start the threads."""
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """End the threads and stop showing."""
        self._ends.set()
        self._showcase.close()
        for thread in self._threads:
            thread.join()
        for peer in self._readers.values():
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

    def contribute(self, fragment: int, elements: PartElements, *, tokens: int, used: int) -> Contribution:
        """Offer an outer gradient. Its elements must not change afterwards."""
        with self.lock:
            own = self.notice
            manifest = manifest_of(elements)
            digest = hashlib.sha256(manifest).hexdigest()
            base = self.rules.bases(own)[fragment]
            made = Contribution(
                island=own.island, fragment=fragment, base=base, tokens=tokens, used=used, digest=digest
            )
            others = tuple(each for each in own.contributions if each.fragment != fragment)
            self._shelf.hold(digest, manifest, elements)
            own = replace(own, contributions=(*others, made), holds=own.holds | {digest})
            self._publish(own)
            return made

    def leave(self) -> None:
        """Say that the island leaves. Its contributions count as long as others hold them."""
        with self.lock:
            self._publish(replace(self.notice, wish=Wish.OUT))

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, or for so long; return whether it holds. Raises what a thread has raised."""
        with self.lock:
            found = self.lock.wait_for(lambda: until() or self.error is not None, seconds)
            if self.error is not None:
                raise self.error
            return found

    def records(self) -> list[RoundRecord]:
        """Return the records since the last call whose anchors the island has."""
        with self.lock:
            found, self._records = self._records, []
            return found

    # ---- the thread that decides

    def _decide(self) -> None:
        with self.lock:
            for island, notice in [*self._inbox.items()]:
                try:
                    self._view = hear(self._view, notice, self._clock())
                    self.refused.pop(island, None)
                except ValueError as error:
                    self._refuse(island, str(error))
            before = self.notice
            own = replace(before, at=self._at, holds=frozenset(self._shelf.held), stock=self.stock)
            self._view = advance(replace(self._view, own=own), self.rules, self._clock())
            self._publish(self.notice)
            for digest in set(self._shelf.held) - self.notice.holds:
                self._shelf.drop(digest)
            self.lock.notify_all()

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
        # PartElements were in the memory of a process that has ended, and so were contributions.
        return replace(kept, beat=kept.beat + RESTART_BEATS, at=at, holds=frozenset(), contributions=(), wish=Wish.IN)

    # ---- the threads that read the others

    def _reader(self, island: str) -> Callable[[], None]:
        peer = self._readers[island]

        def read() -> None:
            try:
                notice = parse_notice(peer.document("/notice"))
                if notice.island != island:
                    raise ValueError(f"{peer} is island {notice.island!r}")
                self._inbox[island] = notice
            except PeerError:
                pass  # silence is what `silent` and `away` of the rules are about
            except ValueError as error:
                self._refuse(island, str(error))

        return read

    # ---- the thread that fetches

    def _fetch(self) -> None:
        with self.lock:
            missing = wanted(self._view, self.rules)
            sources = {each.digest: [*self._sources(each.digest)] for each in missing}
        for contribution in missing:
            self._fetch_one(contribution, sources[contribution.digest])
        self._step()
        self._heal()

    def _sources(self, digest: str) -> Iterator[str]:
        for island, notice in self._view.others.items():
            if digest in notice.holds and island in self._others:
                yield island

    def _fetch_one(self, contribution: Contribution, islands: Sequence[str]) -> None:
        own = self.holdings.parts(contribution.fragment)
        for island in islands:
            with contextlib.suppress(PeerError, ValueError), self._peer(island) as peer:
                manifest = peer.content(contribution.digest)
                names = read_manifest(manifest)
                found = {part: _fetched(peer, names[part]) for part in names if is_part_of(part, own)}
                with self.lock:
                    self._shelf.hold(contribution.digest, manifest, found)
                return

    def _step(self) -> None:
        with self.lock:
            for record in self.notice.records:
                if record.restored == self._rounds():
                    for fragment in range(self.rules.fragments):
                        self.holdings.take(fragment, record.round, {})
                elif record.round != self._rounds() or not self._has(record):
                    continue
                for fragment in {each.fragment for each in record.contributions}:
                    averaged = [(each, self._shelf.held[each.digest]) for each in record.contributions]
                    self.holdings.step(fragment, record.round, averaged)
                self._at = record
                self._records.append(record)
            self.lock.notify_all()

    def _rounds(self) -> int:
        """Rounds that the anchors are after."""
        return 0 if self._at is None else self._at.round + 1

    def _has(self, record: RoundRecord) -> bool:
        return record.restored is None and all(each.digest in self._shelf.held for each in record.contributions)

    def _heal(self) -> None:
        """Take over anchors that are of later rounds than the island's, if nothing here can step to them."""
        with self.lock:
            own, others = self.notice, list(self._view.others.values())
            following = [record for record in own.records if record.round >= self._rounds()]
            if len(following) == own.round - self._rounds() and all(map(self._has, following)):
                return
            bases, last = self.rules.bases(own), own.records[-1]
        for notice in others:
            if notice.anchors == own.round and notice.island in self._others:
                with contextlib.suppress(PeerError, ValueError), self._peer(notice.island, pace=self._pace) as peer:
                    shown = peer.document("/anchors")
                    for fragment, base in enumerate(bases):
                        if self.holdings.version(fragment) != base:
                            self._take(peer, shown[str(fragment)], fragment, version=base)
        with self.lock:
            if all(self.holdings.version(fragment) == base for fragment, base in enumerate(bases)):
                self._at = last
                self._records.append(last)
                self.lock.notify_all()

    def _take(self, peer: Peer, shown: Any, fragment: int, *, version: int) -> None:
        if shown["version"] != version:
            return  # that island has gone on; this one learns of it
        own = self.holdings.parts(fragment)
        names = read_manifest(shown["parts"].encode())
        found = {part: _fetched(peer, names[part]) for part in names if is_part_of(part, own)}
        with self.lock:
            self._at = None
            self.holdings.take(fragment, version, found)

    # ---- threads

    @contextlib.contextmanager
    def _peer(self, island: str, *, pace: float | None = None) -> Iterator[Peer]:
        address = self._others[island]
        peer = Peer(self._secret, address.host, address.port, pace=pace)
        try:
            yield peer
        finally:
            peer.close()

    def _guard(self, turn: Callable[[], None]) -> None:
        while not self._ends.wait(self._poll):
            try:
                turn()
            except Exception as error:
                with self.lock:
                    self.error = self.error or error
                    self.lock.notify_all()
                return


def _fetched(peer: Peer, name: ElementName) -> memoryview:
    into = bytearray(name.nbytes)
    if peer.elements(name.digest, into) < len(into):
        raise PeerError(f"{peer} has gone")
    return memoryview(into)


def _write(path: Path, content: bytes) -> None:
    """Replace a file, which is on the disk afterwards."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
