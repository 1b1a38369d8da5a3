"""The front of a race: what each contender takes in seconds against what it holds in bytes.

A row is on the front when no other row is at most as slow and at most as large, and better in one of the two. A race is
decided at memory budgets: at a budget, the best of a side is its fastest row whose peak fits. A budget at which a peer
runs is the peak of a row of that peer's front; between two of them the peers' best stays the same and ours can only get
better, so these budgets decide all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
"""`name`, `median_seconds`, `peak_bytes`, `is_ours`; what else a bench notes travels along."""

OVERRUN = 1.02
"""A row fits a budget that its peak exceeds by less than this: peaks of one setting differ by about as much from run
to run, since threads allocate when they are scheduled."""


def front(rows: Iterable[Row]) -> list[Row]:
    """The rows that no other row dominates, by peak bytes; the fastest row is the last."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["peak_bytes"], row["median_seconds"])):
        if not found or row["median_seconds"] < found[-1]["median_seconds"]:
            found.append(row)
    return found


def near_front(rows: Sequence[Row], *, slack: float) -> list[Row]:
    """The rows that would be on the front if each were faster by the factor `slack`: one noisy step decides nothing."""
    edge = front(rows)
    return [
        row
        for row in rows
        if all(
            row["median_seconds"] <= other["median_seconds"] * slack
            for other in edge
            if other["peak_bytes"] <= row["peak_bytes"]
        )
    ]


def best_within(rows: Iterable[Row], budget: float) -> Row | None:
    """The fastest row whose peak is at most `budget` bytes; None where none fits."""
    fitting = [row for row in rows if row["peak_bytes"] <= budget]
    return min(fitting, key=lambda row: row["median_seconds"], default=None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Both sides' best at a memory budget in bytes.

    ratio: the peer's median seconds over ours, above 1 where we are faster; None where nothing of ours fits.
    """

    budget: int
    peer: Row
    ours: Row | None

    @property
    def ratio(self) -> float | None:
        """Peer's seconds over ours."""
        return None if self.ours is None else self.peer["median_seconds"] / self.ours["median_seconds"]

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "budget_bytes": self.budget,
            "peer": self.peer["name"],
            "ours": None if self.ours is None else self.ours["name"],
            "ratio": None if self.ratio is None else round(self.ratio, 4),
        }


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Both sides' best at every budget at which a peer runs, the smallest budget first."""
    ours = [row for row in rows if row["is_ours"]]
    peers = front(row for row in rows if not row["is_ours"])
    return [Verdict(row["peak_bytes"], row, best_within(ours, row["peak_bytes"] * OVERRUN)) for row in peers]


def best_against_best(rows: Sequence[Row]) -> Verdict:
    """Both sides' fastest rows where ours holds no more than the peer's fastest row."""
    return verdicts(rows)[-1]
