"""An engine's part in a federation of islands."""

from __future__ import annotations

from collections.abc import Callable

from atoll.runtime.agreement import Agreement
from atoll.runtime.assemble.rank import Rank
from atoll.runtime.sharding.federated import FederatedSteps


class IslandMembership:
    """The island of an engine among the others: `engine.federation`.

    steps: its outer steps, with the samples that it reads (`lots`, `used`) and what it did (`events`).
    """

    @classmethod
    def of(cls, rank: Rank, *, settle: Callable[[], None], go_on: Callable[[int], None]) -> IslandMembership | None:
        """Return that of a rank, or None if it is of no federation. settle: called before the others wait.  go_on:
        called with the step that the others are at."""
        if not isinstance(rank.outer, FederatedSteps):
            return None
        return cls(rank.outer, rank.agreement, settle=settle, go_on=go_on)

    def __init__(
        self, steps: FederatedSteps, agreement: Agreement, *, settle: Callable[[], None], go_on: Callable[[int], None]
    ) -> None:
        self.steps = steps
        self._agreement, self._settle, self._go_on = agreement, settle, go_on

    def join(self, enough: int = 0, *, stops: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the island takes part and has `enough` samples, and be at the step of the others; see
        `FederatedSteps.join`. Every rank must call it."""
        self._settle()
        with self._agreement.guard("joining the other islands"):
            joined = self.steps.join(enough, stops=stops)
        self._go_on(self.steps.rounds_step)
        return joined

    def depart(self, seconds: float, *, hands_over: bool = False) -> None:
        """Leave the federation: after the rounds of what was sent, or handing over what was learned since; see
        `FederatedSteps.depart`. Every rank must call it."""
        self._settle()
        with self._agreement.guard("leaving the other islands"):
            if not hands_over:
                self.steps.finish(seconds)
            self.steps.depart(seconds, hands_over=hands_over)
