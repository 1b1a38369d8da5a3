"""Figures of the race of experts: exchanging tokens beside gathering experts, and beside what shards with FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.islands.front import Verdict, verdicts
from benchmarks.islands.judging import counted

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two settings of Atoll that differ in nothing but who computes the experts of a token."""

    exchanges: Row
    gathers: Row

    @property
    def ratio(self) -> float:
        """How many times as fast the exchange is."""
        return float(self.gathers["median_seconds"] / self.exchanges["median_seconds"])

    @property
    def share(self) -> float:
        """Its peak memory, as a part of that of gathering."""
        return float(self.exchanges["peak_bytes"] / self.gathers["peak_bytes"])


def pairs(race: Mapping[str, Any]) -> list[Pair]:
    """Each setting that exchanges, beside the one that gathers in the same layout, the fastest first."""
    ours = {tuple(row["setting"].items()): row for row in counted(race).values() if row["is_ours"]}
    found = []
    for row in ours.values():
        beside = ours.get(tuple({**row["setting"], "expert": 1}.items()))
        if row["setting"]["expert"] > 1 and beside is not None:
            found.append(Pair(row, beside))
    return sorted(found, key=lambda pair: float(pair.exchanges["median_seconds"]))


def beside_fsdp2(race: Mapping[str, Any]) -> list[Verdict]:
    """Atoll's best at each memory budget at which a setting of FSDP2 or HSDP is their fastest that fits; at the last
    one it is their fastest of all."""
    rows = counted(race).values()
    return verdicts([row for row in rows if row["is_ours"] or row["setting"]["family"] == "Fsdp2"])
