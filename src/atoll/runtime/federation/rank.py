"""What every rank of an island does: it fetches elements, steps its anchors, and shows both to the other islands.

A rank shows at its address

    /answer        what it has done (`atoll.plans.federation.orders.RankAnswer`), for the rank that decides
    /anchors       of each fragment: the round that set it, and the names of this rank's elements
    /elements/X,Y  elements with SHA-256 X and Y: of its own contributions, of those that it holds, of its anchors

Islands may divide their anchors in other ways: a rank reads the parts of a contribution that overlap its own, from
whichever rank of an island has them.

[Note: who steps the anchors] The thread that takes turns, and `at` says of which record they are: by the next record,
once all that it averages is here. If it can never be here, the anchors of another island are taken over in a job of
their own, fragment by fragment, in which time they are of none: those of one record, which the island goes on showing
while it steps on, and this one follows by the records since. The training thread reads them under `lock`.

[Note: who is read] Contributions are read in jobs, of each island one at a time and its own first. So an island that
is slow or cut off delays what it has made and nothing else, and what nobody counts any more is not read to its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

from atoll.plans.federation.orders import ElementSource, Orders, RankAnswer
from atoll.plans.federation.records import Contribution, RoundRecord, rounds_before
from atoll.runtime.federation.elements import (
    ElementName,
    Holdings,
    PartElements,
    Shelf,
    TensorPart,
    check_covered,
    check_sizes,
    is_part_of,
    names_of_elements,
    read_anchors,
    read_manifest,
)
from atoll.runtime.federation.http import READ_SECONDS, Peer, PeerError, Showcase, elements_in

MOST_AT_ONCE = 256
"""Elements that are asked for in one request, at most."""
BYTES_AT_ONCE = 16 << 20
"""Bytes after which the next elements are another request."""

_T = TypeVar("_T")

logger = logging.getLogger("atoll.federation")


def _at_once(act: Callable[[], None]) -> None:
    act()


class ElementExchange:
    """The exchange of one rank.

    orders: returns what is to be done next, None if nobody says.  at: the record that `holdings` are of, None for the
    initial values.  pace: bytes a second at which anchors are taken over, at most.  patience: seconds to wait for
    another island's next bytes.  run: does a job, at once or beside `turn`.  told: called when there is something new,
    for `turn` or for who reads `answer`.

    lock: of what others read here.
    """

    def __init__(
        self,
        holdings: Holdings,
        *,
        rank: int,
        fragments: int,
        showcase: Showcase,
        secret: bytes,
        orders: Callable[[], Orders | None],
        at: RoundRecord | None = None,
        pace: float | None = None,
        patience: float = READ_SECONDS,
        run: Callable[[Callable[[], None]], None] = _at_once,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        self.holdings, self.at, self.rank = holdings, at, rank
        self.lock = threading.Condition()
        self.shelf = Shelf(showcase, holdings, fragments=fragments, lock=self.lock, at=lambda: self.at)
        self._fragments, self._orders, self._secret, self._pace = fragments, orders, secret, pace
        self._showcase, self._patience, self._run, self._told = showcase, patience, run, told
        # True from the first fragment that is taken over to the last.
        self._is_mixed = False
        self._records: list[RoundRecord] = []
        self.received = 0  # bytes of elements
        self._refused: set[str] = set()
        self._reads, self._anchor_reads = ElementReads(), ElementReads()
        # What this rank gives to a contribution, until the contribution has a name.
        self._offered: PartElements = {}
        # Digests of what was held here and no orders have named yet: those at hand may be older.
        self._new: set[str] = set()
        # Digests that are needed; of each island the one that is being read there, and those that it failed to give.
        self._wanted: set[str] = set()
        self._busy: dict[str, str] = {}
        self._failed: set[tuple[str, str]] = set()
        self._is_healing, self._is_over = False, False
        self._said: RankAnswer | None = None
        # Made when it is asked for: naming anchors takes a digest of all of them, and hardly anyone reads them.
        showcase.documents["/anchors"] = self.shelf.anchors
        self._say()

    # ---- for the training thread

    def offer(self, elements: PartElements) -> list[list[object]]:
        """Return this rank's rows of a contribution's manifest. The elements must not change afterwards."""
        self._offered = elements
        return names_of_elements(elements, self.rank)

    def hold(self, manifest: bytes) -> str:
        """Show what was offered, as a part of the contribution with this manifest, and return its digest."""
        digest = hashlib.sha256(manifest).hexdigest()
        with self.lock:
            self.shelf.hold(digest, manifest, self._offered)
            self._new.add(digest)
            self._offered = {}
            self._say()
        return digest

    def records(self) -> list[RoundRecord]:
        """Return the records since the last call whose anchors the rank has."""
        with self.lock:
            found, self._records = self._records, []
            return found

    @property
    def answer(self) -> RankAnswer:
        """What the rank has done."""
        with self.lock:
            return RankAnswer(tuple(self.shelf.held), at=self.at)

    # ---- the thread that takes turns

    def turn(self) -> None:
        """Do once what the orders say."""
        orders = self._orders()
        if orders is None:
            return
        with self.lock:
            self._new -= set(orders.needed)
            self._wanted = {each.digest for each in orders.wanted}
            for digest in set(self.shelf.held) - set(orders.needed) - self._new:
                self.shelf.drop(digest)
        for contribution, source in self._begun(orders):
            self._run(partial(self._fetch, contribution, source))
        self._step(orders)
        if self._needs_anchors(orders):
            self._is_healing = True
            self._run(partial(self._heal, orders))
        self._say()

    def end(self) -> None:
        """Give up what is being read."""
        self._is_over = True

    def _say(self) -> None:
        """Show what the rank has done, if that is more than before."""
        with self.lock:
            before, self._said = self._said, self.answer
            if self._said == before:
                return
            self._showcase.show("/answer", self._said.to_json())
        self._told()

    def _begun(self, orders: Orders) -> list[tuple[Contribution, ElementSource]]:
        """Return what is read now, and of whom: see [Note: who is read]."""
        begun = []
        with self.lock:
            missing = [
                each
                for each in orders.wanted
                if each.digest not in self.shelf.held and each.digest not in self._refused
            ]
            # What all that have it have failed to give is asked for again; what is not wanted any more is forgotten.
            holders = [
                {(source.island, each.digest) for source in orders.sources if each.digest in source.holds}
                for each in missing
            ]
            self._failed &= {pair for pairs in holders if not pairs <= self._failed for pair in pairs}
            for is_own in (True, False):
                for source in orders.sources:
                    if source.island in self._busy:
                        continue
                    could = (each for each in missing if (each.island == source.island) == is_own)
                    chosen = next((each for each in could if self._is_to_give(each.digest, source)), None)
                    if chosen is not None:
                        self._busy[source.island] = chosen.digest
                        begun.append((chosen, source))
        return begun

    def _is_to_give(self, digest: str, source: ElementSource) -> bool:
        """Return True if an island has a contribution, has not failed to give it, and no island is asked for it."""
        has_failed, is_read = (source.island, digest) in self._failed, digest in self._busy.values()
        return digest in source.holds and not has_failed and not is_read

    def _fetch(self, contribution: Contribution, source: ElementSource) -> None:
        digest, wanted = contribution.digest, dict[TensorPart, ElementName]()
        own = self.holdings.parts(contribution.fragment)
        try:
            with self._peers(stops=lambda: self._is_over or digest not in self._wanted) as reach:
                manifest = _first(source.ranks, lambda rank: reach(rank).content(digest))
                names = read_manifest(manifest)
                check_covered(own, names)
                check_sizes(names, self.holdings.contribution_bytes)
                wanted = {part: name for part, name in names.items() if is_part_of(part, own)}
                found = dict[TensorPart, memoryview]()
                for rank in sorted({name.rank for name in wanted.values()}):
                    of_rank = {part: name for part, name in wanted.items() if name.rank == rank}
                    found |= self._reads.read(_beginning_with(source, rank), of_rank, reach)
                self.holdings.check(contribution.fragment, found)
            with self.lock:
                self.shelf.hold(digest, manifest, found)
                self._new.add(digest)
        except PeerError:
            with self.lock:
                self._failed.add((source.island, digest))
        except ValueError as error:
            self._refuse(contribution, str(error))
        finally:
            with self.lock:
                del self._busy[source.island]
                is_here = digest in self.shelf.held
                if is_here or digest not in self._wanted:
                    self._reads.forget(name.digest for name in wanted.values())
        if is_here:
            self._say()

    def _refuse(self, contribution: Contribution, why: str) -> None:
        self._refused.add(contribution.digest)
        logger.warning("a contribution of island %s is not read: %s", contribution.island, why)

    def _step(self, orders: Orders) -> None:
        with self.lock:
            for record in orders.records:
                if record.restored is not None and record.restored == self._rounds() and not self._is_mixed:
                    for fragment in range(self._fragments):
                        self.holdings.take(fragment, record.round, {})
                elif record.round != self._rounds() or self._is_mixed or not self._has(record):
                    continue
                for fragment in {each.fragment for each in record.contributions}:
                    averaged = [(each, self.shelf.held[each.digest]) for each in record.contributions]
                    self.holdings.step(fragment, record.round, averaged)
                self._arrive(record)

    def _arrive(self, record: RoundRecord) -> None:
        self.at, self._is_mixed = record, False
        self._records.append(record)
        self.lock.notify_all()

    def _rounds(self) -> int:
        """Rounds that the anchors are after."""
        return rounds_before(self.at)

    def _has(self, record: RoundRecord) -> bool:
        return record.restored is None and all(each.digest in self.shelf.held for each in record.contributions)

    def _needs_anchors(self, orders: Orders) -> bool:
        """Return True if nothing here can ever step to the last record, so that anchors have to be taken over."""
        with self.lock:
            last, rounds = orders.last, self._rounds()
            if self._is_healing or last is None or last.round < rounds:
                return False
            following = [record for record in orders.records if record.round >= rounds]
            there = set(self.shelf.held).union(*(source.holds for source in orders.sources))
            can_step = len(following) == orders.round - rounds and all(
                record.restored is None and there >= {each.digest for each in record.contributions}
                for record in following
            )
            return self._is_mixed or not can_step

    def _heal(self, orders: Orders) -> None:
        """Take over anchors of another island that are of a later record than the rank's; the latest that there are."""
        known = {record.name for record in orders.records}
        try:
            with self._peers(pace=self._pace, stops=lambda: self._is_over) as reach:
                for source in sorted(orders.sources, key=lambda source: -source.anchors):
                    try:
                        if self._take_all(source.ranks, known, reach):
                            break
                    except PeerError:
                        continue  # it has gone, or was so slow that it shows other anchors by now
                    except ValueError as error:
                        logger.warning("anchors of island %s are not read: %s", source.island, error)
        finally:
            self._is_healing = False
        self._say()

    def _take_all(self, ranks: Sequence[str], known: Collection[str], reach: Callable[[str], Peer]) -> bool:
        """Take over the anchors of an island, if they are of one record among those that are known and no fragment is
        of an earlier round than here. Return whether they are here."""
        begun = self._rounds()
        shown = {rank: read_anchors(reach(rank).document("/anchors"), self._fragments) for rank in ranks}
        at = next(iter(shown.values())).at if shown else None
        if at is None or at.name not in known or at.round < begun or any(each.at != at for each in shown.values()):
            return False  # its ranks are not equally far, or it is further than the orders are
        if any(self.holdings.version(fragment) > base for fragment, base in enumerate(at.bases)):
            return False
        for fragment, version in enumerate(at.bases):
            if self.holdings.version(fragment) == version:
                continue
            own, found = self.holdings.state_parts(fragment), dict[TensorPart, memoryview]()
            for rank, each in shown.items():
                shows, names = each.fragments[fragment]
                if shows != version:
                    raise ValueError(f"fragment {fragment} is of round {shows}, and their record says {version}")
                check_sizes(names, self.holdings.state_bytes)
                missing = {part: name for part, name in names.items() if is_part_of(part, own) and part not in found}
                found |= self._anchor_reads.read([rank], missing, reach)
            check_covered(own, found)
            with self.lock:
                if not self._is_mixed and self._rounds() != begun:
                    return False  # what was missing has come meanwhile
                self._is_mixed, self.at = True, None
                self.holdings.take(fragment, version, found)
            self._anchor_reads.forget()
        with self.lock:
            if not self._is_mixed and self._rounds() != begun:
                return False
            self._arrive(at)
        return True

    @contextlib.contextmanager
    def _peers(
        self, *, pace: float | None = None, stops: Callable[[], bool] = lambda: False
    ) -> Iterator[Callable[[str], Peer]]:
        """Connections for one job, by address."""
        known: dict[str, Peer] = {}

        def reach(address: str) -> Peer:
            if address not in known:
                host, _, port = address.rpartition(":")
                known[address] = Peer(self._secret, host, int(port), seconds=self._patience, pace=pace, stops=stops)
            return known[address]

        try:
            yield reach
        finally:
            with self.lock:
                self.received += sum(peer.received for peer in known.values())
            for peer in known.values():
                peer.close()


def _beginning_with(source: ElementSource, rank: int) -> list[str]:
    """Addresses of an island's ranks, that of one rank first: where the island made the contribution, it has it."""
    return [*source.ranks[rank : rank + 1], *source.ranks[:rank], *source.ranks[rank + 1 :]]


class ElementReads:
    """Elements that were read and are not needed yet by all, so that a read that fails goes on where it was: from
    another rank, or in a later job. Two jobs do not read the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: dict[str, memoryview] = {}
        # Of what was asked for together, what came of it before a peer has gone.
        self._begun: dict[tuple[str, ...], tuple[bytearray, int]] = {}

    def read(
        self, addresses: Sequence[str], names: Mapping[TensorPart, ElementName], reach: Callable[[str], Peer]
    ) -> dict[TensorPart, memoryview]:
        """Return elements from any of the addresses. Raises PeerError if none has all of them."""
        missing = {name.digest: name.nbytes for name in names.values() if name.digest not in self._done}
        for sizes in _together(missing):
            self._read(addresses, sizes, reach)
        return {part: self._done[name.digest] for part, name in names.items()}

    def forget(self, digests: Iterable[str] | None = None) -> None:
        """Drop some elements, or all."""
        with self._lock:
            gone = {*self._done, *chain(*self._begun)} if digests is None else set(digests)
            for digest in gone:
                self._done.pop(digest, None)
            self._begun = {key: begun for key, begun in self._begun.items() if gone.isdisjoint(key)}

    def _read(self, addresses: Sequence[str], sizes: Mapping[str, int], reach: Callable[[str], Peer]) -> None:
        key, error = tuple(sizes), PeerError("an island without ranks")
        with self._lock:
            begun = self._begun.pop(key) if key in self._begun else (bytearray(sum(sizes.values())), 0)
        into, begin = begun
        for address in addresses:
            try:
                begin = reach(address).elements(sizes, into, begin=begin)
            except PeerError as found:
                error = found
                continue
            if begin == len(into):
                with self._lock:
                    self._done |= elements_in(sizes, into)
                return
            error = PeerError(f"{address} has gone")
        with self._lock:
            self._begun[key] = into, begin
        raise error


def _together(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield the elements that are asked for in one request."""
    some: dict[str, int] = {}
    for digest, size in sizes.items():
        if some and (len(some) == MOST_AT_ONCE or sum(some.values()) + size > BYTES_AT_ONCE):
            yield some
            some = {}
        some[digest] = size
    if some:
        yield some


def _first(addresses: Sequence[str], read: Callable[[str], _T]) -> _T:
    """Return what the first address answers. Raises the last PeerError if none does."""
    error = PeerError("an island without ranks")
    for address in addresses:
        try:
            return read(address)
        except PeerError as found:
            error = found
    raise error
