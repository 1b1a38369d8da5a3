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

    def leads(self, record: RoundRecord, company: Collection[str]) -> bool:
        """Return True if this island should send when those of a record do, which has not counted it.

        company: the islands that were last counted together with this one; those that the record counts have left it.
        Groups that each adapt to the other would never meet: the larger half of the members leads, and if neither is,
        the one with the earliest member.
        """
        counted = {each.island for each in record.contributions}
        return _weight(record, counted) > _weight(record, {self.own.island, *company} - counted)

    def after(self, record: RoundRecord) -> Standing:
        """Return the standing after a record."""
        return replace(self, at=record)

    def _is_among(self, members: Collection[Member]) -> bool:
        return self.own in members or Member(self.own.island, "") in members


def _weight(record: RoundRecord, islands: Collection[str]) -> tuple[bool, int]:
    """Return whether islands are more than half of the members, and how early the earliest of them became one."""
    places = [at for at, each in enumerate(record.members) if each.island in islands]
    return 2 * len(places) > len(record.members), -min(places, default=len(record.members))
