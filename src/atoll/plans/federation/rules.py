"""Rules of a federation, which are equal on all of its islands."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.plans.federation.lots import NO_LOTS, Lots
from atoll.plans.federation.records import Contribution, Member, Notice


@dataclass(frozen=True, slots=True)
class FederationRules:
    """Rules of a federation, equal on all islands.

    founders: islands that decide the first round, by name.  fragments: of the model.  quorum: contributions that a
    round needs at least.  grace: seconds that it waits for others once it has them.  silent: seconds without a notice
    after which nobody waits for an island.  away: seconds after which it is no member any more.  lost: seconds without
    any island that has the current anchors, after which all continue from older ones.
    """

    founders: tuple[str, ...]
    fragments: int
    quorum: int = 1
    grace: float = 30.0
    silent: float = 15.0
    away: float = 120.0
    lost: float = 60.0

    def members(self, notice: Notice) -> tuple[Member, ...]:
        """Members that decide the round of a notice."""
        return notice.records[-1].members if notice.records else tuple(Member(each, "") for each in self.founders)

    def bases(self, notice: Notice) -> tuple[int, ...]:
        """Return, for each fragment, the last round before the notice's that set its anchors."""
        return notice.records[-1].bases if notice.records else (-1,) * self.fragments

    def lots(self, notice: Notice) -> Lots:
        """Lots in the round of a notice."""
        return notice.records[-1].lots if notice.records else NO_LOTS

    def turn(self, notice: Notice) -> int:
        """Rounds before that of a notice that averaged."""
        return notice.records[-1].turn if notice.records else 0

    def is_valid(self, contribution: Contribution, notice: Notice) -> bool:
        """Return True if the round of a notice may count a contribution."""
        return contribution.fragment == self.turn(notice) % self.fragments and self.is_open(contribution, notice)

    def is_open(self, contribution: Contribution, notice: Notice) -> bool:
        """Return True if the round of a notice, or a later one, may count a contribution."""
        fragment = contribution.fragment
        return fragment < self.fragments and contribution.base == self.bases(notice)[fragment]
