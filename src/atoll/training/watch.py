"""A federation as whoever has its secret can read it, for `atoll watch`. Reads only, and imports no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from atoll.base.documents import LARGEST_JSON, read_text
from atoll.base.errors import ConfigError
from atoll.plans.federation.records import Notice, parse_notice
from atoll.runtime.federation.http import Peer, PeerError, own_secret
from atoll.runtime.federation.seat import IslandAddress
from atoll.training.config import Config
from atoll.training.report.federation import FederationState, IslandReading, federation_state

NOTICE_SECONDS = 2.0
"""Limit of time for the answer of an island."""


class FederationReader:
    """Reads the notices of all islands of a federation, again and again.

    path: of the config, for messages.  seconds: limit of time for each island.

    Raises ConfigError for a config without [federation], and for a secret that cannot be read.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        seconds: float = NOTICE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        own = config.federation
        if own is None or config.parallel.outer is None:
            raise ConfigError(
                f"{path} has no [federation], whose islands `atoll watch` shows; to follow a run use "
                "`atoll report RUN --live`"
            )
        try:
            secret = own_secret(read_text(own.secret, limit=LARGEST_JSON))
        except (OSError, ValueError) as error:
            raise ConfigError(f"federation.secret = {own.secret!r}: {error}") from error
        self._founders = own.founders or tuple(own.islands)
        self._quorum, self._silent = config.parallel.outer.quorum, own.silent
        self._islands = [
            _Island(name, IslandAddress.parse(address), secret, seconds, clock=clock)
            for name, address in own.islands.items()
        ]
        self._seconds = seconds

    def state(self) -> FederationState:
        """Read all islands at once, and return the state of the federation."""
        end = time.monotonic() + self._seconds
        for island in self._islands:
            island.begin()
        readings = [island.reading(end) for island in self._islands]
        return federation_state(readings, founders=self._founders, quorum=self._quorum, silent=self._silent)


class _Island:
    """Reads one island, in a thread for each look. A look that is not over is not begun again."""

    def __init__(
        self, name: str, address: IslandAddress, secret: bytes, seconds: float, *, clock: Callable[[], float]
    ) -> None:
        self._seconds, self._clock = seconds, clock
        self._name, self._address = name, str(address)
        self._peer = Peer(secret, address.host, address.port, seconds=seconds)
        self._thread: threading.Thread | None = None
        self._found: IslandReading | None = None
        # The number of the last notice, since when it is shown, and when the island last answered.
        self._beat: tuple[str, int] | None = None
        self._since = self._heard = 0.0

    def begin(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._found = None
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()

    def reading(self, end: float) -> IslandReading:
        """Return what is read until `end`."""
        assert self._thread is not None, "a look has begun"
        self._thread.join(max(0.0, end - time.monotonic()))
        found = self._found
        if found is None:
            late = f"{self._address} does not answer: not within {self._seconds:g} s"
            found = IslandReading(self._name, self._address, problem=late)
        now = self._clock()
        if found.notice is None:
            return found if self._beat is None else replace(found, unchanged=now - self._heard)
        self._heard, beat = now, (found.notice.life, found.notice.beat)
        if beat != self._beat:
            self._beat, self._since = beat, now
        return replace(found, unchanged=now - self._since)

    def _look(self) -> None:
        empty = IslandReading(self._name, self._address)
        try:
            self._found = replace(empty, notice=self._notice())
        except PeerError as error:
            # Other errors of a peer name what it has instead.
            is_gone = any(words in str(error) for words in (" does not answer", " has gone "))
            self._found = replace(empty, problem=str(error), is_refused=not is_gone)
        except ValueError as error:
            problem = f"{self._address} has a notice that cannot be read: {error}"
            self._found = replace(empty, problem=problem, is_refused=True)
        finally:
            self._peer.close()

    def _notice(self) -> Notice:
        notice = parse_notice(self._peer.document("/notice"))
        if notice.island != self._name:
            raise ValueError(f"it is of island {notice.island!r}; federation.islands has another address for it")
        return notice
