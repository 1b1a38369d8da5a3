"""Short measurements that repeat the figures of long ones: `python benchmarks/run.py --confirm NAME ...`.

A full race takes an hour, so its result stays older than its code for weeks. A bench may define

    confirm(arguments, result) -> {"how": words, "checks": [Check.to_json(), ...], ...}

which measures again only what decides the figures of `result`, and returns each as it was published and as it is now.
The checks are written to `benchmarks/<name>/results/confirmation.json`, with an environment of their own. The verdict
is not: it follows from the checks whenever a page is written. If all hold, the result is confirmed until code that it
depends on changes again; if not, the confirmation is refuted and the result stays older (`benchmarks/states.py`).

Another attempt replaces an earlier one, but the file and the pages say that there was one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from random import Random
from typing import Any, TypeVar

from benchmarks.provenance import ROOT, Raw

NEAR = 0.05
"""Largest relative difference of a figure that is confirmed."""

DRAWN = 20
"""One case in this many is drawn."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Check:
    """A figure or a word of a page, as it was published and as it was found again; None where there was none."""

    what: str
    published: float | str | None
    again: float | str | None

    @property
    def holds(self) -> bool:
        """Return True if a number is within `NEAR` of the published one, or a word is the same."""
        if isinstance(self.published, float | int) and isinstance(self.again, float | int):
            return abs(self.again - self.published) <= NEAR * abs(self.published)
        return self.published == self.again

    @property
    def words(self) -> str:
        """The published and the new value, as text."""
        return f"{self.what}: {_said(self.published)} before, {_said(self.again)} now"

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return asdict(self)


def _said(value: float | str | None) -> str:
    return "nothing" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def drawn(values: Sequence[Value], *, seed: int) -> list[Value]:
    """Return one in `DRAWN` of the values, at least one if there are any, in their order."""
    places = Random(seed).sample(range(len(values)), ceil(len(values) / DRAWN))
    return [values[at] for at in sorted(places)]


def seed_of(commit: str) -> int:
    """Return the seed of what is drawn at a commit, so that nobody chooses it."""
    return int(commit[:8], 16)


# ---- the file


def path_of(name: str) -> str:
    """The file of a result's confirmation."""
    return f"benchmarks/{name}/results/confirmation.json"


def load(name: str) -> Raw | None:
    """The last confirmation of a result, whatever it says; None if there is none."""
    path = ROOT / path_of(name)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def record(found: Mapping[str, Any], *, of: Raw, measured_in: Raw, earlier: Raw | None) -> dict[str, Any]:
    """Return what is written: what was found, when, what it confirms, and the earlier attempts at the same result.

    of: the result's environment.  measured_in: the confirmation's.
    """
    attempts = []
    if earlier is not None and is_of(earlier, of):
        was = earlier["environment"]
        attempts = [
            *earlier["attempts"],
            {"date": was["date"], "commit": was["commit"], "held": not differing(earlier)},
        ]
    return {"of": _identity(of), "attempts": attempts, **found, "environment": measured_in}


def is_of(confirmation: Raw, measured_in: Raw) -> bool:
    """Return True if a confirmation belongs to the result with this environment, and not to an earlier result."""
    return dict(confirmation["of"]) == _identity(measured_in)


def _identity(measured_in: Raw) -> dict[str, str]:
    return {"date": measured_in["date"], "commit": measured_in["commit"]}


def checks_of(confirmation: Raw) -> list[Check]:
    """Return the checks of a confirmation."""
    return [Check(**each) for each in confirmation["checks"]]


def differing(confirmation: Raw) -> list[Check]:
    """The checks that do not hold; all of them must. Nothing compared confirms nothing."""
    checks = checks_of(confirmation)
    return [check for check in checks if not check.holds] if checks else [Check("figures compared", "some", "none")]
