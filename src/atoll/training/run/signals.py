"""SIGINT and SIGTERM ask a rank to stop. It stops between two steps, together with all others."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopRequest:
    """The first SIGINT or SIGTERM that this process received. Later ones have no effect: their sender kills the
    process."""

    numbers = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def listen(self) -> StopRequest:
        """Record signals from now on instead of ending. Only possible in a main thread; elsewhere its owner handles
        signals."""
        if threading.current_thread() is threading.main_thread():
            for number in self.numbers:
                signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)


def exit_code(number: signal.Signals) -> int:
    """Return 130 for SIGINT, 143 for SIGTERM, the codes of shells."""
    return 128 + number
