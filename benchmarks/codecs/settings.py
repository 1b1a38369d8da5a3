"""Atoll with codecs between the islands, beside Atoll without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from atoll.plans.layouts import Codec, Codecs
from atoll.plans.plan import Plan
from atoll.program.traffic import sent_by
from atoll.runtime.assemble.describe import describe_rank
from benchmarks.islands.contenders import Atoll
from benchmarks.islands.ranks import Rank
from benchmarks.islands.work import Work


@dataclass(frozen=True, slots=True)
class Coded(Atoll):
    """Atoll with one codec for gradients and one for parameters; None for neither.

    rounding: of gradients.
    """

    gradient: str | None = None
    parameter: str | None = None
    rounding: Any = "nearest"

    @property
    def codecs(self) -> Codecs:
        """The codecs of the plan."""
        return Codecs(
            None if self.gradient is None else Codec(self.gradient, rounding=self.rounding),
            None if self.parameter is None else Codec(self.parameter),
        )

    @property
    def name(self) -> str:
        return f"{self.layout}, {self.codecs}" if self.codecs else self.layout

    def plan(self, work: Work, *, inter: int, intra: int) -> Plan:
        # `super()` without arguments needs the class that a dataclass with slots has replaced.
        return replace(Atoll.plan(self, work, inter=inter, intra=intra), codecs=self.codecs)


SETTINGS = (
    Coded("IIG"),
    Coded("IIG", gradient="bf16", parameter="bf16"),
    Coded("IIG", gradient="fp8", parameter="fp8"),
    Coded("IIG", gradient="int8", parameter="int8"),
    Coded("IIG", gradient="int4", parameter="int8"),
    Coded("IIG", gradient="int4", parameter="int4"),
    Coded("IIG", gradient="int4", parameter="int4", rounding="stochastic"),
    Coded("GGG"),
    Coded("GGG", gradient="int4", parameter="int8"),
)
"""What takes turns."""


def formula_bytes(rank: Rank, setting: Coded) -> int:
    """Bytes across that a rank sends in a step by the formula: a sum over the instructions of its program."""
    plan = setting.plan(rank.work, inter=rank.inter, intra=rank.intra)

    def make() -> nn.Module:
        with torch.device("meta"):
            return rank.work.build()

    program = describe_rank(make, plan, 0, reads_in_place=True).program
    return sent_by(program.instructions, program.shape)["inter"]
