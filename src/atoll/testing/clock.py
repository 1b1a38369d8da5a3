"""A clock that stands still until a test advances it."""

from __future__ import annotations

import asyncio


class Clock:
    """Takes the place of `time.monotonic`, and of the ways to wait.

    `sleep` returns immediately and advances the clock. `pause` waits in a coroutine until the test has advanced it.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let some time pass."""
        self._now += seconds

    def sleep(self, seconds: float) -> None:
        """Take the place of `time.sleep`."""
        self.slept.append(seconds)
        self.advance(seconds)

    async def pause(self, seconds: float) -> None:
        """Take the place of `asyncio.sleep`."""
        until = self._now + seconds
        while self._now < until:
            await asyncio.sleep(0.001)
