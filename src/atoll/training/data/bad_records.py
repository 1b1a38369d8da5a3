"""Policies for broken records: stop at the first one, or skip and count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from atoll.base.errors import DataError, RecordError

Policy = Literal["stop", "skip"]

MOST_SKIPPED = 0.1
"""Largest share of a source's records that may be skipped. Beyond it the source or a setting is wrong, not a record."""

_LISTED = 20
"""Number of counts in a note; the others are summed."""


@dataclass(slots=True)
class BadRecords:
    """The broken records of a source.

    counts: by file and kind of fault.  first: the message of the first one.
    """

    policy: Policy = "stop"
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: str = ""

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Count a RecordError of the block and end the block there; or raise it, if the policy is "stop"."""
        try:
            yield
        except RecordError as error:
            if self.policy == "stop":
                raise
            self.counts[error.file, error.kind] += 1
            self.first = self.first or str(error)

    def check(self, kept: int, name: str) -> Skipped | None:
        """Return the counts, or None if nothing was skipped. Raises DataError if too many records were.

        kept: number of records that were not skipped.  name: key and value of the source.
        """
        skipped = self.counts.total()
        if not skipped:
            return None
        found = Skipped(skipped + kept, dict(self.counts))
        if skipped > MOST_SKIPPED * found.records:
            raise DataError(
                f"{name}: {found}. At most {MOST_SKIPPED:.0%} are skipped (data.bad_records); the first one: "
                f"{self.first}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Skipped:
    """Records of a source that were skipped.

    records: all of the source.  counts: of skipped ones, by file and kind of fault.
    """

    records: int
    counts: dict[tuple[str, str], int]

    def __str__(self) -> str:
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        words = [f"{count} of {file}: {kind}" for (file, kind), count in ordered[:_LISTED]]
        if rest := sum(count for _, count in ordered[_LISTED:]):
            words.append(f"{rest} of other files or kinds")
        return f"{sum(self.counts.values())} of {self.records} records are broken: {'; '.join(words)}"
