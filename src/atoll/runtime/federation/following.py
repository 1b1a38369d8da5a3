"""The threads of a rank's exchange, and the exchange of a rank that follows the one which decides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from atoll.plans.federation.orders import Orders, parse_orders
from atoll.runtime.federation.elements import Holdings
from atoll.runtime.federation.http import Peer, PeerError, Showcase
from atoll.runtime.federation.rank import ElementExchange
from atoll.runtime.federation.seat import POLL_SECONDS, IslandAddress


class Loops:
    """Threads that do something again and again until they are ended: when they are woken, and every `poll` seconds.

    error: the first that one of them raised.
    """

    def __init__(self, poll: float, told: threading.Condition) -> None:
        self.error: BaseException | None = None
        self._poll, self._told = poll, told
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []
        self._wakes: list[threading.Event] = []

    def begin(self, turn: Callable[[], bool | None]) -> Callable[[], None]:
        """Start a thread. Return what wakes it; a turn that returns True is followed by the next at once."""
        wake = threading.Event()
        self._wakes.append(wake)
        self._start(partial(self._repeat, turn, wake))
        return wake.set

    def once(self, act: Callable[[], None]) -> None:
        """Do something in a thread."""
        self._threads = [each for each in self._threads if each.is_alive()]
        self._start(act)

    def end(self) -> None:
        """End the threads, after what they are doing."""
        self._ends.set()
        for wake in self._wakes:
            wake.set()
        while any(each.is_alive() for each in self._threads):
            for thread in self._threads:
                thread.join()

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, or for so long; return whether it holds. Raises what a thread has raised."""
        with self._told:
            found = self._told.wait_for(lambda: until() or self.error is not None, seconds)
            if self.error is not None:
                raise self.error
            return found

    def _start(self, act: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guard, args=(act,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _repeat(self, turn: Callable[[], bool | None], wake: threading.Event) -> None:
        goes_on: bool | None = False
        while True:
            if not goes_on:
                wake.wait(self._poll)
            wake.clear()
            if self._ends.is_set():
                return
            goes_on = turn()

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            with self._told:
                self.error = self.error or error
                self._told.notify_all()


class FederatedRank:
    """Common part of the exchanges of a deciding and of a following rank: server, elements and threads.

    told: called when the elements have changed.  options: of `ElementExchange`.
    """

    def __init__(
        self,
        holdings: Holdings,
        showcase: Showcase,
        *,
        poll: float,
        told: Callable[[], None],
        **options: Any,
    ) -> None:
        self._showcase = showcase
        # Wakes the thread that takes turns, once it has begun.
        self._wake_turn: Callable[[], None] = lambda: None
        self._orders: Orders | None = None
        self.exchange = ElementExchange(
            holdings,
            showcase=showcase,
            orders=lambda: self._orders,
            run=lambda act: self._loops.once(act),
            told=told,
            **options,
        )
        self._loops = Loops(poll, self.exchange.lock)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that others have read here, and those of elements that were read from others."""
        return self._showcase.sent, self.exchange.received

    @property
    def error(self) -> BaseException | None:
        """The first error raised by a thread, or None."""
        return self._loops.error

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, or for so long; return whether it holds. Raises what a thread has raised."""
        return self._loops.wait(until, seconds)

    def close(self) -> None:
        """End the threads and stop showing."""
        self.exchange.end()
        self._loops.end()
        self._showcase.close()

    def _begin_turns(self) -> None:
        self._wake_turn = self._loops.begin(self.exchange.turn)

    def _set_orders(self, orders: Orders) -> None:
        self._orders = orders
        self._wake_turn()


class FollowingRank(FederatedRank):
    """The exchange of a rank that does not decide. first: the rank of its island that does.

    It shows what it has at any free port of `host`. options: of `ElementExchange`.
    """

    def __init__(
        self,
        holdings: Holdings,
        *,
        host: str,
        first: IslandAddress,
        secret: bytes,
        poll: float = POLL_SECONDS,
        **options: Any,
    ) -> None:
        self._first = Peer(secret, first.host, first.port)
        shown = Showcase(secret, host)
        super().__init__(holdings, shown, poll=poll, told=lambda: self._wake_turn(), secret=secret, **options)

    @property
    def address(self) -> IslandAddress:
        """Where the rank shows what it has."""
        return IslandAddress(self._showcase.host, self._showcase.port)

    def start(self) -> FollowingRank:
        """Start the threads."""
        self._begin_turns()
        self._loops.begin(self._read)
        return self

    def close(self) -> None:
        """End the threads and stop showing."""
        super().close()
        self._first.close()

    def _read(self) -> bool:
        """Read orders; the island's own failure handling ends a run whose first rank is gone."""
        try:
            found = self._first.news("/orders")
        except PeerError:
            return False
        if found is not None:
            self._set_orders(parse_orders(found))
        return True
