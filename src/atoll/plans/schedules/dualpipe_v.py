"""DualPipeV: one forward and one backward at the same time, on a V. DeepSeek, github.com/deepseek-ai/DualPipe."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from atoll.base.errors import ConfigError
from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule


def dualpipe_v(*, ranks: int, microbatches: int) -> Schedule:
    """Forwards of one chunk next to full backwards of the other; the backward is split if a rank would wait.

    Rank r keeps at most p + 1/2 microbatches. Raises ConfigError for fewer than 2p-1 microbatches: the order has no
    steady phase then.

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 0F4 3B2 3F3 0B1 3B3 3F4 0B2 3B4 0I3 0W3 0I4 0W4
        rank 1  .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 1F4 2B2 2F4 1B2 2B3 1B3 2I4 1I4 2W4 1W4
    """
    if microbatches < 2 * ranks - 1:
        raise ConfigError(
            f"schedule 'dualpipe-v' needs at least 2p-1 = {2 * ranks - 1} microbatches for {ranks} ranks, not "
            f"{microbatches}: take more microbatches, or zb-v, which has the same placement and supports any number"
        )
    rows = tuple(tuple(_row(rank, ranks, microbatches)) for rank in range(ranks))
    return Schedule("dualpipe-v", Placement("v", ranks, 2), microbatches, rows)


def _row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Return the eight phases of a rank. Each kind of action takes the microbatches from 0 up; W in the order of the
    I."""
    stages = (rank, 2 * ranks - 1 - rank)
    forwards, backwards = (count(), count()), (count(), count())
    pending: list[Action] = []
    after = ranks - 1 - rank  # ranks closer to the turn of the V

    def forward(chunk: int) -> Action:
        return Action(stages[chunk], Op.F, next(forwards[chunk]))

    def backward(chunk: int, *, split: bool = False) -> Action:
        action = Action(stages[chunk], Op.I if split else Op.B, next(backwards[chunk]))
        if split:
            pending.append(Action(action.stage, Op.W, action.microbatch))
        return action

    for _ in range(2 * after):
        yield forward(0)
    for _ in range(rank + 1):
        yield forward(0)
        yield forward(1)
    for _ in range(after):
        yield backward(1, split=True)
        yield pending.pop(0)
        yield forward(1)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        yield forward(0)
        yield backward(1)
        yield forward(1)
        yield backward(0)
    for _ in range(after):
        yield backward(1)
        yield forward(1)
        yield backward(0)

    turn = (rank + 1) // 2  # from here on the weights' part is postponed, to fill the remaining gaps of the rank's step
    for number in range(rank + 1):
        yield backward(1, split=number > turn or (number == turn and rank % 2 == 1))
        yield backward(0, split=number >= turn)
    for _ in range(after):
        yield pending.pop(0)
        yield backward(0, split=True)
    yield from pending
