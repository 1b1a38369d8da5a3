"""The types of the table of instructions: facts, workspaces, and a row (`Operation`).

    needs   what must hold before it, or must not, each with the words of the error
    ends    what no longer holds after it
    gives   what holds after it
    takes   buffers that it allocates, and `frees` those that it gives back
    moves   what it sends to data-parallel ranks, by a key of `UnitShape.travel`

What holds is a set of facts, each about a unit, a phase of its gradients, a message, or the whole step. A fact may be a
flight: a transfer between the instruction that begins it and the one that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from atoll.base.errors import ConfigError

if TYPE_CHECKING:
    from atoll.program.shape import RankShape, UnitShape

Phase = Literal["I", "W"]
"""The phase of a backward that computes a gradient: with the input's (I), or with the weights' (W)."""

PHASES: tuple[Phase, ...] = ("I", "W")


class Lane(StrEnum):
    """The resource that an instruction uses: the device, the pipeline links, the data-parallel links, or the link to
    host memory."""

    COMPUTE = "compute"
    PIPELINE = "pipeline"
    DATA = "data"
    HOST = "host"


class Scope(StrEnum):
    """The object of an instruction, which `Instruction.of` names: a block, a unit, or the gradients of one phase of a
    unit. For a microbatch of a stage, and for the whole step, `of` is -1."""

    BLOCK = "block"
    UNIT = "unit"
    PHASE = "phase"
    MICROBATCH = "microbatch"
    STEP = "step"


class Partners(StrEnum):
    """The ranks that an instruction may wait for: of which axes, or of what."""

    TENSOR = "the tensor-parallel group, and the ranks that divide experts"
    DATA = "data-parallel ranks"
    STAGE = "ranks of the stage"
    NEIGHBOUR = "the rank of the next or the previous stage"
    PIPELINE = "all pipeline ranks"
    ALL = "all ranks"
    NONE = "no rank, but a copy from or to host memory"


class Over(StrEnum):
    """The units that an instruction works on: those of its block, its own, all, or none."""

    BLOCK = "block"
    UNIT = "unit"
    ALL = "all"
    NONE = "none"


class Side(StrEnum):
    """The rank that a message comes from: of the stage before, of the one behind, of the first or of the last."""

    PREVIOUS = "previous"
    NEXT = "next"
    FIRST = "first"
    LAST = "last"


# ---- facts and buffers


class Per(StrEnum):
    """The kind of object that a fact or a buffer belongs to. WEIGHT: a unit's W in a stage, which may have others.
    PASSAGE: what a block keeps of a microbatch for its backward, or what its I keeps for the W of a unit; its key has
    the block, or the unit, and the microbatch."""

    UNIT = "unit"
    WEIGHT = "weight"
    PHASE = "phase"
    BLOCK = "block"
    PASSAGE = "passage"
    STAGE = "stage"
    MESSAGE = "message"
    STEP = "step"


def _every(unit: UnitShape, phase: Phase | None) -> bool:
    return True


def _no(unit: UnitShape) -> bool:
    return False


def _one(_: object) -> int:
    return 1


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Fact:
    """Something that holds between two instructions of a program.

    per: what it is about.  applies: to which units, and phases of their gradients.
    holds_first: whether it holds before the first instruction.
    left: what is wrong if it holds after the last one.  excused: units of which it may.
    is_flight: whether it is a transfer under way. An instruction that begins another one has it start after the flights
    that it ends; any other instruction waits for those.
    is_in_order: whether it ends in the order in which it began; it may then begin again before it has ended.
    most, size, above: the largest sum of sizes, of units, that may hold at once, and what is wrong if there is more; by
    default each counts as one.
    lane, colour, bar: where a drawing shows it, from the instruction that begins it to the one that ends it, and how;
    the text is that of the instruction that ends it if there is no other.
    """

    per: Per
    applies: Callable[[UnitShape, Phase | None], bool] = _every
    holds_first: bool = False
    left: str = ""
    excused: Callable[[UnitShape], bool] = _no
    is_flight: bool = False
    is_in_order: bool = False
    most: Callable[[RankShape], int] | None = None
    size: Callable[[Any], int] = _one
    above: str = ""
    lane: str = ""
    colour: str = ""
    bar: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Need:
    """A fact that must hold before an instruction, or must not. words: what is wrong otherwise.

    of_all: whether it is asked of units that the fact does not apply to as well.
    """

    fact: Fact
    words: str
    _: KW_ONLY
    holds: bool = True
    of_all: bool = False


class Sharing(StrEnum):
    """How instructions share a buffer: one each, one that the first allocates and a later instruction frees, or one
    that they use in turns, as large as the largest of them needs it."""

    EACH = "each"
    ONCE = "once"
    TOGETHER = "together"


@dataclass(frozen=True, eq=False, slots=True)
class Workspace:
    """Memory of a unit, a phase of its gradients, a block, a stage, or the rank. part: the component of
    `atoll.program.memory.Working` that it belongs to.  shared: whether several may be in use at once.  before: bytes
    that the program before has left, until an instruction frees them."""

    part: str
    per: Per
    shared: Sharing = Sharing.ONCE
    before: Callable[[RankShape], int] | None = None


Size = Callable[[Any, "Phase | None"], int]
"""Bytes of a `UnitShape`, of a phase of its gradients, of a `BlockShape`, a `WeightShape`, a `StageShape` or a
`RankShape`."""


@dataclass(frozen=True, eq=False, slots=True)
class Amount:
    """A workspace that an instruction allocates or frees, and its size. size: None frees all of it.

    of_all: whether it is that of all phases of the units, whichever the instruction is about.
    """

    workspace: Workspace
    size: Size | None = None
    _: KW_ONLY
    of_all: bool = False


# ---- rows

OPERATIONS: dict[str, Operation] = {}
"""Every instruction by its name."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Operation:
    """All that is known of an instruction. As an attribute of a class it is registered under the attribute's name.

    lane: the resource that it uses.  scope: what `Instruction.of` is.
    over: the units that it works on; a name is that of a slice of the rank (`RankShape.slices`).
    phase: of the gradients that it makes, if the instruction does not say it.
    waits: whether it can block: on a message, on a collective or on other ranks.  peers: those that it may wait for.
    begins: whether it neither computes nor waits: after a block's forward it is executed before control returns to the
    model.  is_aside: whether a timeline shows it with the action that uses what it begins or ends.

    exchanges: whether it exchanges rows with the ranks that divide its block's experts, where the block does.
    reads: whether it reads the parameters of its units.
    needs, ends, gives: facts.  takes, frees: buffers.  within: what it allocates and frees itself.

    moves: whether it sends bytes to data-parallel ranks.  moves_as: the row whose bytes these are, if not its own.
    carries: what it sends, as in a table of traffic.

    sends, posts, receives: the kind of a message between pipeline ranks.
    to, source: the rank that a message goes to, or that it comes from with its kind.
    stands_for: the receive, at one end of the pipeline, that takes its messages of all ranks.
    tells, hears: a sum of a few numbers, and the ranks that it is needed from.

    cause: the part of a step's time that it counts to.
    column: its colour in a drawing, where it takes a column.  bar: lane, colour and text of a transfer that it shows at
    one place.

    is_of_passage: whether it gives or ends a fact of `Per.PASSAGE`.
    """

    lane: Lane = Lane.COMPUTE
    scope: Scope = Scope.UNIT
    over: Over | str = Over.UNIT
    phase: Phase | None = None
    waits: bool = False
    peers: Partners = Partners.DATA
    begins: bool = False
    is_aside: bool = False
    exchanges: bool = False
    reads: bool = False
    needs: tuple[Need, ...] = ()
    ends: tuple[Fact, ...] = ()
    gives: tuple[Fact, ...] = ()
    takes: tuple[Amount, ...] = ()
    frees: tuple[Amount, ...] = ()
    within: tuple[Amount, ...] = ()
    moves: bool = False
    moves_as: Operation | None = None
    carries: str = ""
    sends: str = ""
    to: Side | None = None
    posts: str = ""
    receives: str = ""
    source: tuple[str, Side] | None = None
    stands_for: str = ""
    tells: str = ""
    hears: tuple[str, Partners] | None = None
    cause: str = "other"
    column: str = ""
    bar: tuple[str, str, str] | None = None
    name: str = field(default="", init=False)
    is_of_passage: bool = field(default=False, init=False)

    def __set_name__(self, owner: type, name: str) -> None:
        """Register the row. Raises TypeError if there is another one of this name."""
        if name in OPERATIONS:
            raise TypeError(f"{owner.__name__}.{name}: there is an instruction of this name already")
        object.__setattr__(self, "name", name)
        is_of_passage = any(fact.per is Per.PASSAGE for fact in (*self.gives, *self.ends))
        object.__setattr__(self, "is_of_passage", is_of_passage)
        OPERATIONS[name] = self

    def __str__(self) -> str:
        """The name."""
        return self.name

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def __reduce__(self) -> tuple[Callable[[str], Operation], tuple[str]]:
        """In another process it is the row of that name."""
        return operation_of, (self.name,)

    @property
    def is_of_block(self) -> bool:
        """True if `Instruction.of` is the index of a block."""
        return self.scope is Scope.BLOCK

    @property
    def is_of_unit(self) -> bool:
        """True if `Instruction.of` is the index of a unit."""
        return self.scope in (Scope.UNIT, Scope.PHASE)

    def is_in_turn(self, fact: Fact) -> bool:
        """True if it ends the first that a fact is about, which must be its own; otherwise it ends all of its own."""
        return fact.is_in_order and any(need.fact is fact for need in self.needs)

    @property
    def sent(self) -> Operation | None:
        """The row by which `UnitShape.travel` has the bytes that it sends; None if it sends none."""
        return self.moves_as or (self if self.moves else None)


def facts() -> tuple[Fact, ...]:
    """Return the facts of all rows, each once."""
    found = (
        fact for row in OPERATIONS.values() for fact in (*row.gives, *row.ends, *(need.fact for need in row.needs))
    )
    return tuple(dict.fromkeys(found))


def operation_of(name: str) -> Operation:
    """Return the row of an instruction. Raises ConfigError for a name that none has."""
    found = OPERATIONS.get(name)
    if found is None:
        raise ConfigError(f"{name!r} is not an instruction; there are {', '.join(OPERATIONS)}")
    return found
