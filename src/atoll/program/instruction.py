"""One instruction of a program: what to do, with which block or unit, and for which action of the schedule."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple

from atoll.ir import Action

Phase = Literal["I", "W"]
"""The phase of a backward that computes a gradient: with the input's (I), or with the weights' (W)."""


class Lane(StrEnum):
    """The resource that an instruction uses: the device, the pipeline links or the data-parallel links."""

    COMPUTE = "compute"
    PIPELINE = "pipeline"
    DATA = "data"


class Do(StrEnum):
    """The operation of an instruction. F and I act on a block; W, and everything from GATHER on, on a unit.

    F         the forward of a block                   FINISH_F  the loss, or what the next stage is given
    START_I   the loss's backward, or the gradient that was received
    I         the backward of a block                  FINISH_I  the gradient for the previous stage
    W         the weights' gradients of a unit         FINISH_W  releases the microbatch's received buffers
    L S T G   of a slice of the vocabulary, as in `atoll.ir.Op`

    SEND_x    sends                                    POST_x    begins to receive
    RECV_x    waits for what was posted

    GATHER    begins to gather a unit's parameters     WHOLE     waits for that, or for RETURN
    FETCH     gathers them, and waits                  FREE      frees the whole copy

    REDUCE    begins to reduce a phase's gradients     REDUCED   waits for that: their whole buffer is freed
    SYNC      begins to bring a phase's gradients to the optimizer's level

    DRAIN     releases all microbatches, after the last send

    The step's end, of a unit:
    SYNCED    waits for SYNC, and for RETURN if the step did not use the parameters
    UNSCALE   divides the gradients by the loss scale   COPIES   sums them over the ranks that share the unit
    AHEAD     steps it ahead of the verdict, then as RETURN
    COLLECT   begins to send slices of its matrices to their owners, if the optimizer transforms them whole
    TRANSFORM transforms those that this rank owns, and begins to send back slices of the result
    UPDATE    waits for these, and updates the matrices
    RETURN    begins to send the updated parameters to where they are stored

    and of all:
    QUIET     waits until no other rank reads this one's gradients in place
    SUMS      adds up loss, norm and which parameters have gradients, over the ranks of a stage
    CORRECT   steps units again whose parameters have gradients where none had been expected, or none
    JOIN      adds the sums of the pipeline ranks before       PASS     gives them to the next one
    TOTAL     begins to add up the sums of all ranks
    VERDICT   waits for that, or for the sums passed back along the pipeline: the step is taken, clipped or refused
    STEP      steps the optimizer for good
    TAKE_BACK begins the program again if a step ahead was wrong
    """

    F = "F"
    FINISH_F = "FINISH_F"
    START_I = "START_I"
    I = "I"  # noqa: E741  (the field's name for it)
    FINISH_I = "FINISH_I"
    W = "W"
    FINISH_W = "FINISH_W"
    L = "L"
    S = "S"
    T = "T"
    G = "G"
    SEND_F = "SEND_F"
    SEND_B = "SEND_B"
    SEND_L = "SEND_L"
    SEND_S = "SEND_S"
    SEND_T = "SEND_T"
    POST_F = "POST_F"
    POST_B = "POST_B"
    POST_S = "POST_S"
    POST_T = "POST_T"
    POST_G = "POST_G"
    RECV_F = "RECV_F"
    RECV_B = "RECV_B"
    RECV_S = "RECV_S"
    RECV_T = "RECV_T"
    RECV_G = "RECV_G"
    GATHER = "GATHER"
    WHOLE = "WHOLE"
    FETCH = "FETCH"
    FREE = "FREE"
    REDUCE = "REDUCE"
    REDUCED = "REDUCED"
    SYNC = "SYNC"
    DRAIN = "DRAIN"
    SYNCED = "SYNCED"
    UNSCALE = "UNSCALE"
    COPIES = "COPIES"
    AHEAD = "AHEAD"
    COLLECT = "COLLECT"
    TRANSFORM = "TRANSFORM"
    UPDATE = "UPDATE"
    RETURN = "RETURN"
    QUIET = "QUIET"
    SUMS = "SUMS"
    CORRECT = "CORRECT"
    JOIN = "JOIN"
    PASS = "PASS"
    TOTAL = "TOTAL"
    VERDICT = "VERDICT"
    STEP = "STEP"
    TAKE_BACK = "TAKE_BACK"

    # Enum's own hash is a Python function; programs have hundreds of thousands of instructions.
    __hash__ = str.__hash__

    @property
    def lane(self) -> Lane:
        """The resource that the instruction uses."""
        return _LANES.get(self, Lane.COMPUTE)

    @property
    def has_phase(self) -> bool:
        """True for instructions that handle the gradients of one phase of the backward, I or W."""
        return self in (Do.REDUCE, Do.REDUCED, Do.SYNC)

    @property
    def waits(self) -> bool:
        """True for instructions that can block: on a message, on a collective or on other ranks."""
        return self in _WAITS

    @property
    def is_of_block(self) -> bool:
        """True if `Instruction.of` is the index of a block."""
        return self in (Do.F, Do.I)

    @property
    def is_of_unit(self) -> bool:
        """True if `Instruction.of` is the index of a unit."""
        return self in _OF_UNIT


_LANES = {
    **dict.fromkeys((do for do in Do if do.startswith(("SEND_", "POST_", "RECV_"))), Lane.PIPELINE),
    **dict.fromkeys((Do.DRAIN, Do.COPIES, Do.JOIN, Do.PASS, Do.TOTAL, Do.VERDICT), Lane.PIPELINE),
    **dict.fromkeys((Do.GATHER, Do.WHOLE, Do.FETCH, Do.REDUCE, Do.REDUCED, Do.SYNC), Lane.DATA),
    **dict.fromkeys((Do.SYNCED, Do.COLLECT, Do.UPDATE, Do.RETURN, Do.QUIET, Do.SUMS), Lane.DATA),
}

_OF_UNIT = frozenset(
    {Do.W, Do.GATHER, Do.WHOLE, Do.FETCH, Do.FREE, Do.REDUCE, Do.REDUCED, Do.SYNC}
    | {Do.SYNCED, Do.UNSCALE, Do.COPIES, Do.AHEAD, Do.COLLECT, Do.TRANSFORM, Do.UPDATE, Do.RETURN}
)

_OF_STEP = frozenset({
    Do.DRAIN, Do.QUIET, Do.SUMS, Do.CORRECT, Do.JOIN, Do.PASS, Do.TOTAL, Do.VERDICT, Do.STEP, Do.TAKE_BACK,
})  # fmt: skip

_WAITS = frozenset({
    *(do for do in Do if do.startswith("RECV_")),
    Do.WHOLE, Do.FETCH, Do.REDUCED, Do.SYNCED, Do.COPIES, Do.UPDATE, Do.QUIET, Do.SUMS, Do.JOIN, Do.VERDICT,
})  # fmt: skip

BEGINS = frozenset({Do.GATHER, Do.FREE, Do.REDUCE, Do.SYNC})
"""Instructions that neither compute nor wait. Those after a block's forward are executed before control returns to
the model."""


class Instruction(NamedTuple):
    """One instruction. action: the schedule's action that it belongs to.  of: a block or a unit; -1 for neither."""

    do: Do
    action: Action
    of: int = -1
    phase: Phase | None = None

    def __str__(self) -> str:
        """`0F2.5`: block 5 in the forward of microbatch 2 on stage 0. `GATHER 5` and `REDUCE 5 W` are of unit 5."""
        do, action, of = self.do, self.action, self.of
        if do.is_of_block:
            return f"{action.stage}{do}{action.microbatch}.{of}"
        if do is Do.W:
            return f"{action.stage}{do}{action.microbatch}.u{of}"
        if do.is_of_unit:
            return f"{do} {of}" + (f" {self.phase}" if self.phase else "")
        if do in _OF_STEP:
            return str(do)
        return f"{action.stage}{do}{action.microbatch}"
