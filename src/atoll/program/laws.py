"""Laws of programs, checked whenever a program is built: what an instruction needs holds before it, no more holds at
once than may, and nothing is left over at the end. The rows of `atoll.program.table` say what.

parameters   a unit is unsharded whenever it is used; each gather is begun once and waited for; units are freed
budget       gathers in flight stay within the limit
gradients    gradients are reduced before their sync, and none is computed after it; reductions are waited for in the
             order in which they were started, and the step's end waits for the last ones
host memory  what a block keeps for its backward is back whenever that reads it: it has left before it comes, and has
             come before it is used; no more than `MOVING` blocks are on either way
messages     receives are posted once, in the order in which they are waited for
exchanges    the ranks that divide experts meet in each exchange of rows: an instruction that exchanges waits for
             nothing else, begins no transfer and sends no message, so an exchange cannot cross a message of the
             pipeline. That all of them have one order is checked when their programs are compared (`Program.digest`)
the end      each phase of each unit is synced, and waited for before the sums; the optimizer steps on a verdict, which
             waits for sums; matrices are collected, transformed and updated in this order; what it wrote goes back, and
             nothing follows that reads or makes a gradient
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from atoll.base.errors import ScheduleError
from atoll.program.fold import OF_STEP, FactKeys, Key, Resolved, is_of_units
from atoll.program.instruction import Instruction
from atoll.program.operation import Fact, Operation, Per, Phase, facts
from atoll.program.shape import RankShape
from atoll.program.traffic import exchanges_of

_SHOWN = 3
"""Number of instructions around a wrong one, and of wrong ones, in an error."""


def check_program(instructions: Sequence[Instruction], shape: RankShape) -> None:
    """Raise ScheduleError if a program violates laws, with the instructions around each violation."""
    wrong = _broken(instructions, shape)
    if wrong:
        shown = "\n".join(f"{problem}:\n{_around(instructions, at)}" for at, problem in wrong[:_SHOWN])
        more = f"\nand {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ScheduleError(f"a program of {len(instructions)} instructions breaks its laws\n{shown}{more}")


def _around(instructions: Sequence[Instruction], at: int) -> str:
    """Return a piece of a program with the instruction at `at` marked."""
    first = max(0, at - _SHOWN)
    piece = enumerate(instructions[first : at + _SHOWN + 1], first)
    return "\n".join(f"  {'>' if here == at else ' '} {here:6} {each}" for here, each in piece)


def _broken(instructions: Sequence[Instruction], shape: RankShape) -> list[tuple[int, str]]:
    state = _State(shape)
    known: dict[tuple[Operation, int, Phase | int | None], _Meaning] = {}
    # Where nothing leaves for host memory, a block's backward means the same for each microbatch.
    leaves = any(step.do.is_of_passage and step.do.moves for step in instructions)
    wrong: list[tuple[int, str]] = []
    for at, step in enumerate(instructions):
        do, action, of, phase = step
        if exchanges_of(step, shape) and (do.begins or do.sends or do.posts or do.receives or do.moves):
            wrong.append((at, f"{step} exchanges rows and has a transfer of its own"))
        same = do, of, action.microbatch if leaves and do.is_of_passage else phase
        meaning = known.get(same)
        if meaning is None:
            meaning = known[same] = state.meaning(step)
        for holding, key, holds, words in meaning.needs:
            if (key in holding) is not holds:
                wrong.append((at, _said(words, key, step)))
        for queue, about, words in meaning.first:
            own = about or (do.receives, action)
            if not queue or queue.pop(0)[0] != own:
                wrong.append((at, _said(words, about or OF_STEP, step)))
        for holding, key in meaning.ends:
            holding.pop(key, None)
        for queue, key in meaning.drops:
            queue[:] = [each for each in queue if each[0] != key]
        for holding, key in meaning.gives:
            holding[key] = step
        for queue, about in meaning.queues:
            queue.append((about or (do.posts, action), step))
        for fact in meaning.limited:
            wrong += ((at, words) for words in state.above(fact))
    return wrong + [(len(instructions) - 1, words) for words in state.left()]


def _said(words: str, key: Key, step: Instruction) -> str:
    return words.format(unit=key[0], phase=key[1], do=step and step.do, step=step)


_Holding = dict[Key, Instruction]
"""Facts of one kind that hold, by key, with the instruction that gave each."""

_Queue = list[tuple[Any, Instruction]]
"""The same in the order in which it began, of facts that end in it; a message's key is its kind and action."""


class _Meaning(NamedTuple):
    """A row on one block or unit, with the facts that it looks at and changes. A key of None is the message's."""

    needs: tuple[tuple[_Holding, Key, bool, str], ...]
    first: tuple[tuple[_Queue, Key | None, str], ...]
    ends: tuple[tuple[_Holding, Key], ...]
    drops: tuple[tuple[_Queue, Key], ...]
    gives: tuple[tuple[_Holding, Key], ...]
    queues: tuple[tuple[_Queue, Key | None], ...]
    limited: tuple[Fact, ...]


class _State:
    """The facts that hold at one point of a program."""

    def __init__(self, shape: RankShape) -> None:
        self._shape = shape
        self._facts = FactKeys(shape)
        self._holding: dict[Fact, _Holding] = {fact: {} for fact in facts() if not fact.is_in_order}
        self._queues: dict[Fact, _Queue] = {fact: [] for fact in facts() if fact.is_in_order}
        nothing: Any = None
        for fact in self._holding:
            if fact.holds_first:
                self._holding[fact][OF_STEP] = nothing

    def meaning(self, step: Instruction) -> _Meaning:
        """Resolve the row of an instruction."""
        resolved, row = Resolved.of(step, self._shape), step.do

        def keys(fact: Fact, *, of_all: bool = False) -> tuple[Any, ...]:
            if fact.per is Per.MESSAGE:
                return (None,)
            return tuple(resolved.keys(fact.per)) if of_all else self._facts.of(resolved, fact)

        return _Meaning(
            needs=tuple(
                (self._holding[need.fact], key, need.holds, need.words)
                for need in row.needs
                if not row.is_in_turn(need.fact)
                for key in keys(need.fact, of_all=need.of_all)
            ),
            first=tuple(
                (self._queues[need.fact], key, need.words)
                for need in row.needs
                if row.is_in_turn(need.fact)
                for key in keys(need.fact)
            ),
            ends=tuple((self._holding[fact], key) for fact in row.ends if not fact.is_in_order for key in keys(fact)),
            drops=tuple(
                (self._queues[fact], key)
                for fact in row.ends
                if fact.is_in_order and not row.is_in_turn(fact)
                for key in keys(fact)
            ),
            gives=tuple((self._holding[fact], key) for fact in row.gives if not fact.is_in_order for key in keys(fact)),
            queues=tuple((self._queues[fact], key) for fact in row.gives if fact.is_in_order for key in keys(fact)),
            limited=tuple(fact for fact in row.gives if fact.most is not None),
        )

    def above(self, fact: Fact) -> Iterator[str]:
        """Yield what is wrong if more of a fact holds than may."""
        keys = self._holding[fact] if fact in self._holding else [key for key, _ in self._queues[fact]]
        total = sum(fact.size(self._shape.units[unit]) for unit, _ in keys) if is_of_units(fact) else len(keys)
        most = total if fact.most is None else fact.most(self._shape)
        if total > most:
            yield fact.above.format(sum=total, most=most)

    def left(self) -> Iterator[str]:
        """Yield what is wrong after the last instruction."""
        for fact, holding in self._holding.items():
            if fact.left:
                for key in sorted(holding, key=str):
                    if not is_of_units(fact) or not fact.excused(self._shape.units[key[0]]):
                        yield _said(fact.left, key, holding[key])
        for fact, queue in self._queues.items():
            if fact.left:
                yield from (_said(fact.left, OF_STEP, step) for _, step in queue)
