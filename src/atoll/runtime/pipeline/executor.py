"""Executes a rank's programs: a table instruction -> function.

The forward of a stage is the model's own. It calls its blocks one after the other, and each call comes here, where the
program is executed up to that block. The executor makes no decisions: all gathers, frees, reductions and sends of a
step are in its program.

A receive waits for its message and a compute instruction only computes, so the timeline shows which rank waited.

[Note: who moves the program counter] `_at` is the index of the next instruction. `_advance` moves it, except inside the
forward of a stage: there the model decides when a block runs, and each call of a block moves it. This is the forward of
docs/program.md, a stage of three blocks that are gathered and freed one by one:

    _at   instruction   executed by
      4   GATHER 1      _advance
      5   0F0.0         _advance -> _forward -> the model's forward -> block 0 -> _block_forward
      6   FREE 0          the same _block_forward, before it returns: FREE neither computes nor waits
                          operations of the model between its blocks
      7   WHOLE 1         the model calls block 1 -> _block_forward: all that precedes 0F0.1, here with a wait,
      8   GATHER 2
      9   0F0.1           then the block,
     10   FREE 1          then what begins after it
     11   WHOLE 2         the model calls block 2
     12   GATHER 0
     13   0F0.2
     14   FREE 2          the model returns to _forward, and that to _advance
     15   0FINISH_F0    _advance

If the model skips block 1, the call of block 2 executes 7, 8 and 10 to 12, and leaves out 9: all ranks issue the same
collectives, whichever blocks they run. If it skips block 2, `_advance` executes 11 to 14 after `_forward`. A backward
needs none of this: each block has a graph of its own, so `_advance` calls its I.

[Note: the host and the device] All calls are made by the thread that called `run`. On the CPU they compute; the lanes
have threads, and so has the outbox of sends. On CUDA with NCCL a call only launches: the host runs ahead, and an
instruction that waits makes the compute stream wait for an event. One step, with each instruction where the host
launches it, and the time in which its kernels run:

    host      F0 F1 .. I0 W0 .. SYNCED SUMS . . . . . . . . . . . . . TOTAL VERDICT STEP RETURN   F0 F1 ..
    compute      F0---- F1---- ..  I0---- W0---- ..            norms--                   STEP---         F0----
    data      GATHER-- GATHER-- ..     REDUCE-- REDUCE-- SYNC--                                 RETURN--

The host waits for the device where it reads a value: in SUMS, which needs the norms and so the whole backward; then for
the small sums of the ranks. Before SUMS it does so only for what is not known yet, such as the header of a new shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import takewhile
from typing import Any

import torch
from torch.profiler import record_function

from atoll.base._torch import is_profiling, local_part
from atoll.base.errors import AtollError, RunError
from atoll.base.faults import Made
from atoll.plans.ir import Action, Op
from atoll.program import (
    BACKWARD,
    Do,
    Ending,
    Instruction,
    Operation,
    Part,
    Partners,
    Phase,
    Program,
    RankShape,
    parts_of,
)
from atoll.program.table import OPERATIONS
from atoll.program.trace import Span
from atoll.runtime.failure import Doing
from atoll.runtime.lanes import Lane
from atoll.runtime.mail import Mail, Wire
from atoll.runtime.models import Batch, Loss
from atoll.runtime.models.adapter import sum_and_count
from atoll.runtime.outline import Outline
from atoll.runtime.page import AT, own_page, row_of
from atoll.runtime.pipeline.block import Arguments, Draw, LocalBlock, Passage, pass_on, tensors_of
from atoll.runtime.pipeline.clock import Clock, clock_of
from atoll.runtime.pipeline.deferred import Collector, Pending, compute_weights
from atoll.runtime.pipeline.probe import Probe
from atoll.runtime.pipeline.stage import Sharded
from atoll.runtime.pipeline.step_end import OF_ALL, OF_UNIT, StepEnd
from atoll.runtime.plays import PLAYS, check_complete, of_all, of_end, of_microbatch, of_phase, of_unit
from atoll.runtime.sharding.tensors import like_parameter, whole_output
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Transport
from atoll.runtime.vocabulary.split import SplitVocabulary

Key = tuple[int, int]
"""(stage, microbatch)"""

STEP_BITS = 32
"""Number of bits of an instruction's index in a rank's position (step, index) as one number."""

_UNNAMED: AbstractContextManager[None] = nullcontext()  # one for every action: a nullcontext can be entered again


@dataclass(slots=True)
class _Step:
    """State that is passed between the instructions of a step.

    passages: for a microbatch, the state of its blocks for their backward.
    received: buffers of a microbatch's activation and gradient, returned after W, which may read both.
    """

    batches: Sequence[Batch]
    is_training: bool
    keeps_logits: bool = False
    # Gradient of a microbatch's loss: loss scale / tokens. Backwards start with it, and it is no factor of the loss: in
    # a post-validated step, forwards run before the verdict on the step before, which may change the loss scale.
    # NaN until it is known, and without training: no backward reads it then.
    scale: float = math.nan
    # The leaf from which a stage's graph starts: from RECV_F, or from FINISH_F of the stage before if that is on this
    # rank. FINISH_I takes its gradient and releases it; without training FINISH_F does.
    inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    # What the model's forward returned; on the last stage from FINISH_F on the loss. In training START_I releases it,
    # otherwise SEND_F, or DRAIN where the next stage is on this rank.
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    # A block's I takes its passage, so the graph of a block is freed before the I of the block before it.
    passages: dict[Key, dict[int, Passage]] = field(default_factory=dict)
    # By the stage whose output it is the gradient of. RECV_B writes that of its own stage. FINISH_I of stage s writes
    # that of s - 1, which START_I of s - 1 takes if that stage is here, and SEND_B otherwise.
    gradients: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    # What I leaves for W: [Note: what waits for W] in deferred.py. From START_I to FINISH_W; the W of a unit takes its
    # part.
    pending: dict[Key, Pending] = field(default_factory=dict)
    # Kept apart from `inputs` and `gradients`, which are released in I: a pending W may hold the same buffer, and a
    # receive that is posted into it would overwrite what W reads.
    received: dict[Key, list[tuple[torch.Tensor, Wire]]] = field(default_factory=dict)
    # Results, without graphs. DRAIN keeps these three alone, for SUMS and for the Outcome.
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: dict[int, torch.Tensor | float] = field(default_factory=dict)
    logits: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a program on this rank: the sum of its losses, its outputs if requested, its clock.

    loss_sum: on the last stage, of one rank of a tensor-parallel group, as all of them have the same.
    counts: counts returned by the losses, of the same rank; empty if the labels determine them.
    losses: on the last stage, of each of this rank's microbatches.
    """

    loss_sum: torch.Tensor | None
    counts: tuple[torch.Tensor | float, ...]
    losses: Mapping[int, torch.Tensor]
    logits: tuple[Any, ...]
    clock: Clock

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return the timeline, until the next program of its kind begins; on CUDA it waits for the device."""
        return self.clock.spans()


@dataclass(frozen=True, slots=True)
class _Score:
    """A program with the calls that execute it.

    row: the actions that it was lowered from, whose receives `Mail` expects.
    calls: one for each instruction.  parts: the program, cut where another action begins.  forwards: position of each
    block's forward, by stage and microbatch.  awaits: for each instruction its text, and the ranks that it may wait
    for.
    table: offset of the texts in this process's page.  name: a number that the program has on every rank, never 0.
    """

    program: Program
    row: tuple[Action, ...]
    calls: tuple[Callable[[], None], ...]
    parts: tuple[Part, ...]
    forwards: Mapping[Key, Mapping[int, int]]
    awaits: tuple[Doing, ...]
    table: int
    name: int


class _TakenBack(Exception):  # noqa: N818  (no error: the program begins anew)
    """Raised if a step ahead was wrong."""


class Executor:
    """Executes the programs of this rank.

    outline: lists the rank's actions and lowers them.  sharded: the stages and units of the programs.  end: ends the
    steps.
    loss: of the last stage's outputs and a microbatch.
    lanes: run transfers concurrently, which are recorded on the programs' clock.

    is_timed: whether each instruction is recorded on the clock, instead of each action only.
    before: what to call before each instruction of a kind, for tools and tests that observe a step. The model itself
    calls the forward of a block, so before F only a stage's first is seen.
    probe: inspects the values of the next program, if given.
    """

    def __init__(
        self,
        outline: Outline,
        sharded: Sharded,
        end: StepEnd,
        *,
        loss: Loss,
        transport: Transport,
        collector: Collector,
        seed: int,
        lanes: Iterable[Lane] = (),
    ) -> None:
        self._lanes = tuple(lanes)  # empty if no rank shares this one's parameters: then nothing overlaps
        # Of the rank and its model, the same in all programs.
        self._outline = outline
        self.end = end
        self._loss = loss
        self._stages = {stage.index: stage for stage in sharded.stages}
        self._blocks = {block.index: block for stage in sharded.stages for block in stage.blocks}
        self.units = {unit.spec.index: unit for unit in sharded.units}
        self._placement = outline.schedule.placement
        # By number of microbatches and ending. A program is lowered when it is first needed and kept until `lower`, as
        # are its calls, which bind the units and blocks above. An evaluation has programs of its own.
        self._scores: dict[tuple[int, Ending | None], _Score] = {}
        self._shape: RankShape | None = None  # set by `lower`, which the engine calls once or twice while it is built
        self._first_microbatch = 0  # global number of microbatch 0, for a block's random numbers and for errors
        self._ranks = transport.place.peers("pp")  # world rank of each pipeline rank
        self._transport = transport  # for places and peers; messages go through `_mail`, the units and `_end`
        self._collector = collector  # the one that this rank's linear layers append to
        self._seed, self._step_number = seed, 0  # the running step, counted from 0, as its blocks are seeded with it
        own, vocabulary = transport.place.pp, sharded.vocabulary
        shown = {unit.spec.index: stage.index for stage in sharded.stages for unit in stage.units}
        if vocabulary is not None:
            shown |= {table.unit.spec.index: own for table in vocabulary.tables}
        # Two, since a clock keeps its last program: an evaluation leaves the timeline of the last step as it is.
        self._clocks = {training: clock_of(transport.device, own, shown) for training in (True, False)}
        self._clock = self._clocks[False]
        self._mail = Mail(transport, self._rank_of)  # the shapes that it knows and its free buffers outlive a program
        self.vocabulary: SplitVocabulary | None = None  # its state begins and ends with a program, as `_step` does
        if vocabulary is not None:
            self.vocabulary = SplitVocabulary(vocabulary, self._mail, self._placement, ranks=self._ranks)
        # Replaced by `run`, DRAIN and TAKE_BACK, and not cleared field by field: nothing of a program stays behind.
        self._step = _Step((), is_training=False)
        # Read while a program runs: set these three between programs.
        self.is_timed = False
        self.before: Mapping[Operation, Callable[[], None]] = {}
        self.probe: Probe | None = None
        self._scale: Callable[[], float] | None = None  # of the running program; TAKE_BACK calls it once more
        # The running program. `_calls` are those of the score, or wrapped for `is_timed` and `before`. TAKE_BACK may
        # replace all three, outside of any forward, so `_block_forward` can keep them in local names.
        self._score: _Score | None = None
        self._calls: Sequence[Callable[[], None]] = ()
        self._instructions: Sequence[Instruction] = ()
        self._at = 0  # [Note: who moves the program counter]; no other thread reads it
        # Where other threads and processes see this rank: `_place[AT]` is the instruction in progress, `_at` the next
        # one. All engines of a process share its page.
        self._page = own_page()
        self._place = self._page.numbers
        self._peers = cache(transport.place.peers)  # of a thousand ranks they take milliseconds, for each instruction
        # The action in progress. A model's call of a block says neither its stage nor its microbatch: it is this one's.
        self._now: Action = Action(-1, Op.F, -1)

    @property
    def scale(self) -> float:
        """The factor of this step's loss."""
        return self._step.scale

    # ---- programs

    def lower(self, shape: RankShape) -> Program:
        """Lower this rank's actions for its stages and units. Return the program of a training step."""
        self._shape = shape
        self._scores.clear()
        return self._score_of(self._outline.schedule.microbatches, self._outline.plan.end).program

    def _score_of(self, microbatches: int, end: Ending | None) -> _Score:
        """Return the program for the first microbatches of the actions; it is lowered once and executed many times."""
        key = microbatches, end
        if key not in self._scores:
            assert self._shape is not None, "programs are lowered before one is played"
            rank = self._transport.place.pp
            row = self._outline.row(rank, training=end is not None, microbatches=microbatches)
            program = self._outline.program(rank, row, self._shape, end=end)
            calls = tuple(PLAYS[each.do](self, each) for each in program.instructions)
            forwards: dict[Key, dict[int, int]] = {}
            for at, (do, action, block, _) in enumerate(program.instructions):
                if do is Do.F:
                    forwards.setdefault((action.stage, action.microbatch or 0), {})[block] = at
            awaits = tuple(map(self._awaits, program.instructions))
            self._scores[key] = _Score(
                program,
                row,
                calls,
                parts=tuple(parts_of(program.instructions)),
                forwards=forwards,
                awaits=awaits,
                table=self._page.add([each.what for each in awaits]),
                name=1 + program.digest % (1 << 31),
            )
        return self._scores[key]

    def run(
        self,
        batches: Sequence[Batch],
        *,
        step: int = 0,
        first_microbatch: int = 0,
        scale: Callable[[], float] | None = None,
        training: bool,
        keep_logits: bool = False,
    ) -> Outcome:
        """Execute a program over this rank's microbatches.

        step: the number of the training step.  first_microbatch: the global number of the first.
        scale: returns the factor of the loss before its backward, called once it is known; given in training.
        Without training nothing is kept for a backward; with keep_logits the loss is not computed.
        """
        # This also releases what a program that raised has left behind.
        self._step = _Step(batches, is_training=training, keeps_logits=keep_logits)
        self._scale = scale
        self._step_number = step
        # A post-validated step begins as one that ends AHEAD. CHAIN's program is equal up to TAKE_BACK, which chooses.
        score = self._use(len(batches), self._outline.plan.end if training else None)
        self._begin(score.row, batches, training=training, keep_logits=keep_logits)
        self._clock = self._clocks[training]
        self._clock.begin()
        for lane in self._lanes:
            lane.clock = self._clock
        self._first_microbatch = first_microbatch
        try:
            with torch.set_grad_enabled(training), self._blocks_handed():
                self._play()
        finally:
            self._place[AT] = -1  # also after an error: this rank no longer is at an instruction
        ended, self._step = self._step, _Step((), is_training=False)
        counts = self._counts(ended)
        return Outcome(self._loss_sum(ended), counts, ended.losses, logits=tuple(ended.logits), clock=self._clock)

    def _use(self, microbatches: int, end: Ending | None) -> _Score:
        """Select the program to execute."""
        # In this order. Where a program begins, the position is -1 and other threads look no further; at TAKE_BACK the
        # old position has the same line in the new program.
        score = self._score = self._score_of(microbatches, end)
        self._page.use(score.table, len(score.calls), self._step_number + 1 if self._step.is_training else 0)
        self._calls, self._instructions = score.calls, score.program.instructions
        if self.is_timed:
            both = zip(self._instructions, score.calls, strict=True)
            self._calls = tuple(partial(self._timed, each, call) for each, call in both)
        if self.before:  # outside of the timing, so the time of an observer is not the instruction's
            dos = [each.do for each in self._instructions]
            observed = zip(map(self.before.get, dos), self._calls, strict=True)
            self._calls = tuple(call if first is None else partial(_in_turn, first, call) for first, call in observed)
        return score

    def _timed(self, instruction: Instruction, call: Callable[[], None]) -> None:
        start = self._clock.now()
        call()
        self._clock.took(instruction, start)

    def _loss_sum(self, step: _Step) -> torch.Tensor | None:
        # All ranks of a tensor-parallel group have the same loss, and SUMS adds them too.
        counts = self._transport.place.tp == 0
        return torch.stack(list(step.losses.values())).sum() if step.losses and counts else None

    def _counts(self, step: _Step) -> tuple[torch.Tensor | float, ...]:
        if 0 < len(step.counts) < len(step.losses):
            raise RunError(
                f"the loss returned a count for {len(step.counts)} of {len(step.losses)} microbatches; it gives a "
                "sum for "
                "each, or a pair (sum, count) for each"
            )
        return tuple(step.counts.values()) if self._transport.place.tp == 0 else ()

    def _drain(self) -> None:
        """Release everything except the results of the step."""
        self._mail.end()
        if self.vocabulary is not None:
            self.vocabulary.end()
        ended = self._step
        self._step = _Step(
            (), is_training=ended.is_training, losses=ended.losses, counts=ended.counts, logits=ended.logits
        )

    def _add_up(self) -> None:
        self.end.add_up(self._loss_sum(self._step), self._counts(self._step), self._clock.busy)

    def _take_back(self) -> None:
        """Discard the work so far if the previous step was wrong, since it used wrong parameters. Otherwise the step
        continues, and ends as the verdict says."""
        batches = self._step.batches
        # [Note: a step ahead of its verdict] in step_end.py. No backward has run yet, so no gradient of this step has
        # been written: there are activations, gathered copies and messages to discard.
        if self.end.take_back():
            self._step = _Step(batches, is_training=True)
            if self.vocabulary is not None:
                self.vocabulary.end()
                self.vocabulary.begin(batches, training=True)
            # Senders also begin this step again, and repeat the sends that preceded their own verdict. Discard the
            # messages of the first time that have arrived, and the receives posted for them.
            later = [instruction.action for instruction in self._instructions[self._at :]]
            self._mail.begin_again(self._stale(dict.fromkeys(later)))
            raise _TakenBack
        # The new program is equal up to here, and so are its parts: `_at` and the part in progress stay right.
        self._use(len(batches), self.end.choose())
        self._take_scale()

    def _take_scale(self) -> None:
        if self._scale is not None:
            self._step.scale = self._scale()

    @contextmanager
    def _blocks_handed(self) -> Iterator[None]:
        """Context in which this executor runs blocks when the model calls them. Outside it they run by themselves."""
        for block in self._blocks.values():
            block.hand_to(self._block_forward)
        try:
            yield
        finally:
            for block in self._blocks.values():
                block.hand_to(None)

    def _begin(self, row: Sequence[Action], batches: Sequence[Batch], *, training: bool, keep_logits: bool) -> None:
        """Begin with the messages of a program."""
        split = self.vocabulary
        if split is None:
            self._mail.begin(row, batches, training=training)
            return
        split.begin(batches, training=training, keeps_logits=keep_logits)
        parcels = partial(split.parcels, batches=batches, training=training, logits=keep_logits)
        self._mail.begin(row, batches, training=training, parcels=parcels)

    def _play(self) -> None:
        clock = self._clock
        is_profiled = is_profiling()
        assert self._score is not None, "a program was chosen"
        self._take_scale()
        self._at = nth = 0
        try:
            while nth < len(self._score.parts):
                part = self._score.parts[nth]
                self._now = part.action
                start = clock.now()
                try:
                    with record_function(str(part.action)) if is_profiled else _UNNAMED:
                        self._advance(part.stop)
                except _TakenBack:
                    # From the first instruction. VERDICT and STEP then find no step that waits, and TAKE_BACK finds
                    # right parameters, so this happens once a step at most.
                    self._at = nth = 0
                    continue
                clock.add(part.action, start)
                nth += 1
        except AtollError:
            raise
        except (Exception, SystemExit) as error:  # a model's sys.exit would leave the other ranks waiting
            if self._now.op is Op.STEP:  # errors of the optimizer or of the caller's code are raised unchanged
                raise
            raise self._failure(self._now, error) from error

    def _advance(self, stop: int) -> None:
        """Execute up to an instruction. A model's own forward executes some of them when it calls its blocks."""
        while self._at < stop:
            at = self._place[AT] = self._at
            # Set before the call: the forward of a stage continues from here, and advances it further.
            self._at = at + 1
            self._calls[at]()

    def doing(self) -> Doing | None:
        """Return the current instruction and the ranks it may wait for; None between programs. Thread-safe."""
        # The watch's thread reads without a lock. If the program is replaced in between, one heartbeat names a wrong
        # line; the bounds keep it from raising.
        at, score = self._place[AT], self._score
        if score is None or not 0 <= at < len(score.awaits):
            return None
        words = f"{row_of(self._step_number + 1 if self._step.is_training else 0)}, {score.awaits[at].what}"
        mark = (self._step_number << STEP_BITS) + at
        return Doing(words, score.awaits[at].waits_for, mark, program=score.name)

    def _awaits(self, instruction: Instruction) -> Doing:
        """Return the text of an instruction, and the ranks that it may wait for."""
        peers, along = self._awaited(instruction)
        what = str(instruction)
        if str(instruction.action) not in what:
            what += f" of {instruction.action}"
        if peers:
            what += f" along {along} on the {instruction.do.lane} lane"
        return Doing(what, peers)

    def _awaited(self, instruction: Instruction) -> tuple[tuple[int, ...], str]:
        """Return the world ranks that must act before an instruction can end, and the axes between them."""
        peers, place = instruction.do.peers, self._transport.place
        if peers is Partners.NEIGHBOUR:
            peer = self._peer(instruction.action)
            return (tuple(self._ranks) if peer is None else (peer,)), "pp"
        if peers is Partners.PIPELINE:
            return tuple(self._ranks), "pp"
        if peers is Partners.ALL:
            return self._transport.together, "every axis"
        data = ("intra",) if self._transport.has_islands else ("inter", "intra")
        if peers is Partners.STAGE:
            return self._peers(*data, "tp"), ", ".join((*data, "tp"))
        if peers is Partners.TENSOR:
            return self._peers("tp") if place.mesh.tensor > 1 else (), "tp"
        axes = [axis for axis in data if place.mesh.sizes[axis] > 1]
        return self._peers(*axes) if axes else (), ", ".join(axes)

    def _stale(self, later: Iterable[Action]) -> list[tuple[Action, int]]:
        """Receives after the first backward of messages that were sent before the sender's first backward, and these
        senders."""
        # A sender's false start ended at its own TAKE_BACK, before its first backward. What it had sent by then, and
        # this rank has not received, comes before the same message of the right start.
        early = [
            set(takewhile(lambda action: action.op not in BACKWARD, row)) for row in self._outline.schedule.actions
        ]
        found = []
        for receive in later:
            for rank, send in self._sends_of(receive):
                if send in early[rank]:
                    found.append((receive, self._ranks[rank]))
        return found

    def _sends_of(self, receive: Action) -> Iterator[tuple[int, Action]]:
        """Return the pipeline ranks, with their sends, that a receive of a forward waits for."""
        stage, microbatch = receive.stage, receive.microbatch
        own = self._transport.place.pp
        if receive.op is Op.RECV_S:
            stage = self._placement.stages
        elif receive.op is Op.RECV_F and stage == 0:
            ranks = (rank for rank in range(len(self._ranks)) if rank != own)
            yield from ((rank, Action(rank, Op.SEND_L, microbatch)) for rank in ranks)
            return
        elif receive.op is not Op.RECV_F:
            return
        yield self._placement.rank_of(stage - 1), Action(stage - 1, Op.SEND_F, microbatch)

    def _failure(self, action: Action, error: BaseException) -> RunError:
        place = self._transport.place
        where = f"rank {place.rank} ({', '.join(f'{axis} {at}' for axis, at in place.coordinates.items())})"
        what = f"step {self._step_number + 1}, action {action}"
        if action.microbatch is not None:
            what += f", global microbatch {self._first_microbatch + action.microbatch}"
        peer = self._peer(action)
        if peer is not None:
            what += f", peer rank {peer}"
        return RunError(f"{where}, {what}: {type(error).__name__}: {error}")

    def _peer(self, action: Action) -> int | None:
        """Return the world rank that an action communicates with."""
        if action.op in (Op.RECV_S, Op.RECV_T, Op.SEND_S):
            return self._rank_of(self._placement.stages - 1)
        if action.op in (Op.RECV_G, Op.SEND_L):
            return self._rank_of(0)
        step = {Op.SEND_F: 1, Op.RECV_F: -1, Op.F: -1, Op.SEND_B: -1, Op.RECV_B: 1, Op.B: 1}.get(action.op)
        if step is None or not 0 <= action.stage + step < self._placement.stages:
            return None
        return self._rank_of(action.stage + step)

    def _rank_of(self, stage: int) -> int:
        return self._ranks[self._placement.rank_of(stage)]

    def _is_here(self, stage: int) -> bool:
        return stage in self._stages

    # ---- compute

    def _forward(self, stage: int, microbatch: int) -> None:
        """Run the model's own forward of a stage, in which its blocks call `_block_forward`."""
        key = stage, microbatch
        first = self._at - 1
        self._at = first  # the next instruction is the first block's forward, executed when the model calls it
        hidden = self._step.inputs.get(key)
        self._look(Made.INPUT, [hidden], self._stages[stage].run.start, microbatch=microbatch)
        self._step.outputs[key] = self._stages[stage].forward(hidden, self._step.batches[microbatch])
        # A model that called none of its blocks has moved nothing: `_advance` would run this forward again, for ever.
        self._at = max(self._at, first + 1)

    def _block_forward(self, block: LocalBlock, given: Arguments) -> Any:
        """Run a block's forward when the model calls it: execute the instructions before it, the block, and what starts
        directly after it. Blocks that the model skips are passed over, and so communicate as on all other ranks."""
        action = self._now  # a recomputed forward does not get here: it runs inside the block's I, past this handler
        microbatch = action.microbatch or 0
        key = action.stage, microbatch
        assert self._score is not None, "blocks are called while a program is played"
        at = self._score.forwards[key].get(block.index, -1)
        if at < self._at:
            raise RunError(
                f"action {action} has run past block {block.index} ({type(block.module).__name__}); a model's forward "
                "calls each of its blocks at most once, in their order"
            )
        calls, instructions, place = self._calls, self._instructions, self._place
        while self._at < at:
            place[AT] = self._at
            self._at += 1
            # An F here is of a block that the model skips. If it is the stage's first, its call is `_forward`, and
            # would enter the model a second time.
            if instructions[self._at - 1].do is not Do.F:
                calls[self._at - 1]()
        place[AT] = at
        self._at = at + 1
        start = self._clock.now() if self.is_timed else 0.0
        output, passage = block.forward(given, Draw(self._seed, self._step_number, self._first_microbatch + microbatch))
        if self.is_timed:
            self._clock.took(instructions[at], start)
        self._look(Made.OUTPUT, tensors_of(output), block.index, microbatch=microbatch)
        # Here and not at the next call of a block: what the model computes in between can use the freed memory, and
        # hides the next gather. It ends inside the program, whose last instruction is DRAIN or of the step's end.
        while instructions[self._at].do.begins:
            place[AT] = self._at
            self._at += 1
            calls[self._at - 1]()
        place[AT] = at  # operations of the model between its blocks belong to the forward
        if passage is not None:
            self._step.passages.setdefault(key, {})[block.index] = passage
        return output

    def _finish_forward(self, stage: int, microbatch: int) -> None:
        """Compute the loss on the last stage, or the input of the next stage."""
        step, at = self._step, self._stages[stage]
        key = (stage, microbatch)
        output = step.outputs.pop(key)
        if not step.is_training:
            step.inputs.pop(key, None)
            step.received.pop(key, None)
        if at.is_last and self.vocabulary is not None:
            # No loss yet: all ranks score the output by their slices, and RECV_B brings the loss and the gradient.
            self.vocabulary.take_scored(microbatch, output)
            step.outputs[key] = output
            return
        if at.is_last and step.keeps_logits:
            step.logits.append(whole_output(output))
            return
        if at.is_last:
            output, count = sum_and_count(self._loss(output, step.batches[microbatch]))
            output = whole_output(output)
            if count is not None:
                step.counts[microbatch] = count.detach() if isinstance(count, torch.Tensor) else count
            step.losses[microbatch] = output.detach()
            self._look(Made.LOSS, [output], at.run.stop - 1, microbatch=microbatch)
        # For the backward, or for SEND_F: without either, nothing would take it out before DRAIN.
        if step.is_training or not (at.is_last or self._is_here(stage + 1)):
            step.outputs[key] = output
        if not at.is_last and self._is_here(stage + 1):
            # Between two stages of a rank there is no message, but the same cut: a leaf, in which FINISH_I of the next
            # stage finds the gradient.
            passed = output.detach()
            step.inputs[stage + 1, microbatch] = passed.requires_grad_(output.requires_grad and step.is_training)

    def _start_input_backward(self, stage: int, microbatch: int) -> None:
        """Give the gradient of the stage's output to the outputs of its last block; on the last stage, run the loss's
        own backward."""
        step, at, key = self._step, self._stages[stage], (stage, microbatch)
        output = step.outputs.pop(key)
        gradient = step.gradients.pop(key, None)
        step.pending[key] = {}
        if at.is_last and self.vocabulary is None:
            gradient = torch.full_like(output, step.scale)
        if output.requires_grad:
            # Through what the model computes after its last block, up to that block's leaf. If there is nothing, the
            # output is that leaf, and the received buffer itself becomes its gradient: see `_Step.received`.
            pass_on(output, gradient)
        if at.looked_up is not None:  # for a forward that runs again in the I of its block; FINISH_I clears it
            at.looked_up.rows = step.inputs.get(key)

    def _block_backward(self, block: LocalBlock, key: Key) -> None:
        """Run one block's backward. Its gradients go to the tensors' producers, and inputs of W are kept.

        If a weight with deferred W is also used outside of its linear layer, autograd computes that part of the
        gradient, and it is added to the pending ones.
        """
        passage = self._step.passages.get(key, {}).pop(block.index, None)
        if passage is None:  # the model has skipped it, or nothing of its output needs a gradient
            return
        pending = self._step.pending[key]
        if self.probe is not None:
            # The gradient from the following block or, in the last block of a stage, the received one.
            is_last = block.index == self._stages[key[0]].run.stop - 1
            made, of = (Made.GRADIENT, block.index) if is_last else (Made.INPUT_GRADIENT, block.index + 1)
            self._look(made, [leaf.grad for leaf in passage.leaves], of, microbatch=key[1])
        # On CUDA autograd runs a backward on a thread of its own, while this one waits in it: layers append to
        # `collected` from there, and by the end of this context it is complete.
        with self._collector.collecting() as collected:
            block.backward(passage)
        for unit, name, kept in collected:
            pending.setdefault(unit, []).append((name, kept))
        with torch.no_grad():
            # Behind each block, so that what I computes is outside of the flat buffers for one block at a time, and
            # is added there in the gradient's dtype: autograd adds to `grad` in that of the parameter.
            for unit in block.units:
                for name, parameter in unit.trained():
                    gradient, parameter.grad = parameter.grad, None
                    if gradient is None:
                        continue
                    own = local_part(like_parameter(parameter, gradient))
                    if "I" in unit.phases_of(name):
                        unit.touched.add(name)
                        unit.gradient_buffer(name, "I").add(own)
                    else:  # not into the buffer of W, which is opened in W: a pending W holds no gradient buffer
                        pending.setdefault(unit, []).append((name, own))
        if self.probe is not None:
            self._look_at_gradients(block.units, "I", block.index, microbatch=key[1])

    def _finish_input_backward(self, stage: int, microbatch: int) -> None:
        """Keep the input's gradient for the previous stage, zero if the output does not depend on the input."""
        step, at, key = self._step, self._stages[stage], (stage, microbatch)
        hidden = step.inputs.pop(key, None)
        step.passages.pop(key, None)
        if at.looked_up is not None:
            at.looked_up.rows = None
        if hidden is not None and hidden.requires_grad:
            # Whether a message follows is agreed once, with the shape (`Wire.has_gradient`). Without this zero, the
            # previous stage would wait for one that is never sent.
            owed = hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)
            step.gradients[stage - 1, microbatch] = owed
            self._look(Made.INPUT_GRADIENT, [owed], at.run.start, microbatch=microbatch)

    def _weights(self, unit: Unit, key: Key) -> None:
        compute_weights(unit, self._step.pending[key].pop(unit, []))
        if self.probe is not None:
            block = next(at for at in unit.spec.blocks if at in self._stages[key[0]].run)
            self._look_at_gradients([unit], "W", block, microbatch=key[1])

    def _look_at_gradients(self, units: Iterable[Unit], phase: Phase, block: int, microbatch: int) -> None:
        for unit in units:
            for name, _ in unit.trained():
                self._look(Made.WEIGHT_GRADIENT, [unit.gradient(name, phase)], block, microbatch=microbatch, name=name)

    def _look(
        self,
        made: Made,
        values: Iterable[torch.Tensor | None],
        block: int,
        microbatch: int,
        *,
        name: str | None = None,
    ) -> None:
        if self.probe is not None and self._step.is_training:
            self.probe.look(made, values, block, microbatch=microbatch, name=name)

    def _finish_weights(self, stage: int, microbatch: int) -> None:
        """Release everything of the microbatch; its received buffers are reused."""
        key = stage, microbatch
        del self._step.pending[key]  # empty by now
        # Not before: [Note: received buffers] in mail.py. The products that read them have been launched, and a receive
        # into a reused buffer starts after them.
        for buffer, wire in self._step.received.pop(key, ()):
            self._mail.recycle(buffer, wire)

    # ---- messages

    def _send_forward(self, stage: int, microbatch: int) -> None:
        step, key = self._step, (stage, microbatch)
        if self.vocabulary is not None and stage == self.vocabulary.last_stage:
            self.vocabulary.send_scored(microbatch, step.outputs[key])
        else:
            self._mail.send_forward(stage, microbatch, step.outputs[key])
        if not step.is_training:  # the outbox holds what it sends
            del step.outputs[key]

    def _receive_forward(self, stage: int, microbatch: int) -> None:
        step = self._step
        if stage == 0 and self.vocabulary is not None:
            step.inputs[stage, microbatch] = self.vocabulary.receive_looked_up(microbatch)
            return
        received = self._mail.receive(Op.RECV_F, stage)
        assert received is not None, "an activation is always sent"
        buffer, wire = received
        step.received[stage, microbatch] = [received]
        # A leaf of this microbatch alone: the buffer returns to `Mail` and must not take a gradient with it.
        hidden = buffer.detach()
        step.inputs[stage, microbatch] = hidden.requires_grad_(wire.has_gradient and step.is_training)

    def _send_backward(self, stage: int, microbatch: int) -> None:
        """Send the gradient of a backward, if the previous stage needs it."""
        gradient = self._step.gradients.pop((stage - 1, microbatch), None)
        if gradient is None:  # the receiver knows it, from `Wire.has_gradient`, and does not wait
            return
        if stage == 0:
            assert self.vocabulary is not None, "nothing lies before stage 0 but the slices of a vocabulary"
            self.vocabulary.send_gradient(microbatch, gradient)
        else:
            self._mail.send_backward(stage, microbatch, gradient)

    def _receive_backward(self, stage: int, microbatch: int) -> None:
        if self.vocabulary is not None and stage == self.vocabulary.last_stage:
            self._receive_scores(self.vocabulary, microbatch)
            return
        received = self._mail.receive(Op.RECV_B, stage)
        if received is not None:
            self._step.gradients[stage, microbatch] = received[0]
            self._step.received.setdefault((stage, microbatch), []).append(received)

    def _receive_scores(self, split: SplitVocabulary, microbatch: int) -> None:
        """Receive the loss and the gradient from which the last stage's backward begins; or the logits."""
        step, key = self._step, (split.last_stage, microbatch)
        found, gradient = split.receive_scores(microbatch)
        if step.keeps_logits:
            step.logits.append(found)
        else:
            step.losses[microbatch] = found
            self._look(Made.LOSS, [found], self._stages[split.last_stage].run.stop - 1, microbatch=microbatch)
        if step.is_training and gradient is not None:
            step.gradients[key] = gradient.mul_(step.scale).to(step.outputs[key].dtype)


def _in_turn(first: Callable[[], None], then: Callable[[], None]) -> None:
    first()
    then()


def _skip() -> None:
    """Skip a block that the model's forward did not call."""


def _play_forward(on: Executor, step: Instruction) -> Callable[[], None]:
    """The first F runs the model, which calls the other blocks: `_advance` gets to their F only where the model has
    skipped them."""
    stage, microbatch = step.action.stage, -1 if step.action.microbatch is None else step.action.microbatch
    first = on._stages[stage].blocks[0].index == step.of
    return partial(on._forward, stage, microbatch) if first else _skip


def _key(step: Instruction) -> Key:
    return step.action.stage, -1 if step.action.microbatch is None else step.action.microbatch


def _post(on: Executor, step: Instruction) -> Callable[[], None]:
    return partial(on._mail.post, step.action)


PLAYS.update(
    {
        Do.F: _play_forward,
        Do.I: lambda on, step: partial(on._block_backward, on._blocks[step.of], _key(step)),
        Do.W: lambda on, step: partial(on._weights, on.units[step.of], _key(step)),
        Do.FINISH_F: of_microbatch(Executor._finish_forward),
        Do.START_I: of_microbatch(Executor._start_input_backward),
        Do.FINISH_I: of_microbatch(Executor._finish_input_backward),
        Do.FINISH_W: of_microbatch(Executor._finish_weights),
        Do.SEND_F: of_microbatch(Executor._send_forward),
        Do.RECV_F: of_microbatch(Executor._receive_forward),
        Do.SEND_B: of_microbatch(Executor._send_backward),
        Do.RECV_B: of_microbatch(Executor._receive_backward),
        Do.GATHER: of_unit(Unit.begin_gather),
        Do.WHOLE: of_unit(Unit.gather),  # waits for what GATHER began, or gathers here if nothing was begun
        Do.FETCH: of_unit(Unit.gather),
        Do.FREE: of_unit(Unit.free),
        Do.REDUCE: of_phase(Unit.reduce_gradients),
        Do.REDUCED: of_phase(Unit.end_reduction),
        Do.SYNC: of_phase(Unit.sync_gradients),
        Do.DRAIN: lambda on, _: on._drain,
        Do.SUMS: lambda on, _: on._add_up,
        Do.TAKE_BACK: lambda on, _: on._take_back,
        **dict.fromkeys((row for row in OPERATIONS.values() if row.posts), _post),
        **{row: of_end(act) for row, act in OF_UNIT.items()},
        **{row: of_all(act) for row, act in OF_ALL.items()},
    }
)
check_complete()
