"""Programs: the instructions that one rank executes in a step, at the granularity of blocks and units.

Lowering ends here: a row of a schedule, and what the rank's stages are made of, become a program. The executor plays
it, and the memory that it takes is a sum over it. Nothing about what to gather, free or reduce is decided later.
"""

from atoll.plans.plan import Ending
from atoll.program.end import BACKWARD
from atoll.program.fold import makes
from atoll.program.host import Hosted
from atoll.program.instruction import Instruction
from atoll.program.kept import Kept
from atoll.program.laws import check_program
from atoll.program.lower import lower_row
from atoll.program.memory import Bytes, Held, WorkingMemory, needed_in_a_step, peaks, working_memory
from atoll.program.operation import OPERATIONS, PHASES, Lane, Operation, Partners, Phase, operation_of
from atoll.program.partial import Partial
from atoll.program.parts import Part, parts_of
from atoll.program.program import Program, Programs
from atoll.program.rank import ModelShape, Using, by_index, groups_of, unit_shape, using
from atoll.program.shape import BlockShape, RankShape, StageShape, UnitShape
from atoll.program.table import Do
from atoll.program.traffic import sent_by, way_of
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
    "Held",
    "Hosted",
    "Instruction",
    "Kept",
    "Lane",
    "ModelShape",
    "Operation",
    "Part",
    "Partial",
    "Partners",
    "Phase",
    "Program",
    "Programs",
    "RankShape",
    "Sliced",
    "StageShape",
    "UnitShape",
    "Using",
    "WorkingMemory",
    "by_index",
    "check_program",
    "groups_of",
    "lower_row",
    "makes",
    "needed_in_a_step",
    "operation_of",
    "parts_of",
    "peaks",
    "sent_by",
    "unit_shape",
    "using",
    "way_of",
    "working_memory",
]
