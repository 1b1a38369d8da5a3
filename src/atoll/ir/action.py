"""One step of one rank: an op, a stage, a microbatch. Written as torch.distributed.pipelining writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from atoll.errors import ScheduleError


class Op(StrEnum):
    """What an action does. `code` is its place in this list, for flat arrays.

    2F0       stage 2 runs forward on microbatch 0
    2I0       backward for the input          2W0       backward for the weights
    2B0       both in one
    2SEND_F0  stage 2 sends its output to the rank of stage 3         3RECV_F0  stage 3 receives its input
    3SEND_B0  stage 3 sends its input's gradient to stage 2           2RECV_B0  stage 2 receives its output's gradient
    2UNSHARD  opens the stage's parameters    2RESHARD  frees what is still whole
    2REDUCE_GRAD  flushes the gradients that have not been reduced
    """

    code: int

    F = "F"
    I = "I"  # noqa: E741  (torch's name for it)
    W = "W"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"

    def __init__(self, value: str) -> None:
        self.code = len(type(self)._member_map_)

    # Enum's own hash is a Python function; schedules have hundreds of thousands of actions.
    __hash__ = str.__hash__

    @property
    def is_compute(self) -> bool:
        """F, I, W or B."""
        return self.code < COMPUTE_CODES

    @property
    def is_message(self) -> bool:
        """A send or a receive."""
        return COMPUTE_CODES <= self.code < MICROBATCH_CODES

    @property
    def is_sharding(self) -> bool:
        """UNSHARD, RESHARD or REDUCE_GRAD: actions of a stage, without a microbatch."""
        return self.code >= MICROBATCH_CODES


COMPUTE_CODES = 4
"""Codes below it are compute."""

MICROBATCH_CODES = 8
"""Codes below it carry a microbatch."""

COMPUTE = (Op.F, Op.I, Op.W, Op.B)
MESSAGES = (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B)
SHARDING = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)

_NOTATION = re.compile(r"(\d+)([A-Z_]+?)(\d*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank. `microbatch` is None for the sharding ops and a number for all others."""

    stage: int
    op: Op
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """`"2SEND_F0"` -> Action(2, Op.SEND_F, 0). Raises ScheduleError for what is not an action."""
        match = _NOTATION.fullmatch(text.strip())
        if match is None or match[2] not in Op.__members__:
            raise ScheduleError(
                f"{text.strip()!r} is not an action: write a stage, an op ({', '.join(Op)}) and a microbatch, as in 2F0"
            )
        op = Op(match[2])
        if op.is_sharding == bool(match[3]):
            wanted = "no microbatch" if op.is_sharding else "a microbatch"
            raise ScheduleError(f"{text.strip()!r} is not an action: {op} takes {wanted}, as in {_example(op)}")
        return cls(int(match[1]), op, int(match[3]) if match[3] else None)


def _example(op: Op) -> str:
    return str(Action(2, op, None if op.is_sharding else 0))
