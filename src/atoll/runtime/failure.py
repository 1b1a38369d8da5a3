"""How the first error of one rank becomes the error of all, and how nobody is left waiting.

The first rank to fail writes its error to the store that the ranks met at. Every rank has a watchdog that looks
there: it gives its own rank a moment to leave with that error by itself (a closed connection usually ends its
waiting), and ends the process if it is still waiting then. Gloo offers no way to interrupt a wait.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Protocol

from atoll.errors import AtollError, RankError

KEY = "atoll/failure"
"""Where the error is that ends the run. Refusals that all ranks agree on have keys of their own and end nothing."""

POLL_SECONDS = 0.25
GRACE_SECONDS = 3.0


class Store(Protocol):
    """The part of torch's stores that is used here."""

    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


def report(store: Store | None, error: BaseException, rank: int, *, key: str = KEY) -> None:
    """Write a rank's error to the store under `key` unless another one is there already."""
    if store is None or isinstance(error, RankError):
        return
    code = error.exit_code if isinstance(error, AtollError) else 1
    kind = "" if isinstance(error, AtollError) else f"{type(error).__name__}: "
    text = json.dumps({"rank": rank, "exit_code": code, "message": f"{kind}{error}"})
    try:
        store.compare_set(key, "", text)
    except RuntimeError as failure:  # the store's host is gone: everyone is leaving already
        sys.stderr.write(f"rank {rank}: could not report its error: {failure}\n")


def first(store: Store | None, *, wait: float = 0.0, key: str = KEY) -> RankError | None:
    """The first error any rank reported under `key`, looked for during `wait` seconds."""
    if store is None:
        return None
    end = time.monotonic() + wait
    while True:
        try:
            if store.check([key]):
                found = json.loads(store.get(key))
                return RankError(found["message"], rank=found["rank"], exit_code=found["exit_code"])
        except RuntimeError:  # the store's host is gone
            return None
        if time.monotonic() >= end:
            return None
        time.sleep(0.05)


class Watchdog:
    """Ends this process when another rank failed and this one hangs inside a guarded section.

    Outside guarded sections nobody waits for another rank, so nothing is ended there.
    """

    def __init__(self, store: Store | None, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._inside = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="atoll-watchdog", daemon=True)

    def start(self) -> Watchdog:
        """Begin to watch."""
        if self._store is not None:
            self._thread.start()
        return self

    def enter(self) -> None:
        """From here on this rank may wait for others. Sections may lie inside others."""
        self._inside += 1

    def leave(self) -> None:
        """A section is over; outside of all of them the rank waits for nobody."""
        self._inside -= 1

    def stop(self) -> None:
        """Stop watching: the process goes its own way. A thread inside torch must not meet the interpreter's end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            error = first(self._store)
            if error is None:
                continue
            end = time.monotonic() + GRACE_SECONDS
            while self._inside and error.rank != self._rank and not self._stop.wait(POLL_SECONDS):
                if time.monotonic() > end:
                    os._exit(error.exit_code)
