"""One step of one rank: an op, a stage, a microbatch. Written in the notation of torch.distributed.pipelining."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from atoll.base.errors import ScheduleError


class Op(StrEnum):
    """The kind of an action. `code` is its index in this enum, for flat arrays.

    2F0       stage 2 runs forward on microbatch 0
    2I0       backward for the input          2W0       backward for the weights
    2B0       both in one
    2SEND_F0  stage 2 sends its output to the rank of stage 3         3RECV_F0  stage 3 receives its input
    3SEND_B0  stage 3 sends its input's gradient to stage 2           2RECV_B0  stage 2 receives its output's gradient
    2UNSHARD  opens the stage's parameters    2RESHARD  frees those that are still gathered
    2REDUCE_GRAD  flushes the gradients that have not been reduced

    If the vocabulary is split over the ranks, each has a slice of embedding and head, named by its first stage:

    2L0       looks up microbatch 0 in the slice              2SEND_L0  sends the rows to the rank of stage 0
    2S0       scores the last stage's output by the slice     2SEND_S0  sends the scores to the last stage's rank
    2T0       backward for the slice of the head              2G0       backward for the slice of the embedding
    2RECV_S0, 2RECV_T0 and 2RECV_G0 receive the inputs of these three. Stage 0 sends its input's gradient to all slices
    (0SEND_B0) and receives the rows that they looked up (0RECV_F0). The last stage, say 3, sends its output (3SEND_F0),
    receives the scores (3RECV_B0), which give the loss and the gradient, and sends the inputs of T (3SEND_T0).

    STEP is not part of a schedule: programs end with it (see `atoll.program`), named by the first stage of their rank.
    """

    code: int

    F = "F"
    I = "I"  # noqa: E741  (torch's name for it)
    W = "W"
    B = "B"
    L = "L"
    S = "S"
    T = "T"
    G = "G"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    SEND_L = "SEND_L"
    SEND_S = "SEND_S"
    RECV_S = "RECV_S"
    SEND_T = "SEND_T"
    RECV_T = "RECV_T"
    RECV_G = "RECV_G"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    STEP = "STEP"

    def __init__(self, value: str) -> None:
        self.code = len(type(self)._member_map_)

    # Enum's own hash is a Python function; schedules have hundreds of thousands of actions.
    __hash__ = str.__hash__

    @property
    def is_compute(self) -> bool:
        """True for F, I, W or B, and L, S, T or G."""
        return self.code < COMPUTE_CODES

    @property
    def is_of_slice(self) -> bool:
        """True for actions of a vocabulary slice, which have the first stage of its rank."""
        return self in _OF_SLICE

    @property
    def is_message(self) -> bool:
        """True for sends and receives."""
        return COMPUTE_CODES <= self.code < MICROBATCH_CODES

    @property
    def has_microbatch(self) -> bool:
        """True for compute and messages."""
        return self.code < MICROBATCH_CODES

    @property
    def is_sharding(self) -> bool:
        """True for UNSHARD, RESHARD or REDUCE_GRAD: actions of a stage, without a microbatch."""
        return MICROBATCH_CODES <= self.code < SCHEDULE_CODES


COMPUTE_CODES = 8
"""Codes below this are compute actions."""

MICROBATCH_CODES = 18
"""Codes below this have a microbatch."""

SCHEDULE_CODES = 21
"""Codes below this are actions of schedules."""

VOCABULARY = (Op.L, Op.S, Op.T, Op.G)
COMPUTE = (Op.F, Op.I, Op.W, Op.B, *VOCABULARY)
VOCABULARY_MESSAGES = (Op.SEND_L, Op.SEND_S, Op.RECV_S, Op.SEND_T, Op.RECV_T, Op.RECV_G)
MESSAGES = (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B, *VOCABULARY_MESSAGES)
SHARDING = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)

_OF_SLICE = frozenset({*VOCABULARY, *VOCABULARY_MESSAGES} - {Op.SEND_T})

_NOTATION = re.compile(r"(\d{1,7})([A-Z_]+?)(\d{0,7})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank. `microbatch` is None for STEP and the sharding ops, and a number for all others."""

    stage: int
    op: Op
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse `"2SEND_F0"` to Action(2, Op.SEND_F, 0). Raises ScheduleError for text that is not an action."""
        match = _NOTATION.fullmatch(text.strip())
        if match is None or match[2] not in Op.__members__:
            raise ScheduleError(
                f"{text.strip()!r} is not an action: write a stage, an op ({', '.join(Op)}) and a microbatch, as in 2F0"
            )
        op = Op(match[2])
        if op.has_microbatch != bool(match[3]):
            wanted = "a microbatch" if op.has_microbatch else "no microbatch"
            raise ScheduleError(f"{text.strip()!r} is not an action: {op} takes {wanted}, as in {_example(op)}")
        return cls(int(match[1]), op, int(match[3]) if match[3] else None)


def _example(op: Op) -> str:
    return str(Action(2, op, 0 if op.has_microbatch else None))
