"""Whether a result is of the code as it is now.

    current     no file that it depends on has changed since it was measured
    confirmed   some have, but a short measurement repeated it afterwards, and none has changed since then
    older       neither: its figures may still hold, but nothing says so

`benchmarks/confirmations.py` has what such a short measurement is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from benchmarks import confirmations
from benchmarks.confirmations import NEAR, Check
from benchmarks.provenance import Raw, Read, changed, load, read

Name = Literal["current", "confirmed", "older"]

MOST_DIFFERENCES = 6
"""Named of the figures that a confirmation did not repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A result and its confirmation, beside the files as they are now.

    measured_in: the result's environment.  files: those that have changed since it was measured.
    confirmation: its last one, or None.  files_since: those that have changed since the confirmation.
    """

    measured_in: Raw
    files: Sequence[str]
    confirmation: Raw | None = None
    files_since: Sequence[str] = ()

    @property
    def name(self) -> Name:
        """Which of the three."""
        if not self.files and not self.measured_in["uncommitted"]:
            return "current"
        return "confirmed" if self._is_repeated else "older"

    @property
    def stands(self) -> bool:
        """Whether the figures are of the code as it is: measured with it, or confirmed with it."""
        return self.name != "older"

    @property
    def date(self) -> str:
        """When it was measured."""
        return _date(self.measured_in)

    @property
    def dates(self) -> str:
        """When it was measured, and when it was confirmed if that counts."""
        if self.name != "confirmed" or self.confirmation is None:
            return self.date
        return f"{self.date}, confirmed {_date(self.confirmation['environment'])}"

    @property
    def beside(self) -> str:
        """What is said beside its figures: dates, the commit of its confirmation, or that it is older."""
        if self.name == "confirmed" and self.confirmation is not None:
            return f"{self.dates} at {_commit(self.confirmation['environment'])}"
        return f"{self.date}, older" if self.name == "older" else self.date

    @property
    def words(self) -> str:
        """All of it in a line: the state, of how many files, and what became of a confirmation."""
        parts = ["from an uncommitted tree"] if self.measured_in["uncommitted"] else []
        if self.name == "current":
            return "current"
        if self.name == "confirmed":
            parts.append(self._of_confirmation)
        parts.append(f"older than {len(self.files)} of {len(self.measured_in['depends'])} files")
        if self.name == "older" and self.confirmation is not None:
            parts.append(self._of_confirmation)
        return "; ".join(parts)

    @property
    def is_refuted(self) -> bool:
        """Whether the same code has been measured and did not repeat it: only a full measurement helps."""
        return self._is_recent and not self._is_repeated

    @property
    def _is_recent(self) -> bool:
        return self.confirmation is not None and not (
            self.files_since or self.confirmation["environment"]["uncommitted"]
        )

    @property
    def _is_repeated(self) -> bool:
        return self.confirmation is not None and self._is_recent and not confirmations.differing(self.confirmation)

    @property
    def _of_confirmation(self) -> str:
        """What the last confirmation found, when and where."""
        assert self.confirmation is not None
        differing, count = confirmations.differing(self.confirmation), len(self.confirmation["checks"])
        at = f"{_date(self.confirmation['environment'])} at {_commit(self.confirmation['environment'])}"
        words = f"not confirmed {at}, {len(differing)} of {count} figures differ" if differing else f"confirmed {at}"
        if self.confirmation["environment"]["uncommitted"]:
            words += ", from an uncommitted tree"
        return f"last {words}; files changed since then: {len(self.files_since)}" if self.files_since else words


def state(measured_in: Raw, confirmation: Raw | None = None, *, read: Read = read) -> State:
    """Return the state of a result, given its environment; a confirmation of an earlier result does not count."""
    if confirmation is None or not confirmations.is_of(confirmation, measured_in):
        return State(measured_in=measured_in, files=changed(measured_in["depends"], read))
    return State(
        measured_in=measured_in,
        files=changed(measured_in["depends"], read),
        confirmation=confirmation,
        files_since=changed(confirmation["environment"]["depends"], read),
    )


@cache
def state_of(name: str) -> State:
    """The state of a benchmark's result."""
    return state(load(name)["environment"], confirmations.load(name))


def with_state(page: str, found: State) -> str:
    """A benchmark's page with what its confirmation found, below the title; as it is where there is none."""
    if found.confirmation is None or found.name == "current":
        return page
    title, rest = page.split("\n\n", 1)
    return f"{title}\n\n{_paragraph(found.confirmation, found)}\n\n{rest}"


def _paragraph(confirmation: Raw, found: State) -> str:
    """What was measured again, and what came of it."""
    measured_in = confirmation["environment"]
    checks, differing = confirmations.checks_of(confirmation), confirmations.differing(confirmation)
    at = f"{_date(measured_in)} at {_commit(measured_in)}"
    verdict = f"Not confirmed {at}" if differing else f"Confirmed {at}"
    parts = [
        f"**{verdict}**: {confirmation['how']}, measured again in {measured_in['seconds'] / 60:.0f} minutes on "
        f"{measured_in['cores']} cores of {measured_in['cpu']}; [raw file](results/confirmation.json).",
        f"{len(differing)} of {len(checks)} figures differ: {_named(differing)}."
        if differing
        else f"{len(checks)} figures were compared: words are the same, numbers differ by at most {_largest(checks)} "
        f"({NEAR:.0%} is allowed).".replace("%", " %"),
    ]
    if confirmation["attempts"]:
        parts.append(f"Earlier attempts at it: {_attempts(confirmation['attempts'])}.")
    if measured_in["uncommitted"]:
        parts.append("It does not count: files were not committed.")
    if found.files_since:
        parts.append(f"It does not count any more: files that changed since then: {len(found.files_since)}.")
    return " ".join(parts)


def _largest(checks: Sequence[Check]) -> str:
    pairs = [(each.published, each.again) for each in checks]
    off = [abs(b / a - 1.0) for a, b in pairs if isinstance(a, float | int) and isinstance(b, float | int) and a]
    return f"{max(off, default=0.0):.1%}"


def _named(checks: Sequence[Check]) -> str:
    more = len(checks) - MOST_DIFFERENCES
    words = "; ".join(check.words for check in checks[:MOST_DIFFERENCES])
    return f"{words}; and {more} more" if more > 0 else words


def _attempts(attempts: Sequence[Raw]) -> str:
    return ", ".join(
        f"{_date(each)} at {_commit(each)} ({'confirmed' if each['held'] else 'not confirmed'})" for each in attempts
    )


def _date(measured_in: Raw) -> str:
    return str(measured_in["date"])[:10]


def _commit(measured_in: Raw) -> str:
    return f"`{measured_in['commit'][:8]}`"
