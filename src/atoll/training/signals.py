"""SIGINT and SIGTERM ask a rank to stop; it does so between two steps, with all others."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopRequest:
    """The first of SIGINT and SIGTERM that this process got. Later ones change nothing: whoever sends them kills."""

    numbers = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def listen(self) -> StopRequest:
        """Note signals from now on instead of ending. Only a main thread may; elsewhere its owner decides."""
        if threading.current_thread() is threading.main_thread():
            for number in self.numbers:
                signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)


def exit_code(number: signal.Signals) -> int:
    """130 for SIGINT, 143 for SIGTERM, as shells have it."""
    return 128 + number
