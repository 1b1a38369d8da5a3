"""Placement of stages on ranks.

    4 ranks        line        loop, 2 chunks    v
    rank 0         0           0 4               0 7
    rank 1         1           1 5               1 6
    rank 2         2           2 6               2 5
    rank 3         3           3 7               3 4

Chunk c of a rank is its c-th stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from atoll.base.errors import ScheduleError

PlacementKind = Literal["line", "loop", "v"]
PLACEMENT_KINDS: tuple[PlacementKind, ...] = get_args(PlacementKind)


@dataclass(frozen=True, slots=True)
class Placement:
    """Stage -> rank, for `ranks` ranks with `chunks` stages each: a line has 1 chunk, a v has 2, a loop any number."""

    kind: PlacementKind
    ranks: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.kind not in PLACEMENT_KINDS:
            raise ScheduleError(f"placement {self.kind!r} does not exist: choose one of {', '.join(PLACEMENT_KINDS)}")
        if self.ranks < 1 or self.chunks < 1:
            raise ScheduleError(f"a placement needs at least 1 rank and 1 chunk, not {self.ranks} and {self.chunks}")
        wanted = {"line": 1, "v": 2}.get(self.kind, self.chunks)
        if self.chunks != wanted:
            raise ScheduleError(f"a {self.kind} has {wanted} chunk(s) a rank, not {self.chunks}; only a loop has any")

    @property
    def stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank that runs `stage`."""
        if not 0 <= stage < self.stages:
            sizes = f"{self.ranks} ranks x {self.chunks} chunks"
            raise ScheduleError(f"stage {stage} does not exist: {sizes} have stages 0 to {self.stages - 1}")
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.kind == "v" and turn == 1 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, in model order."""
        if not 0 <= rank < self.ranks:
            raise ScheduleError(f"rank {rank} does not exist: there are ranks 0 to {self.ranks - 1}")
        if self.kind == "v":
            return (rank, 2 * self.ranks - 1 - rank)
        return tuple(range(rank, self.stages, self.ranks))
