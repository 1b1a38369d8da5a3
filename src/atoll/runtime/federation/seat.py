"""The seat of an island in a federation: its name, its peers, and what it agrees to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atoll.base.errors import PlanError

POLL_SECONDS = 0.2
"""Seconds between two reads of another island's notice."""


@dataclass(frozen=True, slots=True)
class IslandAddress:
    """Where an island, or a rank of it, shows what it has."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str) -> IslandAddress:
        """Return the address `host:port`. Raises ValueError for anything else."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"{text!r} is no address; write it as host:port, such as 10.0.0.1:29600")
        return IslandAddress(host.removeprefix("[").removesuffix("]"), int(port))


@dataclass(frozen=True, slots=True)
class IslandSeat:
    """An island's part in a federation; the rules are in `atoll.plans.outer.Apart`.

    name: of this island.  islands: where the first rank of every island can be reached, by name.  secret: that all
    islands have.  folder: for what the island has to remember.  founders: islands that begin the run together; all if
    not given.  listen: where this island listens, if not at its address.
    run: what all islands must have in common besides model, seed and outer steps, such as a digest of the corpus.
    stock: samples that this island wants to be granted ahead.
    silent: seconds without a sign of an island after which no round waits for it.  away: seconds after which it is no
    member any more, and others read its data.  pace: bytes a second at which anchors of others are taken over, at most.
    poll: seconds between two looks at another island.

    Raises PlanError for an island that is not in the table, and for values outside their domain.
    """

    name: str
    islands: Mapping[str, IslandAddress]
    secret: bytes = field(repr=False)
    folder: Path
    founders: tuple[str, ...] = ()
    listen: IslandAddress | None = None
    run: str = ""
    stock: int = 0
    silent: float = 15.0
    away: float = 120.0
    pace: float | None = None
    poll: float = POLL_SECONDS

    def __post_init__(self) -> None:
        known = ", ".join(self.islands)
        for island in (self.name, *self.founders):
            if island not in self.islands:
                raise PlanError(f"island {island!r} is not one of the federation's islands: {known}")
        if not 0 < self.silent <= self.away:
            raise PlanError(
                f"silent = {self.silent} and away = {self.away} seconds; an island is silent before it is away, and "
                "both are above 0"
            )
        if self.pace is not None and not self.pace > 0:
            raise PlanError(f"pace = {self.pace} bytes a second; a number above 0, or leave it out")

    @property
    def first(self) -> tuple[str, ...]:
        """The islands that begin the run together."""
        return self.founders or tuple(self.islands)

    @property
    def others(self) -> dict[str, IslandAddress]:
        """The other islands."""
        return {name: address for name, address in self.islands.items() if name != self.name}
