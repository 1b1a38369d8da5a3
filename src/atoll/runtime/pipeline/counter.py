"""The program counter of a rank, and the one place where something else than the program moves it: a model's forward.

The forward of a stage is the model's own. It calls its blocks one after the other, and each call comes here, where the
program is executed up to that block. A stage of three blocks that are gathered and freed one by one (docs/program.md);
time runs down, and each instruction is in the column of the code that executes it:

    at   advance        forward             the model's forward   block_forward
     4   GATHER 1
     5   0F0.0 ...... > enters the model
                        .                   calls block 0 ...... > 0F0.0
     6                  .                   .                      FREE 0      neither computes nor waits: before the
                        .                   operations between     <.......... call returns, so that the model may
                        .                   its blocks                         use the memory
     7                  .                   calls block 1 ...... > WHOLE 1     all that precedes 0F0.1, with a wait,
     8                  .                   .                      GATHER 2
     9                  .                   .                      0F0.1       then the block,
    10                  .                   .                      FREE 1      then what begins after it
    11                  .                   calls block 2 ...... > WHOLE 2
    12                  .                   .                      GATHER 0
    13                  .                   .                      0F0.2
    14                  .                   returns                FREE 2
         < ............ returns
    15   0FINISH_F0

`at` is the index of the next instruction. Whoever executes an instruction adds one before it calls it.

If the model skips block 1, the call of block 2 executes 7, 8 and 10 to 12, and leaves out 9: all ranks issue the same
collectives, whichever blocks they run. If it skips block 2, `advance` executes 11 to 14 after `forward`. A backward
needs none of this: each block has a graph of its own, so `advance` calls its I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from atoll.base.errors import RunError
from atoll.base.faults import NonFinite
from atoll.plans.ir import Action, Op
from atoll.program import Do, Instruction, Part
from atoll.runtime.models.operations import nested_tensors
from atoll.runtime.page import AT
from atoll.runtime.pipeline.block import BlockArguments, BlockDraw, LocalBlock
from atoll.runtime.pipeline.clock import ProgramClock
from atoll.runtime.pipeline.microbatches import Microbatches, StageMicrobatch

Forwards = Mapping[StageMicrobatch, Mapping[int, int]]
"""The position of each block's forward, by stage and microbatch."""


class ProgramCounter:
    """Where a rank is in its program, and what moves it.

    place: numbers of the process's page; `place[AT]` is the instruction in progress, `at` the next one.
    seed: of the model's random numbers.
    """

    def __init__(self, microbatches: Microbatches, place: memoryview[int], *, seed: int) -> None:
        self._microbatches = microbatches
        self._blocks = [block for stage in microbatches.stages.values() for block in stage.blocks]
        self._place = place
        self._seed = seed
        self._part = None if microbatches.sequences is None else microbatches.sequences.part
        # Of the running program. A step that begins again replaces the next three outside of any forward, so
        # `block_forward` can keep them in local names.
        self.calls: Sequence[Callable[[], None]] = ()
        self.instructions: Sequence[Instruction] = ()
        self._forwards: Forwards = {}
        self.timing: ProgramClock | None = None  # the program's, if each instruction is timed
        self.step, self.first_microbatch = 0, 0  # from 0; the global number of microbatch 0
        self.at = 0  # no other thread reads it
        # The action in progress. A model's call of a block says neither its stage nor its microbatch: it is this one's.
        self.action = Action(-1, Op.F, -1)

    def load(
        self, calls: Sequence[Callable[[], None]], instructions: Sequence[Instruction], forwards: Forwards
    ) -> None:
        """Set the program. `at` stays: a step that takes another ending has executed the part that both have."""
        self.calls, self.instructions, self._forwards = calls, instructions, forwards

    def advance(self, part: Part) -> None:
        """Execute the instructions of a part, as far as the model's forward does not when it calls its blocks."""
        self.action, stop, place = part.action, part.stop, self._place
        self._microbatches.enter(part.action.microbatch)
        while self.at < stop:
            at = place[AT] = self.at
            # Set before the call: the forward of a stage continues from here, and advances it further.
            self.at = at + 1
            self.calls[at]()

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Context in which blocks that the model calls come here. Outside it they run by themselves."""
        for block in self._blocks:
            block.hand_to(self.block_forward)
        try:
            yield
        finally:
            self._place[AT] = -1  # also after an error: this rank no longer is at an instruction
            for block in self._blocks:
                block.hand_to(None)

    def forward(self, stage: int, microbatch: int) -> None:
        """Run the model's own forward of a stage, in which its blocks call `block_forward`."""
        state, at = self._microbatches.state, self._microbatches.stages[stage]
        key = stage, microbatch
        first = self.at - 1
        self.at = first  # the next instruction is the first block's forward, executed when the model calls it
        hidden = state.inputs.get(key)
        self._microbatches.look(NonFinite.INPUT, [hidden], at.run.start, microbatch=microbatch)
        state.outputs[key] = at.forward(hidden, state.batches[microbatch])
        # A model that called none of its blocks has moved nothing: `advance` would run this forward again, for ever.
        self.at = max(self.at, first + 1)

    def block_forward(self, block: LocalBlock, given: BlockArguments) -> Any:
        """Run a block's forward when the model calls it: execute the instructions before it, the block, and what starts
        directly after it. Blocks that the model skips are passed over, and so communicate as on all other ranks."""
        action = self.action  # a recomputed forward does not get here: it runs inside the block's I, past this handler
        microbatch = action.microbatch or 0
        key = action.stage, microbatch
        at = self._forwards[key].get(block.index, -1)
        if at < self.at:
            raise RunError(
                f"action {action} has run past block {block.index} ({type(block.module).__name__}); a model's forward "
                "calls each of its blocks at most once, in their order"
            )
        calls, instructions, place = self.calls, self.instructions, self._place
        while self.at < at:
            nth = place[AT] = self.at
            self.at = nth + 1
            # An F here is of a block that the model skips. If it is the stage's first, its call is `forward`, and would
            # enter the model a second time.
            if instructions[nth].do is not Do.F:
                calls[nth]()
        place[AT] = at
        self.at = at + 1
        timing = self.timing
        start = 0.0 if timing is None else timing.now()
        own = self._part
        whole, nth = (microbatch, 0) if own is None else (own.microbatch, own.number)
        draw = BlockDraw(self._seed, self.step, self.first_microbatch + whole, part=nth)
        kept, passages = self._microbatches.kept, self._microbatches.state.passages
        if kept is None or (block.index, microbatch) not in kept.chosen:
            output, passage = block.forward(given, draw)
        else:
            with kept.saving(block.index, microbatch):
                output, passage = block.forward(given, draw)
            before = passages.get(key, {}).get(block.index - 1)
            kept.keep(block.index, microbatch, passage, given=given, before=before)
        if timing is not None:
            timing.took(instructions[at], start)
        if self._microbatches.probe is not None:
            self._microbatches.look(NonFinite.OUTPUT, nested_tensors(output), block.index, microbatch=microbatch)
        # Here and not at the next call of a block: what the model computes in between can use the freed memory, and
        # hides the next gather. It ends inside the program, whose last instruction is DRAIN or of the step's end.
        while instructions[self.at].do.begins:
            nth = place[AT] = self.at
            self.at = nth + 1
            calls[nth]()
        place[AT] = at  # operations of the model between its blocks belong to the forward
        if passage is not None:
            passages.setdefault(key, {})[block.index] = passage
        return output


def skip() -> None:
    """The call of a block's forward that the model's forward did not make."""
