"""Plays one rank's row of a schedule: a table op -> function.

The forward of a stage is the model's own, which calls its blocks one after the other; the backward of a stage is that
of its blocks, last first.

A receive's action waits for its message, a compute action only computes, so that the timeline shows who waited. A full
backward is I, the message that others wait for, then W (see deferred.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch.profiler import record_function

from atoll._torch import is_profiling, local_part
from atoll.errors import AtollError, RunError
from atoll.ir import Action, Op, Schedule
from atoll.ir.residency import held_stages
from atoll.models import Batch
from atoll.runtime.lanes import Lane
from atoll.runtime.pipeline.block import Arguments, Draw, LocalBlock, Passage, pass_on
from atoll.runtime.pipeline.clock import Clock, clock_of
from atoll.runtime.pipeline.deferred import Collector, Pending, compute_weights
from atoll.runtime.pipeline.mail import Mail, Wire
from atoll.runtime.pipeline.stage import Stage
from atoll.runtime.pipeline.vocabulary import SplitVocabulary
from atoll.runtime.sharding.segment import Phase
from atoll.runtime.sharding.tensors import like_parameter, whole_output
from atoll.runtime.sharding.unit import PHASES, Unit
from atoll.runtime.sharding.vocabulary import VocabularySlice
from atoll.runtime.transport import Transport
from atoll.trace import Span

Key = tuple[int, int]
"""(stage, microbatch)"""


_NONE: frozenset[Phase] = frozenset()

_UNNAMED: AbstractContextManager[None] = nullcontext()

_BACKWARD = frozenset({Op.RECV_B, Op.B, Op.I, Op.RECV_S, Op.S})
"""Where the first of these stands, a row's backwards begin: scores are the first part of the last stage's."""


@dataclass(slots=True)
class _Step:
    """Everything that lives from one action to another within a step.

    passages: of a microbatch, what its blocks keep for their backward.
    received: buffers of a microbatch's activation and gradient, given back after W, which may read both.
    opened: how often each stage was opened.
    """

    batches: Sequence[Batch]
    is_training: bool
    keeps_logits: bool = False
    scale: float = 1.0
    inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    passages: dict[Key, dict[int, Passage]] = field(default_factory=dict)
    gradients: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    pending: dict[Key, Pending] = field(default_factory=dict)
    received: dict[Key, list[tuple[torch.Tensor, Wire]]] = field(default_factory=dict)
    opened: Counter[int] = field(default_factory=Counter)
    losses: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a row of actions gave on this rank: the sum of its losses, its outputs where asked for, its clock.

    loss_sum: on the last stage, of one rank of a tensor-parallel group: all of them have the same.
    """

    loss_sum: torch.Tensor | None
    logits: tuple[torch.Tensor, ...]
    clock: Clock

    @property
    def spans(self) -> tuple[Span, ...]:
        """The timeline, until the next row of its kind begins; on CUDA it waits for the device."""
        return self.clock.spans()


Ends = Mapping[Key, frozenset[Phase]]


def _last_phases(row: Sequence[Action]) -> Ends:
    """With which microbatch of each stage the phases of its backward come to their end."""
    ends: dict[tuple[int, Phase], int] = {}
    for action in row:
        for phase in _PHASES_OF.get(action.op, ()):
            assert action.microbatch is not None, "a backward has a microbatch"
            ends[action.stage, phase] = action.microbatch
    return _by_microbatch((stage, phase, microbatch) for (stage, phase), microbatch in ends.items())


def _reduced_phases(row: Sequence[Action]) -> Ends:
    """In which microbatch of each stage the gradients of a phase are reduced: the last one before a REDUCE_GRAD, so
    that they leave while it computes. Where REDUCE_GRAD follows every W, phase I does not wait for it."""
    waiting: dict[tuple[int, Phase], int] = {}
    found: list[tuple[int, Phase, int]] = []
    ends = sum(action.op in (Op.W, Op.B) for action in row)
    if ends == sum(action.op is Op.REDUCE_GRAD for action in row):
        return _by_microbatch(
            (action.stage, phase, action.microbatch)
            for action in row
            for phase in _PHASES_OF.get(action.op, ())
            if action.microbatch is not None
        )
    for action in row:
        for phase in _PHASES_OF.get(action.op, ()):
            assert action.microbatch is not None, "a backward has a microbatch"
            waiting[action.stage, phase] = action.microbatch
        if action.op is Op.REDUCE_GRAD:
            own = [(action.stage, phase) for phase in PHASES if (action.stage, phase) in waiting]
            found += [(*each, waiting.pop(each)) for each in own]
    return _by_microbatch(found)


def _by_microbatch(found: Iterable[tuple[int, Phase, int]]) -> Ends:
    grouped: dict[Key, frozenset[Phase]] = {}
    for stage, phase, microbatch in found:
        grouped[stage, microbatch] = grouped.get((stage, microbatch), _NONE) | {phase}
    return grouped


@dataclass(frozen=True, slots=True)
class _Row:
    """A row as it is played, and what follows from it alone.

    first_backward: where its backwards begin.  last, reduced: see the functions.  staying: of each stage, whether it
    stays open for more than one use, UNSHARD by UNSHARD.
    """

    actions: tuple[Action, ...]
    first_backward: int
    last: Ends
    reduced: Ends
    staying: Mapping[int, tuple[bool, ...]]

    @staticmethod
    def of(actions: Sequence[Action], microbatches: int) -> _Row:
        """The part of a row that its first microbatches take."""
        row = tuple(action for action in actions if action.microbatch is None or action.microbatch < microbatches)
        first_backward = next((at for at, action in enumerate(row) if action.op in _BACKWARD), len(row))
        staying: dict[int, tuple[bool, ...]] = {}
        for action, held in zip(row, held_stages(row), strict=True):
            if action.op is Op.UNSHARD:
                staying[action.stage] = (*staying.get(action.stage, ()), action.stage in held)
        return _Row(row, first_backward, _last_phases(row), _reduced_phases(row), staying)


_PHASES_OF: Mapping[Op, tuple[Phase, ...]] = {Op.I: ("I",), Op.W: ("W",), Op.B: ("I", "W")}


class Executor:
    """Runs rows of actions on this rank's stages. `schedule` is lowered: its sends and receives are in place.

    lanes: what travels beside the rows, which is noted on their clock.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        *,
        ranks: Sequence[int],
        transport: Transport,
        collector: Collector,
        seed: int,
        lanes: Iterable[Lane] = (),
        vocabulary: VocabularySlice | None = None,
        stays: bool = False,
        reduces_each: bool = True,
    ) -> None:
        """vocabulary: this rank's slice, if it is split; whether it stays whole for a row, and is reduced each time."""
        self._lanes = tuple(lanes)
        self._stages = {stage.index: stage for stage in stages}
        self._placement = schedule.placement
        self._rows = schedule.actions
        self._first_microbatch = 0
        self._ranks = tuple(ranks)
        self._transport = transport
        self._collector = collector
        self._seed, self._step_number = seed, 0
        self._now: Key = (-1, -1)
        shown = {unit.spec.index: stage.index for stage in stages for unit in stage.units}
        if vocabulary is not None:
            shown |= {table.unit.spec.index: transport.place.pp for table in vocabulary.tables}
        self._clocks = {training: clock_of(transport.device, transport.place.pp, shown) for training in (True, False)}
        self._clock = self._clocks[False]
        self._mail = Mail(transport, self._rank_of)
        self._vocabulary: SplitVocabulary | None = None
        if vocabulary is not None:
            options = {"stays": stays, "reduces_each": reduces_each}
            self._vocabulary = SplitVocabulary(vocabulary, self._mail, schedule.placement, ranks, **options)
        self._step = _Step((), is_training=False)
        self._row = _Row.of((), 0)
        self._known: dict[tuple[int, int], tuple[Sequence[Action], _Row]] = {}
        self._acts: Mapping[Op, Callable[[int, int], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._input_backward,
            Op.W: self._weight_backward,
            Op.SEND_F: self._send_forward,
            Op.RECV_F: self._receive_forward,
            Op.SEND_B: self._send_backward,
            Op.RECV_B: self._receive_backward,
            Op.UNSHARD: self._open,
            Op.RESHARD: lambda stage, _: self._stages[stage].close(),
            Op.REDUCE_GRAD: lambda stage, _: None,  # units have been reduced as they were complete
        }
        if self._vocabulary is not None:
            self._acts = {**self._acts, **self._vocabulary_acts(self._vocabulary)}

    def _vocabulary_acts(self, split: SplitVocabulary) -> Mapping[Op, Callable[[int, int], None]]:
        return {
            Op.L: split.look_up,
            Op.S: split.score,
            Op.T: lambda _, microbatch: split.learn_score(microbatch, self._step.scale),
            Op.G: split.learn_look_up,
            Op.SEND_L: split.send_looked_up,
            Op.SEND_S: split.send_scores,
            Op.RECV_S: split.receive_scored,
            Op.SEND_T: split.send_totals,
            Op.RECV_T: split.receive_totals,
            Op.RECV_G: split.receive_gradient,
        }

    def run(
        self,
        row: Sequence[Action],
        batches: Sequence[Batch],
        *,
        step: int = 0,
        first_microbatch: int = 0,
        scale: Callable[[], float] | None = None,
        training: bool,
        keep_logits: bool = False,
        verdict: Callable[[], bool] | None = None,
    ) -> Outcome:
        """Play `row` over this rank's microbatches.

        step: the number of the training step.  first_microbatch: the global number of the first.
        scale: what the loss is multiplied by before its backward, asked when the backwards begin (1 if not given).
        Without training nothing is kept for a backward; with keep_logits the loss is not computed. `verdict` is asked
        once, before the first backward, whether the parameters were right so far; if not, the row begins again.
        """
        self._step = _Step(batches, is_training=training, keeps_logits=keep_logits)
        own = self._row = self._prepared(row, len(batches))
        before, after = own.actions[: own.first_backward], own.actions[own.first_backward :]
        self._begin(own.actions, batches, training=training, keep_logits=keep_logits)
        self._clock = self._clocks[training]
        self._clock.begin()
        for lane in self._lanes:
            lane.clock = self._clock
        self._step_number, self._first_microbatch = step, first_microbatch
        with torch.set_grad_enabled(training), self._blocks_handed():
            self._play(before)
            if verdict is not None and not verdict():
                for stage in self._stages.values():
                    stage.close()
                self._step = _Step(batches, is_training=training)
                if self._vocabulary is not None:
                    self._vocabulary.end()
                    self._vocabulary.begin(own.actions, batches, training=training)
                self._mail.begin_again(self._stale(after))
                self._play(before)
            if scale is not None:
                self._step.scale = scale()
            self._play(after)
        ended = self._step
        self._mail.end()
        if self._vocabulary is not None:
            self._vocabulary.end()
        self._step = _Step((), is_training=False)
        counts = self._transport.place.tp == 0
        loss_sum = torch.stack(ended.losses).sum() if ended.losses and counts else None
        return Outcome(loss_sum, tuple(ended.logits), self._clock)

    @contextmanager
    def _blocks_handed(self) -> Iterator[None]:
        """While a row is played, blocks run here where the model calls them. Elsewhere they run by themselves."""
        blocks = [block for stage in self._stages.values() for block in stage.blocks]
        for block in blocks:
            block.hand_to(self._block_forward)
        try:
            yield
        finally:
            for block in blocks:
                block.hand_to(None)

    def _begin(self, row: Sequence[Action], batches: Sequence[Batch], *, training: bool, keep_logits: bool) -> None:
        """Begin with the messages of a row."""
        split = self._vocabulary
        if split is None:
            self._mail.begin(row, batches, training=training)
            return
        split.begin(row, batches, training=training, keeps_logits=keep_logits)
        parcels = partial(split.parcels, batches=batches, training=training, logits=keep_logits)
        self._mail.begin(row, batches, training=training, parcels=parcels)

    def _prepared(self, row: Sequence[Action], microbatches: int) -> _Row:
        """A row for so many microbatches; rows are played many times, and kept as long as this."""
        key = id(row), microbatches
        if key not in self._known:
            self._known[key] = (row, _Row.of(row, microbatches))
        return self._known[key][1]

    def _open(self, stage: int, _: int) -> None:
        nth = self._step.opened[stage]
        self._step.opened[stage] += 1
        self._stages[stage].open(stays=self._row.staying[stage][nth])

    def _play(self, row: Sequence[Action]) -> None:
        clock = self._clock
        is_profiled = is_profiling()
        for action in row:
            microbatch = -1 if action.microbatch is None else action.microbatch
            self._now = action.stage, microbatch
            start = clock.now()
            try:
                with record_function(str(action)) if is_profiled else _UNNAMED:
                    self._acts[action.op](action.stage, microbatch)
            except AtollError:
                raise
            except Exception as error:
                raise self._failure(action, error) from error
            clock.add(action, start)

    def _stale(self, later: Sequence[Action]) -> list[tuple[Action, int]]:
        """Receives after the first backward of messages that were sent before the sender's first backward, and these
        senders."""
        early = [set(takewhile(lambda action: action.op not in _BACKWARD, row)) for row in self._rows]
        found = []
        for receive in later:
            for rank, send in self._sends_of(receive):
                if send in early[rank]:
                    found.append((receive, self._ranks[rank]))
        return found

    def _sends_of(self, receive: Action) -> Iterator[tuple[int, Action]]:
        """What a receive of a forward waits for: pipeline ranks, and their sends."""
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

    def _failure(self, action: Action, error: Exception) -> RunError:
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
        """The world rank that a message's action talks to."""
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
        step, at = self._step, self._stages[stage]
        key = (stage, microbatch)
        batch = step.batches[microbatch]
        hidden = step.inputs.get(key)
        output = at.forward(hidden, batch)
        if not step.is_training:
            step.inputs.pop(key, None)
            step.received.pop(key, None)
        if at.is_last and self._vocabulary is not None:
            self._vocabulary.take_scored(microbatch, output)
            step.outputs[key] = output
            return
        if at.is_last and step.keeps_logits:
            step.logits.append(whole_output(output))
            return
        if at.is_last:
            output = whole_output(at.adapter.loss(output, batch))
            step.losses.append(output.detach())
        if step.is_training or not at.is_last:
            step.outputs[key] = output
        if not at.is_last and self._is_here(stage + 1):
            passed = output.detach()
            step.inputs[stage + 1, microbatch] = passed.requires_grad_(output.requires_grad and step.is_training)

    def _block_forward(self, block: LocalBlock, given: Arguments) -> Any:
        """A block's forward, where the model's own calls it."""
        stage, microbatch = self._now
        at = self._stages[stage]
        at.gather(block)
        output, passage = block.forward(given, self._draw(microbatch))
        at.leave(block, backward=False)
        if passage is not None:
            self._step.passages.setdefault(self._now, {})[block.index] = passage
        return output

    def _draw(self, microbatch: int) -> Draw:
        return Draw(self._seed, self._step_number, self._first_microbatch + microbatch)

    def _backward(self, stage: int, microbatch: int) -> None:
        """I, the message that waits for it, then W: the stage before goes on while the weights are computed.

        Under recompute W follows block by block instead: what W keeps of a whole recomputed stage would be many times
        what the microbatch kept of it before.
        """
        at, key = self._stages[stage], (stage, microbatch)
        left = list(at.units)
        for block in self._input_backwards(stage, microbatch):
            if at.is_recomputed:
                ready = [unit for unit in left if unit in block.units and unit.ends_at(block.index, backward=True)]
                ready = [unit for unit in ready if not unit.spec.is_shared]
                self._weights(ready, key)
                left = [unit for unit in left if unit not in ready]
        if not self._is_here(stage - 1):
            self._send_backward(stage, microbatch)
        self._end_weights(left, key)

    def _input_backward(self, stage: int, microbatch: int) -> None:
        for _ in self._input_backwards(stage, microbatch):
            pass

    def _input_backwards(self, stage: int, microbatch: int) -> Iterator[LocalBlock]:
        """The backward of each block, last first; the gradient of the stage's input at the end."""
        step, at, key = self._step, self._stages[stage], (stage, microbatch)
        hidden = step.inputs.pop(key, None)
        output = step.outputs.pop(key)
        gradient = step.gradients.pop(key, None)
        passages = step.passages.pop(key, {})
        step.pending[key] = {}
        if at.is_last and self._vocabulary is None:
            gradient = torch.full_like(output, step.scale)
        if output.requires_grad:
            pass_on(output, gradient)
        del output, gradient
        if at.looked_up is not None:
            at.looked_up.rows = hidden
        is_reduced = "I" in self._row.reduced.get(key, _NONE)
        is_last = "I" in self._row.last.get(key, _NONE)
        for block in reversed(at.blocks):
            if block.needs_backward:
                at.gather(block)
                self._block_backward(block, passages.pop(block.index, None), step.pending[key])
                at.leave(block, backward=True)
            if is_reduced:
                for unit in at.completes[block.index]:
                    unit.reduce_gradients("I", is_last=is_last)
            yield block
        if at.looked_up is not None:
            at.looked_up.rows = None
        if hidden is None or not hidden.requires_grad:
            return
        # A stage whose output does not depend on its input still owes the one before it a gradient.
        owed = hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)
        step.gradients[stage - 1, microbatch] = owed

    def _block_backward(self, block: LocalBlock, passage: Passage | None, pending: Pending) -> None:
        """One block's backward; its gradients go to where they are made, and what W needs is kept.

        A weight whose gradient belongs to W, but which was used outside of its linear layer too, gets that part through
        autograd: it joins what is pending.
        """
        if passage is None:
            return
        with self._collector.collecting() as collected:
            block.backward(passage)
        for unit, name, kept in collected:
            pending.setdefault(unit, []).append((name, kept))
        with torch.no_grad():
            for unit in block.units:
                for name, parameter in unit.trained():
                    gradient, parameter.grad = parameter.grad, None
                    if gradient is None:
                        continue
                    own = local_part(like_parameter(parameter, gradient))
                    if "I" in unit.phases_of(name):
                        unit.touched.add(name)
                        unit.room(name, "I").add(own)
                    else:
                        pending.setdefault(unit, []).append((name, own))

    def _weight_backward(self, stage: int, microbatch: int) -> None:
        self._end_weights(self._stages[stage].units, (stage, microbatch))

    def _weights(self, units: Sequence[Unit], key: Key) -> None:
        reduces, is_last = ("W" in ends.get(key, _NONE) for ends in (self._row.reduced, self._row.last))
        compute_weights(units, self._step.pending[key], reduces=reduces, is_last=is_last)

    def _end_weights(self, units: Sequence[Unit], key: Key) -> None:
        """W, after which nothing of the microbatch is left."""
        self._weights(units, key)
        del self._step.pending[key]
        for buffer, wire in self._step.received.pop(key, ()):
            self._mail.recycle(buffer, wire)

    # ---- messages

    def _send_forward(self, stage: int, microbatch: int) -> None:
        step, key = self._step, (stage, microbatch)
        if self._vocabulary is not None and stage == self._vocabulary.last_stage:
            self._vocabulary.send_scored(microbatch, step.outputs[key])
        else:
            self._mail.send_forward(stage, microbatch, step.outputs[key])
        if not step.is_training:
            del step.outputs[key]

    def _receive_forward(self, stage: int, microbatch: int) -> None:
        step = self._step
        if stage == 0 and self._vocabulary is not None:
            step.inputs[stage, microbatch] = self._vocabulary.receive_looked_up(microbatch)
            return
        received = self._mail.receive(Op.RECV_F, stage)
        assert received is not None, "an activation is always sent"
        buffer, wire = received
        step.received[stage, microbatch] = [received]
        hidden = buffer.detach()
        step.inputs[stage, microbatch] = hidden.requires_grad_(wire.has_gradient and step.is_training)

    def _send_backward(self, stage: int, microbatch: int) -> None:
        """Send what a backward owes, unless the backward did so itself."""
        gradient = self._step.gradients.pop((stage - 1, microbatch), None)
        if gradient is None:
            return
        if stage == 0:
            assert self._vocabulary is not None, "nothing lies before stage 0 but the slices of a vocabulary"
            self._vocabulary.send_gradient(microbatch, gradient)
        else:
            self._mail.send_backward(stage, microbatch, gradient)

    def _receive_backward(self, stage: int, microbatch: int) -> None:
        if self._vocabulary is not None and stage == self._vocabulary.last_stage:
            self._receive_scores(self._vocabulary, microbatch)
            return
        received = self._mail.receive(Op.RECV_B, stage)
        if received is not None:
            self._step.gradients[stage, microbatch] = received[0]
            self._step.received.setdefault((stage, microbatch), []).append(received)

    def _receive_scores(self, split: SplitVocabulary, microbatch: int) -> None:
        """The loss and what the last stage's backward begins with; or the logits."""
        step, key = self._step, (split.last_stage, microbatch)
        found, gradient = split.receive_scores(microbatch)
        (step.logits if step.keeps_logits else step.losses).append(found)
        if step.is_training and gradient is not None:
            step.gradients[key] = gradient.mul_(step.scale).to(step.outputs[key].dtype)
