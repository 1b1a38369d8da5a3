"""Where an island stands among the others, by the last record that it follows."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from atoll.plans.federation.lots import LotsHeld
from atoll.plans.federation.records import Member, RoundRecord, rounds_before


@dataclass(frozen=True, slots=True)
class Standing:
    """An island and the record that it follows.

    own: the member that it is, or could be.  founders: members before the first round.  fragments: of the model.
    at: None before the first round.
    """

    own: Member
    founders: tuple[str, ...]
    fragments: int
    at: RoundRecord | None = None

    @property
    def rounds(self) -> int:
        """Rounds that it has followed."""
        return rounds_before(self.at)

    @property
    def averaged(self) -> int:
        """Those of them that averaged."""
        return 0 if self.at is None else self.at.turn

    @property
    def bases(self) -> tuple[int, ...]:
        """The round that last set each fragment, -1 for the initial values."""
        return (-1,) * self.fragments if self.at is None else self.at.bases

    @property
    def lots(self) -> LotsHeld:
        """The samples that it reads, by position in the common order."""
        return LotsHeld(self.own.island, 0, ()) if self.at is None else self.at.lots.of(self.own.island)

    @property
    def members(self) -> tuple[Member, ...]:
        """The islands that take part in the next round."""
        return tuple(Member(each, "") for each in self.founders) if self.at is None else self.at.members

    @property
    def is_member(self) -> bool:
        """True if the island takes part in the next round."""
        return self._is_among(self.members)

    def stays(self, records: Iterable[RoundRecord]) -> bool:
        """Return True if it is a member, and is one after each of the records."""
        return self.is_member and all(self._is_among(record.members) for record in records)

    def after(self, record: RoundRecord) -> Standing:
        """Return the standing after a record."""
        return replace(self, at=record)

    def _is_among(self, members: Collection[Member]) -> bool:
        return self.own in members or Member(self.own.island, "") in members
