"""What every rank of an island does: it fetches elements, steps its anchors, and shows both to the other islands.

A rank shows at its address

    /answer        what it has done (`atoll.plans.federation.orders.RankAnswer`), for the rank that decides
    /anchors       of each fragment: the round that set it, and the names of this rank's elements
    /elements/X,Y  elements with SHA-256 X and Y: of its own contributions, of those that it holds, of its anchors

Islands may divide their anchors in other ways: a rank reads the parts of a contribution that overlap its own, from
whichever rank of an island has them.

[Note: who steps the anchors] The fetching thread alone, and `at` says of which record they are: by the next record,
once all that it averages is here; or by taking over the anchors of another island, fragment by fragment, in which time
they are of none. The training thread reads them under `lock`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from atoll.runtime.federation.http import Peer, PeerError, Showcase, elements_in

MOST_AT_ONCE = 256
"""Elements that are asked for in one request, at most."""
BYTES_AT_ONCE = 16 << 20
"""Bytes after which the next elements are another request."""

_T = TypeVar("_T")

logger = logging.getLogger("atoll.federation")


class ElementExchange:
    """The exchange of one rank.

    orders: returns what is to be done next, None if nobody says.  at: the record that `holdings` are of, None for the
    initial values.  pace: bytes a second at which anchors are taken over, at most.  lock: of what others read here.
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
    ) -> None:
        self.holdings, self.at, self.rank = holdings, at, rank
        self.lock = threading.Condition()
        self.shelf = Shelf(showcase, holdings, fragments=fragments, lock=self.lock)
        self._fragments, self._orders, self._secret, self._pace = fragments, orders, secret, pace
        # True from the first fragment that is taken over to the last.
        self._is_mixed = False
        self._records: list[RoundRecord] = []
        self.received = 0  # bytes of elements
        self._refused: set[str] = set()
        self._reads = ElementReads()
        # What this rank gives to a contribution, until the contribution has a name.
        self._offered: PartElements = {}
        # Digests of what was held here and no orders have named yet: those at hand may be older.
        self._new: set[str] = set()
        showcase.documents |= {"/answer": lambda: self.answer.to_json(), "/anchors": self.shelf.anchors}

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

    # ---- the thread that fetches

    def turn(self) -> None:
        """Do once what the orders say."""
        orders = self._orders()
        if orders is None:
            return
        with self.lock:
            self._new -= set(orders.needed)
            for digest in set(self.shelf.held) - set(orders.needed) - self._new:
                self.shelf.drop(digest)
        with self._peers() as reach:
            for contribution in orders.wanted:
                if contribution.digest not in self.shelf.held:
                    self._fetch(contribution, orders.sources, reach)
        self._step(orders)
        self._heal(orders)

    def _fetch(
        self, contribution: Contribution, sources: Sequence[ElementSource], reach: Callable[[str], Peer]
    ) -> None:
        own = self.holdings.parts(contribution.fragment)
        for source in sources:
            if contribution.digest not in source.holds:
                continue
            try:
                manifest = _first(source.ranks, lambda rank: reach(rank).content(contribution.digest))
                names = read_manifest(manifest)
                check_covered(own, names)
                check_sizes(names, self.holdings.contribution_bytes)
                wanted = {part: name for part, name in names.items() if is_part_of(part, own)}
                found = dict[TensorPart, memoryview]()
                for rank in sorted({name.rank for name in wanted.values()}):
                    of_rank = {part: name for part, name in wanted.items() if name.rank == rank}
                    found |= self._reads.read(_beginning_with(source, rank), of_rank, reach)
                self.holdings.check(contribution.fragment, found)
            except PeerError:
                continue
            except ValueError as error:
                self._refuse(contribution, str(error))
                return
            with self.lock:
                self.shelf.hold(contribution.digest, manifest, found)
            self._reads.forget(name.digest for name in wanted.values())
            return

    def _refuse(self, contribution: Contribution, why: str) -> None:
        if contribution.digest not in self._refused:
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

    def _heal(self, orders: Orders) -> None:
        """Take over anchors that are of later rounds than the rank's, if nothing here can step to them."""
        last = orders.last
        if last is None or last.round < self._rounds():
            return
        following = [record for record in orders.records if record.round >= self._rounds()]
        can_step = len(following) == orders.round - self._rounds() and all(map(self._has, following))
        if can_step and not self._is_mixed:
            return
        with self._peers(pace=self._pace) as reach:
            for source in orders.sources:
                if source.anchors == orders.round:
                    try:
                        self._take_all(source.ranks, last.bases, reach)
                    except PeerError:
                        continue  # it has gone, or shows other anchors by now
                    except ValueError as error:
                        logger.warning("anchors of island %s are not read: %s", source.island, error)
        with self.lock:
            if all(self.holdings.version(fragment) == base for fragment, base in enumerate(last.bases)):
                self._arrive(last)

    def _take_all(self, ranks: Iterable[str], bases: Sequence[int], reach: Callable[[str], Peer]) -> None:
        shown = {rank: read_anchors(reach(rank).document("/anchors"), self._fragments) for rank in ranks}
        for fragment, version in enumerate(bases):
            if self.holdings.version(fragment) == version:
                continue
            if any(each[fragment][0] != version for each in shown.values()):
                return  # that island has gone on; this one learns of it
            own, found = self.holdings.state_parts(fragment), dict[TensorPart, memoryview]()
            for rank, each in shown.items():
                _, names = each[fragment]
                check_sizes(names, self.holdings.state_bytes)
                missing = {part: name for part, name in names.items() if is_part_of(part, own) and part not in found}
                found |= self._reads.read([rank], missing, reach)
            check_covered(own, found)
            with self.lock:
                self._is_mixed, self.at = True, None
                self.holdings.take(fragment, version, found)
            self._reads.forget()

    @contextlib.contextmanager
    def _peers(self, *, pace: float | None = None) -> Iterator[Callable[[str], Peer]]:
        """Connections for one turn, by address."""
        known: dict[str, Peer] = {}

        def reach(address: str) -> Peer:
            if address not in known:
                host, _, port = address.rpartition(":")
                known[address] = Peer(self._secret, host, int(port), pace=pace)
            return known[address]

        try:
            yield reach
        finally:
            for peer in known.values():
                self.received += peer.received
                peer.close()


def _beginning_with(source: ElementSource, rank: int) -> list[str]:
    """Addresses of an island's ranks, that of one rank first: where the island made the contribution, it has it."""
    return [*source.ranks[rank : rank + 1], *source.ranks[:rank], *source.ranks[rank + 1 :]]


class ElementReads:
    """Elements that were read and are not needed yet by all, so that a read that fails goes on where it was: from
    another rank, or in the next turn."""

    def __init__(self) -> None:
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
        for digest in tuple(self._done) if digests is None else digests:
            self._done.pop(digest, None)
        self._begun.clear()

    def _read(self, addresses: Sequence[str], sizes: Mapping[str, int], reach: Callable[[str], Peer]) -> None:
        key, error = tuple(sizes), PeerError("an island without ranks")
        into, begin = self._begun.pop(key, (bytearray(sum(sizes.values())), 0))
        for address in addresses:
            try:
                begin = reach(address).elements(sizes, into, begin=begin)
            except PeerError as found:
                error = found
                continue
            if begin == len(into):
                self._done |= elements_in(sizes, into)
                return
            error = PeerError(f"{address} has gone")
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
