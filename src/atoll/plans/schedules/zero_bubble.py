"""ZB-H1 and ZB-H2: 1F1B with a split backward, W when ranks would idle. Qi et al., arXiv 2401.10241."""

from __future__ import annotations

from atoll.plans.ir.action import Action, Op
from atoll.plans.ir.placement import Placement
from atoll.plans.ir.schedule import Schedule
from atoll.plans.slices import backward_numbers


def zero_bubble_h1(*, ranks: int, microbatches: int, slices: int = 1) -> Schedule:
    """1F1B's warm-up of p-r-1 forwards; rank r postpones its W until r of them are pending.

    No rank keeps more than p microbatches between F and W.

        rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    With n slices of each sequence the warm-up is n-1 longer, and no rank keeps more than p-1+n slices.

        rank 0  F0.0 F0.1 F1.0 F1.1 .    .    I0.1 W0.1 F2.0 I0.0 W0.0 F2.1 I1.1 W1.1 I1.0 W1.0 I2.1 W2.1 I2.0 W2.0
        rank 1  .    F0.0 F0.1 F1.0 .    I0.1 F1.1 I0.0 W0.1 F2.0 I1.1 W0.0 F2.1 I1.0 W1.1 I2.1 W1.0 I2.0 W2.1 W2.0
        rank 2  .    .    F0.0 F0.1 I0.1 F1.0 I0.0 F1.1 I1.1 W0.1 F2.0 I1.0 W0.0 F2.1 I2.1 W1.1 I2.0 W1.0 W2.1 W2.0
    """
    return _zero_bubble("zb-h1", 1, ranks, microbatches, slices)


def zero_bubble_h2(*, ranks: int, microbatches: int) -> Schedule:
    """Twice the warm-up, 2(p-r-1) forwards: no rank waits for a gradient; rank r has up to 2r W pending.

    No rank keeps more than 2p-1 microbatches between F and W. Ranks end one after the other as they began: the gain is
    in the span, and shortens the step if steps overlap.

        rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
        rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    """
    return _zero_bubble("zb-h2", 2, ranks, microbatches)


def _zero_bubble(name: str, depth: int, ranks: int, microbatches: int, slices: int = 1) -> Schedule:
    """A rank has depth * (p-r-1) forwards of warm-up, and one more for each slice of a sequence after the first.

    A W follows an I once warm-up + the number of I before that one reach those of rank 0: counting that I too gives
    0.1397 instead of the paper's 0.1323. W take the order of I.
    """
    count, backwards = microbatches * slices, backward_numbers(microbatches, slices)
    rows = []
    for stage in range(ranks):
        warm_up = min(count, depth * (ranks - 1 - stage) + slices - 1)
        row = [Action(stage, Op.F, number) for number in range(warm_up)]
        weights = 0
        for step, number in enumerate(backwards):
            if warm_up + step < count:
                row.append(Action(stage, Op.F, warm_up + step))
            row.append(Action(stage, Op.I, number))
            if warm_up + step >= depth * (ranks - 1) + slices - 1:
                row.append(Action(stage, Op.W, backwards[weights]))
                weights += 1
        row += [Action(stage, Op.W, number) for number in backwards[weights:]]
        rows.append(tuple(row))
    return Schedule(name, Placement("line", ranks), count, tuple(rows), slices)
