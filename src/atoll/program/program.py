"""A program: the instructions of one rank, checked when it is built."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from atoll.base.errors import ScheduleError
from atoll.plans.ir import Placement
from atoll.program.instruction import Instruction
from atoll.program.laws import check_program
from atoll.program.memory import Peaks, peaks
from atoll.program.shape import RankShape
from atoll.program.traffic import exchanges_of, sent_by


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of all pipeline ranks in a step, in the order of ranks."""

    placement: Placement
    ranks: tuple[Program, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.placement.ranks:
            raise ScheduleError(
                f"{len(self.ranks)} programs for {self.placement.ranks} pipeline ranks: give one a rank"
            )


@dataclass(frozen=True)
class Program:
    """The instructions of one pipeline rank for its actions. Raises ScheduleError with every violated law."""

    instructions: tuple[Instruction, ...]
    shape: RankShape

    def __post_init__(self) -> None:
        check_program(self.instructions, self.shape)

    @cached_property
    def digest(self) -> int:
        """Checksum of the instructions, which must be equal on ranks that share parameters, and of what they exchange:
        ranks that divide experts meet in each exchange, so all of them have the same in one order."""
        lines = [f"{each} {exchanges_of(each, self.shape) or ''}".rstrip() for each in self.instructions]
        return zlib.crc32("\n".join(lines).encode())

    @cached_property
    def sent(self) -> Counter[str]:
        """Bytes by axis that it sends to data-parallel ranks, apart from sums of a few numbers."""
        return sent_by(self.instructions, self.shape)

    @cached_property
    def peaks(self) -> Peaks:
        """Peak bytes of each component."""
        return peaks(self.instructions, self.shape)
