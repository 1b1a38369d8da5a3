"""How an island keeps time with the others.

Islands contribute to the same round only if they send at about the same time, and nobody tells them when. So each
measures itself by the island whose contribution to a round came first. When it sends, and after the round, it goes on
at the step at which it would be if it had sent at that moment, and leaves out the steps between: who was late, was
away, or has missed the round is in time for the next one. An island that is slower would be late by the same seconds
each time; it leaves out more and more steps of an interval until it is not.

Nobody waits and nobody takes more steps than its own settings say, so the islands that contribute first set the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tempo:
    """The tempo of an island.

    pace: seconds of a step, None before it is known.  left_out: steps that it leaves out between two contributions,
    since others take less time for as many.
    """

    pace: float | None = None
    left_out: int = 0

    def after(self, lag: float, steps: int, *, grace: float, is_counted: bool) -> Tempo:
        """Return the tempo after a round.

        lag: seconds by which the island's contribution came after the first one.  steps: between two of its
        contributions; one that was late for another reason must not be far ahead the next time, so an eighth of them is
        left out at once at most.  grace: seconds for which rounds wait.
        """
        # Between the two bounds nothing changes: a step more or less would be too much.
        if not is_counted or lag > grace * 2 / 3:
            return replace(self, left_out=min(self.left_out + max(1, steps // 8), steps - 1))
        return replace(self, left_out=max(0, self.left_out - (lag < grace / 3)))

    def steps_since(self, seconds: float) -> int:
        """Return how many steps the island is behind that of a round. seconds: since its first contribution came."""
        return self.left_out + int(seconds / self.pace) if self.pace else 0
