"""An engine's part in a federation of islands."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.runtime.agreement import Agreement
from atoll.runtime.assemble.rank import Rank
from atoll.runtime.federation.exchange import IslandExchange
from atoll.runtime.federation.link import are_here, stopped_or_ready
from atoll.runtime.federation.rank import logger
from atoll.runtime.sharding.federated import FederatedSteps


class IslandMembership:
    """The island of an engine among the others: `engine.federation`.

    steps: its outer steps, with where it stands (`standing`, which has the samples that it reads), how far it has read
    (`used`) and what it did (`events`).
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
        """Wait until the island may train: it takes part, and has `enough` samples; then be at the step of the others.
        Every rank must call it.

        stops: whether this rank gives up; return False if any does. Before the first round an island waits for the
        other founders, `silent` seconds at most before it goes on alone.
        """
        if self.steps.is_open and self._has(enough):
            return True  # rounds are followed where they arrive
        self._settle()
        with self._agreement.guard("joining the other islands"):
            joined = self._join(enough, stops)
        self._go_on(self.steps.rounds_step)
        return joined

    def _join(self, enough: int, stops: Callable[[], bool]) -> bool:
        steps, begin = self.steps, time.monotonic()
        said = begin
        if not steps.is_open:
            steps.open()
        link = steps.link
        while True:
            steps.follow()
            if steps.standing.is_member and not self._has(enough):
                # All that it may read is read, and no round has counted it: more is granted once one has.
                steps.send_next(-1)
            standing = steps.standing
            is_ready = self._has(enough) and link.is_caught_up(standing.rounds, standing.members, begin)
            stopped, ready = link.met([stops(), is_ready], stopped_or_ready)
            if stopped or ready:
                return not stopped
            if link.first is not None and time.monotonic() - said >= steps.seat.away:
                said = time.monotonic()
                heard = ", ".join(link.first.heard()) or "nobody"
                logger.warning("island %s waits for a round: it hears %s", steps.seat.name, heard)
            link.glance(lambda rounds=standing.rounds: link.elements.answer.anchors > rounds)  # type: ignore[misc]

    def _has(self, enough: int) -> bool:
        standing = self.steps.standing
        return standing.is_member and standing.lots.end - self.steps.used >= enough

    def depart(self, seconds: float, *, hands_over: bool = False) -> None:
        """Leave the federation: the others go on. Every rank must call it.

        seconds: to be taken at most: for the rounds of what was sent, and for what others still have to read.
        hands_over: contribute what the parameters have learned since they last did, and do not wait for rounds.
        """
        self._settle()
        if not self.steps.is_open:
            return
        with self._agreement.guard("leaving the other islands"):
            end = time.monotonic() + seconds
            if hands_over:
                for _ in range(self.steps.rules.fragments):
                    self.steps.send_next(-1)
            else:
                self._finish(end)
            link, is_done = self.steps.link, IslandExchange.is_handed_over if hands_over else are_here
            if link.first is not None:
                link.first.leave()
            link.wait_for_first(lambda first: is_done(first) and first.is_free, end)
            self.steps.close()

    def _finish(self, end: float) -> None:
        """Wait for the rounds of what was sent, while any other island answers."""
        steps, link = self.steps, self.steps.link
        while steps.waits:
            steps.follow()
            gives_up = time.monotonic() >= end or (link.is_alone and len(steps.standing.members) > 1)
            if not steps.waits or link.met(gives_up, any):
                return
            link.glance()
