"""The exchange of one rank, and what the ranks of its island tell each other about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from atoll.plans.federation.records import Member, RoundRecord
from atoll.plans.federation.rules import FederationRules
from atoll.runtime.checkpoint.meeting import Meeting
from atoll.runtime.federation.elements import Holdings
from atoll.runtime.federation.events import initial_digest
from atoll.runtime.federation.exchange import IslandExchange
from atoll.runtime.federation.following import FollowingRank
from atoll.runtime.federation.http import READ_SECONDS
from atoll.runtime.federation.rank import ElementExchange
from atoll.runtime.federation.seat import IslandAddress, IslandSeat
from atoll.runtime.rendezvous import own_address

GLANCE = 0.5
"""Seconds between two looks at the ranks of an island that waits, at most."""


class IslandLink:
    """The exchange of a rank, from its start to `close`. Every rank of the island makes one at the same time.

    run: what all islands have in common.  sums: of each fragment, the bits of this rank's initial anchors, as
    `HostAnchor.bits` counts them; none if they are not known any more.  rank: in the island.  holdings, at: as of
    `ElementExchange`.

    own: the member that the island is.  first: the exchange of the rank that decides, on that rank.
    """

    def __init__(
        self,
        seat: IslandSeat,
        rules: FederationRules,
        holdings: Holdings,
        *,
        run: str,
        sums: Sequence[int],
        rank: int,
        at: RoundRecord | None,
    ) -> None:
        self.first: IslandExchange | None = None
        self._seat, self._meeting = seat, Meeting()
        pace = None if seat.pace is None else seat.pace / self._meeting.size
        initial = self.met(list(sums), initial_digest)
        patience = min(READ_SECONDS, max(1.0, rules.silent))
        common: dict[str, Any] = {
            "secret": seat.secret,
            "at": at,
            "pace": pace,
            "poll": seat.poll,
            "patience": patience,
        }
        self._exchange: IslandExchange | FollowingRank
        if rank == 0:
            self.first = IslandExchange(
                seat.name,
                holdings,
                rules,
                run=run,
                initial=initial,
                own=seat.islands[seat.name],
                others=seat.others,
                folder=seat.folder,
                listen=seat.listen,
                stock=seat.stock,
                **common,
            )
            self._tell(self.first)
            self._exchange = self.first.start(self._gathered(None))
        else:
            first = self._tell(None)
            host = own_address(first.host)
            following = FollowingRank(holdings, rank=rank, fragments=rules.fragments, host=host, first=first, **common)
            self._gathered(following.address)
            self._exchange = following.start()

    @property
    def elements(self) -> ElementExchange:
        """The exchange of this rank's elements."""
        return self._exchange.exchange

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that others have read of this rank, and bytes of elements that it has read."""
        return self._exchange.traffic

    def close(self) -> None:
        """End the exchange."""
        self._exchange.close()

    # ---- among the ranks

    def met(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Return what rank 0 decides from the values of all ranks, on every rank."""
        ranks = self._meeting.size
        return self._meeting.round("agreeing on a round", lambda: value, lambda said: [decide(said)] * ranks)

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds on this rank, or for so long; return whether it holds. Raises what a thread of the
        exchange has raised."""
        return self._exchange.wait(until, seconds)

    def glance(self, until: Callable[[], bool] = lambda: False) -> None:
        """Wait as long as between two looks, or until something holds on this rank."""
        self.wait(until, min(GLANCE, self._seat.poll))

    def wait_for_first(self, until: Callable[[IslandExchange], bool], end: float) -> None:
        """Wait, with all ranks, until something holds on the one that decides, or until `end` of the clock."""
        while True:
            is_done = self.first is None or time.monotonic() >= end or until(self.first)
            if self.met(is_done, all):
                return
            self.glance()

    def is_caught_up(self, rounds: int, members: Collection[Member], begin: float) -> bool:
        """Return True if this rank knows no round after the first `rounds`, and has heard the members, or waited for
        them since `begin` for long enough."""
        first = self.first
        if first is None:
            return True
        with first.lock:
            heard = first.heard()
            if any(each.round > rounds for each in heard.values()) or first.notice.round > rounds:
                return False
            others = {each.island for each in members} - {self._seat.name}
            return others <= heard.keys() or time.monotonic() - begin >= self._seat.silent

    @property
    def is_alone(self) -> bool:
        """True on the rank that decides if no other island is there any more."""
        return self.first is not None and self.first.is_alone

    def _tell(self, first: IslandExchange | None) -> IslandAddress:
        """Return rank 0's address on every rank, which then know the member that the island is."""
        own = None if first is None else [first.address.host, first.address.port, first.notice.life]
        host, port, life = self.met(own, lambda said: said[0])
        self.own = Member(self._seat.name, life)
        return IslandAddress(host, port)

    def _gathered(self, own: IslandAddress | None) -> list[IslandAddress]:
        """Return the addresses of all other ranks."""
        said = self.met(None if own is None else [own.host, own.port], lambda said: said[1:])
        return [IslandAddress(*each) for each in said]


def are_here(exchange: IslandExchange) -> bool:
    """Return True if all other members have left, or are heard and have the anchors of this island, so that they need
    nothing of it: one that was lost may return, and find nobody else who has them."""
    heard, own = exchange.heard(), exchange.notice
    others = {each.island for each in exchange.rules.members(own)} - {own.island, *exchange.left()}
    return others <= heard.keys() and all(each.anchors >= own.anchors for each in heard.values())


def agreed_rounds(said: Sequence[Sequence[int]]) -> list[int]:
    """Return the rounds that all ranks know, and those before which some cannot follow any more."""
    return [min(rounds for rounds, _ in said), max(taken for _, taken in said)]


def stopped_or_ready(said: Sequence[Sequence[bool]]) -> list[bool]:
    """Return whether any rank stops, and whether all are ready."""
    return [any(stops for stops, _ in said), all(is_ready for _, is_ready in said)]
