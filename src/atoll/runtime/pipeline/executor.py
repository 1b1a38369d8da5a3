"""Executes a rank's programs: a table instruction -> call, without policy.

All gathers, frees, reductions and sends of a step are in its program; the calls of its instructions are bound once, and
each step makes them in order. Who makes them is in `counter.py`, what they compute in `microbatches.py` and
`step_end.py`, and whom they wait for in `waits.py`. At the end of this file is the table.

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from atoll.base._torch import is_profiling
from atoll.base.errors import AtollError, RunError
from atoll.plans.ir import Action, Op
from atoll.program import Do, Ending, Instruction, Kept, Operation, Part, Partial, Program, RankShape, parts_of
from atoll.program.kept import most_away
from atoll.program.operation import OPERATIONS
from atoll.program.trace import Span
from atoll.runtime.failure import Doing
from atoll.runtime.lanes import JobLane
from atoll.runtime.mail import Mail, Parcel
from atoll.runtime.models import Batch, Loss
from atoll.runtime.outline import Outline
from atoll.runtime.page import AT, own_page, row_of
from atoll.runtime.pipeline.clock import ProgramClock, clock_of
from atoll.runtime.pipeline.counter import Forwards, ProgramCounter, skip
from atoll.runtime.pipeline.deferred import Collector
from atoll.runtime.pipeline.kept import KeptActivations
from atoll.runtime.pipeline.microbatches import Microbatches, PartsOfSequences, StageMicrobatch
from atoll.runtime.pipeline.stage import Stage
from atoll.runtime.pipeline.step_end import OF_ALL, StepEnd
from atoll.runtime.pipeline.unit_end import OF_UNIT
from atoll.runtime.pipeline.waits import Waits
from atoll.runtime.plays import (
    PLAYS,
    Extension,
    Play,
    call_of,
    check_complete,
    of_all,
    of_end,
    of_microbatch,
    of_phase,
    of_unit,
)
from atoll.runtime.sharding.away import begin_part, end_part
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Transport

STEP_BITS = 32
"""Number of bits of an instruction's index in a rank's position (step, index) as one number."""

_UNNAMED: AbstractContextManager[None] = nullcontext()  # one for every action: a nullcontext can be entered again


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
    clock: ProgramClock

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return the timeline, until the next program of its kind begins; on CUDA it waits for the device."""
        return self.clock.spans()


@dataclass(frozen=True, slots=True)
class _Score:
    """A program with the calls that execute it.

    row: the actions that it was lowered from, whose receives `Mail` expects.
    calls: one for each instruction.  parts: the program, cut where another action begins.
    awaits: for each instruction its text, and the ranks that it may wait for.  leaving: the blocks and microbatches
    whose activations leave for host memory.
    table: offset of the texts in this process's page.  name: a number that the program has on every rank, never 0.
    """

    program: Program
    row: tuple[Action, ...]
    calls: tuple[Callable[[], None], ...]
    parts: tuple[Part, ...]
    forwards: Forwards
    awaits: tuple[Doing, ...]
    leaving: frozenset[tuple[int, int]]
    table: int
    name: int


class _BeginsAgain(Exception):  # noqa: N818  (no error: the program begins anew)
    """Raised if a step ahead was wrong."""


class Executor:
    """Executes the programs of this rank.

    outline: lists the rank's actions and lowers them.  stages, units: those of the programs.  end: ends the steps.
    loss: of the last stage's outputs and a microbatch.
    lanes: run transfers concurrently, which are recorded on the programs' clock.
    extensions: of packages with instructions of their own.  kept: what blocks keep in host memory, if they may.
    sequences: of which parts are computed, if so.

    is_timed: whether each instruction is recorded on the clock, instead of each action only.
    before: what to call before each instruction of a kind, for tools and tests that observe a step. The model itself
    calls the forward of a block, so before F only a stage's first is seen.
    """

    def __init__(
        self,
        outline: Outline,
        stages: Sequence[Stage],
        units: Sequence[Unit],
        *,
        end: StepEnd,
        loss: Loss,
        transport: Transport,
        mail: Mail,
        collector: Collector,
        seed: int,
        lanes: Iterable[JobLane] = (),
        extensions: Sequence[Extension] = (),
        kept: KeptActivations | None = None,
        sequences: PartsOfSequences | None = None,
    ) -> None:
        self._outline, self._transport = outline, transport
        self.end = end
        self.units = {unit.spec.index: unit for unit in units}
        self.extensions = tuple(extensions)
        self._lanes = tuple(lanes)  # empty if no rank shares this one's parameters: then nothing overlaps
        # The shapes that it knows and its free buffers outlive a program.
        self._mail = mail
        self.waits = Waits(transport, outline.schedule)
        self.microbatches = Microbatches(
            stages,
            mail,
            loss=loss,
            collector=collector,
            routers=end.routers,
            counts_loss=transport.place.tp == 0,
            kept=kept,
            sequences=sequences,
        )
        self.kept = kept
        # Where other threads and processes see this rank. All engines of a process share its page.
        self._page = own_page()
        self.counter = ProgramCounter(self.microbatches, self._page.numbers, seed=seed)
        # By number of microbatches and ending. A program is lowered when it is first needed and kept until `lower`, as
        # are its calls, which bind the units and blocks above. An evaluation has programs of its own.
        self._scores: dict[tuple[int, Ending | None], _Score] = {}
        self._shape: RankShape | None = None  # set by `lower`, which the engine calls once or twice while it is built
        # A unit is shown with its stage; one of no stage, with this rank.
        own = transport.place.pp
        shown = dict.fromkeys(self.units, own)
        shown |= {unit.spec.index: stage.index for stage in stages for unit in stage.units}
        # Two, since a clock keeps its last program: an evaluation leaves the timeline of the last step as it is.
        self._clocks = {training: clock_of(transport.device, own, shown) for training in (True, False)}
        self._clock = self._clocks[False]
        # Read when a program begins: set these two between programs.
        self.is_timed = False
        self.before: Mapping[Operation, Callable[[], None]] = {}
        # The running program, and its factor of the loss, for which a step that begins again asks once more.
        self._score: _Score | None = None
        self._scale: Callable[[], float] | None = None

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
            forwards: dict[StageMicrobatch, dict[int, int]] = {}
            for at, (do, action, block, _) in enumerate(program.instructions):
                if do is Do.F:
                    forwards.setdefault((action.stage, action.microbatch or 0), {})[block] = at
            awaits = tuple(map(self.waits.describe, program.instructions))
            self._scores[key] = _Score(
                program,
                row,
                tuple(call_of(self, each) for each in program.instructions),
                parts=tuple(parts_of(program.instructions)),
                forwards=forwards,
                awaits=awaits,
                leaving=frozenset(
                    (each.of, each.action.microbatch or 0)
                    for each in program.instructions
                    if each.do is Kept.OFFLOAD_ACT
                ),
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
        sequences = self.microbatches.sequences
        if sequences is not None:  # an action counts slices, each of which reads its microbatch
            batches = [batch for batch in batches for _ in range(sequences.part.slices)]
        self.microbatches.begin(batches, training=training, keeps_logits=keep_logits)
        self._scale = scale
        self.counter.step, self.counter.first_microbatch = step, first_microbatch
        clock = self._clock = self._clocks[training]
        # A post-validated step begins as one that ends AHEAD. CHAIN's program is equal up to TAKE_BACK, which chooses.
        score = self._use(len(batches), self._outline.plan.end if training else None)
        for extension in self.extensions:
            extension.begin(batches, training=training, keeps_logits=keep_logits)
        parcels = self._parcels if self.extensions else None
        lengths = None if sequences is None else sequences.lengths(batches)
        self._mail.begin(score.row, batches, training=training, parcels=parcels, lengths=lengths)
        clock.begin()
        for lane in self._lanes:
            lane.clock = clock
        with torch.set_grad_enabled(training), self.counter.driving():
            self._play(clock)
        counts, loss_sum = self.microbatches.counts(), self.microbatches.loss_sum()
        ended = self.microbatches.take()
        return Outcome(loss_sum, counts, ended.losses, logits=tuple(ended.logits), clock=clock)

    def _parcels(self, action: Action) -> list[Parcel] | None:
        found = (extension.parcels(action) for extension in self.extensions)
        return next((each for each in found if each is not None), None)

    def _use(self, microbatches: int, end: Ending | None) -> _Score:
        """Select the program to execute."""
        # In this order. Where a program begins, the position is -1 and other threads look no further; at TAKE_BACK the
        # old position has the same line in the new program.
        score = self._score = self._score_of(microbatches, end)
        is_training = self.microbatches.state.is_training
        self._page.use(score.table, len(score.calls), self.counter.step + 1 if is_training else 0)
        calls, instructions = score.calls, score.program.instructions
        if self.is_timed:
            calls = tuple(partial(self._timed, *each) for each in zip(instructions, calls, strict=True))
        if self.before:  # outside of the timing, so the time of an observer is not the instruction's
            firsts = [self.before.get(each.do) for each in instructions]
            observed = zip(firsts, calls, strict=True)
            calls = tuple(call if first is None else partial(_in_turn, first, call) for first, call in observed)
        self.counter.timing = self._clock if self.is_timed else None
        if self.kept is not None:
            self.kept.chosen, self.kept.needs = score.leaving, partial(most_away, instructions)
        self.counter.load(calls, instructions, score.forwards)
        return score

    def _timed(self, instruction: Instruction, call: Callable[[], None]) -> None:
        start = self._clock.now()
        call()
        self._clock.took(instruction, start)

    def _play(self, clock: ProgramClock) -> None:
        counter, is_profiled = self.counter, is_profiling()
        assert self._score is not None, "a program was chosen"
        self._take_scale()
        counter.at = nth = 0
        try:
            while nth < len(self._score.parts):
                part = self._score.parts[nth]
                start = clock.now()
                try:
                    with record_function(str(part.action)) if is_profiled else _UNNAMED:
                        counter.advance(part)
                except _BeginsAgain:
                    # From the first instruction. VERDICT and STEP then find no step that waits, and TAKE_BACK finds
                    # right parameters, so this happens once a step at most.
                    counter.at = nth = 0
                    continue
                clock.add(part.action, start)
                nth += 1
        except AtollError:
            raise
        except (Exception, SystemExit) as error:  # a model's sys.exit would leave the other ranks waiting
            if counter.action.op is Op.STEP:  # errors of the optimizer or of the caller's code are raised unchanged
                raise
            raise self._failure(counter.action, error) from error

    # ---- instructions of the whole program

    def _drain(self) -> None:
        """Release everything except the results of the step."""
        self._mail.end()
        for extension in self.extensions:
            extension.end()
        self.microbatches.drain()

    def _add_up(self) -> None:
        self.end.add_up(self.microbatches.loss_sum(), self.microbatches.counts(), self._clock.busy)

    def _begin_again(self) -> None:
        """Discard the work so far if the previous step was wrong, since it used wrong parameters. Otherwise the step
        continues, and ends as the verdict says."""
        batches = self.microbatches.state.batches
        # [Note: a step ahead of its verdict] in step_end.py. No backward has run yet, so no gradient of this step has
        # been written: there are activations, gathered copies and messages to discard.
        if self.end.roll_back():
            self.microbatches.begin(batches, training=True)
            for extension in self.extensions:
                extension.end()
                extension.begin(batches, training=True, keeps_logits=False)
            # Senders also begin this step again, and repeat the sends that preceded their own verdict. Discard the
            # messages of the first time that have arrived, and the receives posted for them.
            later = [instruction.action for instruction in self.counter.instructions[self.counter.at :]]
            self._mail.begin_again(self.waits.stale(dict.fromkeys(later)))
            raise _BeginsAgain
        # The new program is equal up to here, and so are its parts: the position and the part in progress stay right.
        self._use(len(batches), self.end.choose())
        self._take_scale()

    def _take_scale(self) -> None:
        if self._scale is not None:
            scale = self.microbatches.state.scale = self._scale()
            self.end.routers.take_scale(scale, self.end.tokens)

    # ---- where this rank is

    def doing(self) -> Doing | None:
        """Return the current instruction and the ranks it may wait for; None between programs. Thread-safe."""
        # The watch's thread reads without a lock. If the program is replaced in between, one heartbeat names a wrong
        # line; the bounds keep it from raising.
        at, score, step = self._page.numbers[AT], self._score, self.counter.step
        if score is None or not 0 <= at < len(score.awaits):
            return None
        words = f"{row_of(step + 1 if self.microbatches.state.is_training else 0)}, {score.awaits[at].what}"
        return Doing(words, score.awaits[at].waits_for, (step << STEP_BITS) + at, program=score.name)

    def _failure(self, action: Action, error: BaseException) -> RunError:
        place = self._transport.place
        where = f"rank {place.rank} ({', '.join(f'{axis} {at}' for axis, at in place.coordinates.items())})"
        what = f"step {self.counter.step + 1}, action {action}"
        if action.microbatch is not None:
            own = self.microbatches.sequences
            slices = 1 if own is None else own.part.slices
            whole, nth = divmod(action.microbatch, slices)
            what += f", global microbatch {self.counter.first_microbatch + whole}"
            what += f", slice {nth} of {slices}" if slices > 1 else ""
        peer = self.waits.peer_of(action)
        if peer is not None:
            what += f", peer rank {peer}"
        return RunError(f"{where}, {what}: {type(error).__name__}: {error}")


def _in_turn(first: Callable[[], None], then: Callable[[], None]) -> None:
    first()
    then()


def _key(step: Instruction) -> StageMicrobatch:
    return step.action.stage, -1 if step.action.microbatch is None else step.action.microbatch


def _play_forward(on: Executor, step: Instruction) -> Callable[[], None]:
    """The first F runs the model, which calls the other blocks: the counter gets to their F only where the model has
    skipped them."""
    first = on.microbatches.stages[step.action.stage].blocks[0].index == step.of
    return partial(on.counter.forward, *_key(step)) if first else skip


def _play_backward(on: Executor, step: Instruction) -> Callable[[], None]:
    stage = on.microbatches.stages[step.action.stage]
    return partial(on.microbatches.block_backward, stage.blocks[step.of - stage.run.start], _key(step))


def _post(on: Executor, step: Instruction) -> Callable[[], None]:
    return partial(on._mail.post, step.action)


def _of_kept(act: Callable[[KeptActivations, tuple[Operation, int, int]], None], row: Operation) -> Play:
    """Return the play of an instruction of activation offloading. row: the one that begins the copy to host memory."""

    def play(on: Executor, step: Instruction) -> Callable[[], None]:
        assert on.kept is not None, "a program has these if the plan does"
        return partial(act, on.kept, (row, step.of, step.action.microbatch or 0))

    return play


def _offload_owed(on: Executor, step: Instruction) -> Callable[[], None]:
    return partial(on.microbatches.offload_owed, on.units[step.of], _key(step))


PLAYS.update(
    {
        Do.F: _play_forward,
        Do.I: _play_backward,
        Do.W: lambda on, step: partial(on.microbatches.weights, on.units[step.of], _key(step)),
        Do.FINISH_F: of_microbatch(Microbatches.finish_forward),
        Do.START_I: of_microbatch(Microbatches.start_input_backward),
        Do.FINISH_I: of_microbatch(Microbatches.finish_input_backward),
        Do.FINISH_W: of_microbatch(Microbatches.finish_weights),
        Do.SEND_F: of_microbatch(Microbatches.send_forward),
        Do.RECV_F: of_microbatch(Microbatches.receive_forward),
        Do.SEND_B: of_microbatch(Microbatches.send_backward),
        Do.RECV_B: of_microbatch(Microbatches.receive_backward),
        Do.GATHER: of_unit(Unit.begin_gather),
        Do.WHOLE: of_unit(Unit.gather),  # waits for what GATHER began, or gathers here if nothing was begun
        Do.FETCH: of_unit(Unit.gather),
        Do.FREE: of_unit(Unit.free),
        Do.REDUCE: of_phase(Unit.reduce_gradients),
        Do.REDUCED: of_phase(Unit.end_reduction),
        Do.SYNC: of_phase(Unit.sync_gradients),
        Partial.OFFLOAD_PART: of_phase(partial(begin_part, is_back=False)),
        Partial.OFFLOADED_PART: of_phase(partial(end_part, is_back=False)),
        Partial.ONLOAD_PART: of_phase(partial(begin_part, is_back=True)),
        Partial.ONLOADED_PART: of_phase(partial(end_part, is_back=True)),
        Kept.OFFLOAD_ACT: _of_kept(KeptActivations.offload, Kept.OFFLOAD_ACT),
        Kept.OFFLOADED_ACT: _of_kept(KeptActivations.free, Kept.OFFLOAD_ACT),
        Kept.ONLOAD_ACT: _of_kept(KeptActivations.onload, Kept.OFFLOAD_ACT),
        Kept.ONLOADED_ACT: _of_kept(KeptActivations.arrive, Kept.OFFLOAD_ACT),
        Kept.OFFLOAD_OWED: _offload_owed,
        Kept.OFFLOADED_OWED: _of_kept(KeptActivations.free, Kept.OFFLOAD_OWED),
        Kept.ONLOAD_OWED: _of_kept(KeptActivations.onload, Kept.OFFLOAD_OWED),
        Kept.ONLOADED_OWED: _of_kept(KeptActivations.arrive, Kept.OFFLOAD_OWED),
        Do.DRAIN: lambda on, _: on._drain,
        Do.SUMS: lambda on, _: on._add_up,
        Do.TAKE_BACK: lambda on, _: on._begin_again,
        **dict.fromkeys((row for row in OPERATIONS.values() if row.posts), _post),
        **{row: of_end(act) for row, act in OF_UNIT.items()},
        **{row: of_all(act) for row, act in OF_ALL.items()},
    }
)
check_complete()
