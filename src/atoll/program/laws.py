"""Invariants of programs, checked whenever a program is built.

parameters   a unit is whole whenever it is used; each gather is started once and waited for; whole units are freed
budget       gathers in flight stay within the limit
gradients    gradients are reduced before their sync, and none is computed after it; reductions are waited for in the
             order in which they were started, and the step's end waits for the last ones
messages     receives are posted once, in the order in which they are waited for
the end      each phase of each unit is synced, and waited for before the sums; the optimizer steps on a verdict, which
             waits for sums; matrices are collected, transformed and updated in this order; what it wrote goes back, and
             nothing follows that reads or makes a gradient
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from atoll.errors import ScheduleError
from atoll.program.instruction import Do, Instruction, Phase
from atoll.program.shape import RankShape

SHOWN = 3
"""Number of instructions around a wrong one, and of wrong ones, in an error."""


def check(instructions: Sequence[Instruction], shape: RankShape) -> None:
    """Raise ScheduleError if a program violates laws, with the instructions around each violation."""
    wrong = _broken(instructions, shape)
    if wrong:
        shown = "\n".join(f"{problem}:\n{_around(instructions, at)}" for at, problem in wrong[:SHOWN])
        more = f"\nand {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ScheduleError(f"a program of {len(instructions)} instructions breaks its laws\n{shown}{more}")


def _around(instructions: Sequence[Instruction], at: int) -> str:
    """Return a piece of a program with the instruction at `at` marked."""
    first = max(0, at - SHOWN)
    piece = enumerate(instructions[first : at + SHOWN + 1], first)
    return "\n".join(f"  {'>' if here == at else ' '} {here:6} {each}" for here, each in piece)


def _broken(instructions: Sequence[Instruction], shape: RankShape) -> list[tuple[int, str]]:
    units, gathered = shape.units, {index for index, unit in shape.units.items() if unit.whole}
    reads = {block: [u for u in own if u in gathered] for block, own in shape.units_of.items()}
    slices = {Do.L: shape.embedding, Do.S: shape.head, Do.T: shape.head, Do.G: shape.embedding}
    most_ahead = max(shape.limit, shape.most_asked)
    whole: set[int] = set()
    coming: dict[int, int] = {}
    posted: deque[Instruction] = deque()
    reducing: deque[tuple[int, Phase | None]] = deque()
    made: set[tuple[int, Phase]] = set()
    synced: set[tuple[int, Phase]] = set()
    wrong: list[tuple[int, str]] = []
    for at, step in enumerate(instructions):
        do, action, index, phase = step
        if do is Do.F or do is Do.I:
            wrong += [(at, f"unit {unit} is used before it is whole") for unit in reads[index] if unit not in whole]
            if do is Do.I:
                made.update((unit, "I") for unit in shape.units_of[index] if units[unit].flows.get("I"))
                late = [unit for unit in shape.units_of[index] if (unit, "I") in synced]
                wrong += [(at, f"a gradient of unit {unit} is made after its sync") for unit in late]
        elif do is Do.W:
            if units[index].flows.get("W"):
                made.add((index, "W"))
            if (index, "W") in synced:
                wrong.append((at, f"a gradient of unit {index} is made after its sync"))
        elif do is Do.L or do is Do.S or do is Do.T or do is Do.G:
            unit_of = slices[do]
            assert unit_of is not None, "slices are split where they are worked on"
            if do is Do.L or do is Do.S:
                if unit_of in gathered and unit_of not in whole:
                    wrong.append((at, f"unit {unit_of} is used before it is whole"))
            elif units[unit_of].flows.get("W"):
                made.add((unit_of, "W"))
        elif do is Do.GATHER:
            if index in whole or index in coming:
                wrong.append((at, f"unit {index} is gathered twice"))
            coming[index] = units[index].ahead
            if sum(coming.values()) > most_ahead:
                wrong.append((at, f"{sum(coming.values())} bytes are on their way, and {most_ahead} may be"))
        elif do is Do.WHOLE or do is Do.FETCH:
            if index in gathered:
                is_right = index not in whole and (index in coming) == (do is Do.WHOLE)
                if not is_right:
                    wrong.append((at, f"unit {index} is waited for, and nothing was begun, or it is there"))
                coming.pop(index, None)
                whole.add(index)
        elif do is Do.FREE:
            if index not in whole:
                wrong.append((at, f"unit {index} is freed, and is not whole"))
            whole.discard(index)
        elif do is Do.REDUCE and phase is not None:
            made.discard((index, phase))
            reducing.append((index, phase))
            if (index, phase) in synced:
                wrong.append((at, f"unit {index} is reduced after its sync"))
            if len(reducing) > shape.behind + 1:
                wrong.append((at, f"{len(reducing)} reductions are under way, and {shape.behind} may be"))
        elif do is Do.REDUCED:
            if not reducing or reducing.popleft() != (index, phase):
                wrong.append((at, f"unit {index} is waited for before what was reduced earlier"))
        elif do is Do.SYNC and phase is not None:
            if (index, phase) in synced or (index, phase) in made:
                wrong.append((at, f"unit {index} is synced twice, or before it is reduced"))
            synced.add((index, phase))
        elif do.startswith("POST_"):
            posted.append(step)
        elif do.startswith("RECV_"):
            first = posted.popleft() if posted else None
            if first is None or first.action != action or first.do[5:] != do[5:]:
                wrong.append((at, f"{step} is waited for in another order than it was posted"))
    end = len(instructions) - 1
    wrong += [(end, f"unit {unit} is still whole") for unit in sorted(whole)]
    wrong += [(end, f"unit {unit} is gathered and not used") for unit in sorted(coming)]
    wrong += _badly_ended(instructions, shape, synced)
    left = [key for key in sorted(made) if units[key[0]].flows.get(key[1]) and not units[key[0]].is_left_alone]
    wrong += [(end, f"the gradients of unit {unit} in phase {phase} are not reduced") for unit, phase in left]
    wrong += [(end, f"{each} is not waited for") for each in posted]
    return wrong


_WORK = frozenset({Do.F, Do.I, Do.W, Do.L, Do.S, Do.T, Do.G, Do.REDUCE})


def _badly_ended(
    instructions: Sequence[Instruction], shape: RankShape, synced: Collection[tuple[int, Phase]]
) -> Iterator[tuple[int, str]]:
    """Yield violations in the end of the step (DRAIN and later), and in the verdict on the previous step."""
    end = len(instructions) - 1
    drain = next((at for at, each in enumerate(instructions) if each.do is Do.DRAIN), None)
    if drain is None:
        yield end, "what was sent is not drained"
        return
    before = [each.do for each in instructions[:drain] if each.do in _VERDICT]
    if before and tuple(before) != _VERDICT:
        yield drain, "a verdict is waited for, then made good, then perhaps taken back"
    if drain == end:
        if before:
            yield end, "a step is settled in a program that takes none"
        return
    arrived: set[int] = set()
    done: set[Do] = set()
    exchanged: dict[int, Do] = {}
    for at, (do, _, index, _) in enumerate(instructions[drain:], drain):
        if do in _WORK:
            yield at, "microbatches are over"
        elif do is Do.SYNCED:
            missing = [phase for phase in shape.units[index].flows if (index, phase) not in synced]
            if missing or index in arrived:
                yield at, f"unit {index} is waited for twice, or was not synced"
            arrived.add(index)
        elif (do is Do.COPIES or do is Do.UNSCALE) and Do.QUIET not in done:
            yield at, f"the gradients of unit {index} are written while others may read them"
        elif do is Do.COLLECT or do is Do.TRANSFORM or do is Do.UPDATE:
            if exchanged.get(index) is not _BEFORE[do]:
                yield at, f"the matrices of unit {index} come to {do} in another order than they are exchanged in"
            if do is Do.COLLECT and Do.STEP not in done and index not in arrived:
                yield at, f"unit {index} is collected before its gradients are there"
            exchanged[index] = do
        elif (do is Do.AHEAD or do is Do.RETURN) and shape.units[index].matrices and exchanged.get(index) != Do.UPDATE:
            yield at, f"unit {index} goes back before its matrices are updated"
        elif do is Do.AHEAD and index not in arrived:
            yield at, f"unit {index} is stepped before its gradients are there"
        elif do is Do.SUMS and len(arrived) < len(shape.units):
            yield at, f"{len(shape.units) - len(arrived)} units are missing in the sums"
        elif do in _NEEDS and _NEEDS[do] not in done:
            yield at, f"{do} comes before {_NEEDS[do]}"
        done.add(do)
    if not before and Do.STEP not in done:
        yield end, "the optimizer does not step"
    if before and Do.AHEAD not in done and shape.units:
        yield end, "nothing is stepped ahead"


_BEFORE = {Do.COLLECT: None, Do.TRANSFORM: Do.COLLECT, Do.UPDATE: Do.TRANSFORM}
_VERDICT = (Do.VERDICT, Do.STEP, Do.TAKE_BACK)
_NEEDS = {
    Do.TOTAL: Do.SUMS,
    Do.JOIN: Do.SUMS,
    Do.PASS: Do.SUMS,
    Do.CORRECT: Do.SUMS,
    Do.VERDICT: Do.TOTAL,
    Do.STEP: Do.VERDICT,
    Do.RETURN: Do.STEP,
}
