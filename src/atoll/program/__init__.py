"""Programs: the instructions that one rank executes in a step, at the granularity of blocks and units.

Lowering ends here: a row of a schedule, and what the rank's stages are made of, become a program. The executor plays
it, and the memory that it takes is a sum over it. Nothing about what to gather, free or reduce is decided later.
"""

from atoll.plans.plan import Ending
from atoll.program.end import BACKWARD
from atoll.program.fold import makes
from atoll.program.instruction import Instruction
from atoll.program.laws import check
from atoll.program.lower import lower_row
from atoll.program.memory import Bytes, peaks
from atoll.program.operation import OPERATIONS, PHASES, Lane, Operation, Partners, Phase, named
from atoll.program.parts import Part, parts_of
from atoll.program.program import Program, Programs
from atoll.program.shape import BlockShape, RankShape, StageShape, UnitShape
from atoll.program.table import Do
from atoll.program.traffic import sent_by, way_of
from atoll.program.units import unit_shape
from atoll.program.vocabulary import EMBEDDING, HEAD, Sliced

__all__ = [
    "BACKWARD",
    "EMBEDDING",
    "HEAD",
    "OPERATIONS",
    "PHASES",
    "BlockShape",
    "Bytes",
    "Do",
    "Ending",
    "Instruction",
    "Lane",
    "Operation",
    "Part",
    "Partners",
    "Phase",
    "Program",
    "Programs",
    "RankShape",
    "Sliced",
    "StageShape",
    "UnitShape",
    "check",
    "lower_row",
    "makes",
    "named",
    "parts_of",
    "peaks",
    "sent_by",
    "unit_shape",
    "way_of",
]
