"""The microbatches of a program on this rank: their state, and the calls that compute them and pass them on.

What one microbatch holds on a rank with a stage before it and one behind it, from its first instruction to its last:

              RECV_F   F .. FINISH_F   SEND_F   RECV_B   START_I   I of each block   FINISH_I   SEND_B   W .. FINISH_W
    inputs    |-----------------------------------------------------------------------------|
    received  |----------------------------------------- and the gradient's buffer -----------------------------------|
    passages           |--------------------------------------------- block by block |
    outputs            |----------------------------------------|
    gradients                                   |---------------|                           |-------|
    pending                                                     |--------------------------------------- unit by unit |

A receive waits for its message and a compute instruction only computes, so the timeline shows which rank waited.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from atoll.base._torch import local_part
from atoll.base.errors import RunError
from atoll.base.faults import NonFinite
from atoll.plans.ir import Op
from atoll.program import Kept, Phase
from atoll.runtime.mail import Mail, Wire
from atoll.runtime.models import Batch, Loss
from atoll.runtime.models.adapter import sum_and_count
from atoll.runtime.models.operations import nested_tensors
from atoll.runtime.models.part import SequencePart
from atoll.runtime.pipeline.block import LocalBlock, Passage, pass_on
from atoll.runtime.pipeline.deferred import Collector, Pending, compute_weights
from atoll.runtime.pipeline.kept import KeptActivations
from atoll.runtime.pipeline.probe import Probe
from atoll.runtime.pipeline.routing import Routers
from atoll.runtime.pipeline.stage import Stage
from atoll.runtime.sharding.tensors import like_parameter, whole_output
from atoll.runtime.sharding.unit import Unit

StageMicrobatch = tuple[int, int]
"""(stage, microbatch)"""

Trained = tuple[Unit, str, torch.nn.Parameter, bool, bool]
"""A trained parameter of a block: its unit and name, whether I computes its gradient, and whether it is a DTensor."""


class PartsOfSequences(Protocol):
    """The parts of sequences that a rank computes, one at a time. part: the one in progress."""

    part: SequencePart

    def lengths(self, batches: Sequence[Batch]) -> list[int]:
        """Return the positions of each action's part."""
        ...

    def clear(self) -> None:
        """Release what a program that was not finished has left."""
        ...

    def ended_backward(self, block: int) -> None:
        """Release what later slices no longer attend to, after the backward of a block."""
        ...


@dataclass(slots=True)
class ProgramState:
    """State that is passed between the instructions of a program.

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
    inputs: dict[StageMicrobatch, torch.Tensor] = field(default_factory=dict)
    # What the model's forward returned; on the last stage from FINISH_F on the loss. In training START_I releases it,
    # otherwise SEND_F, or DRAIN where the next stage is on this rank.
    outputs: dict[StageMicrobatch, torch.Tensor] = field(default_factory=dict)
    # A block's I takes its passage, so the graph of a block is freed before the I of the block before it.
    passages: dict[StageMicrobatch, dict[int, Passage]] = field(default_factory=dict)
    # By the stage whose output it is the gradient of. RECV_B writes that of its own stage. FINISH_I of stage s writes
    # that of s - 1, which START_I of s - 1 takes if that stage is here, and SEND_B otherwise.
    gradients: dict[StageMicrobatch, torch.Tensor | None] = field(default_factory=dict)
    # What I leaves for W: [Note: what waits for W] in deferred.py. From START_I to FINISH_W; the W of a unit takes its
    # part.
    pending: dict[StageMicrobatch, Pending] = field(default_factory=dict)
    # Kept apart from `inputs` and `gradients`, which are released in I: a pending W may hold the same buffer, and a
    # receive that is posted into it would overwrite what W reads.
    received: dict[StageMicrobatch, list[tuple[torch.Tensor, Wire]]] = field(default_factory=dict)
    # Results, without graphs. DRAIN keeps these three alone, for SUMS and for the Outcome.
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: dict[int, torch.Tensor | float] = field(default_factory=dict)
    logits: list[Any] = field(default_factory=list)


class Microbatches:
    """The calls of a microbatch's instructions on this rank.

    state: of the running program; it is replaced and not cleared field by field, so that nothing stays behind.
    probe: inspects the values of the next program, if given.
    counts_loss: whether this rank's losses are summed; of the ranks of a tensor-parallel group, which have the same,
    one does.  kept: what blocks keep in host memory, if they may.  sequences: of which parts are computed, if so.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        mail: Mail,
        *,
        loss: Loss,
        collector: Collector,
        routers: Routers,
        counts_loss: bool,
        kept: KeptActivations | None = None,
        sequences: PartsOfSequences | None = None,
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self._mail = mail
        self._loss = loss
        self._collector = collector  # the one that this rank's linear layers append to
        self._routers = routers
        self._counts_loss = counts_loss
        self.kept, self.sequences = kept, sequences
        # By block, once for all steps: parameters keep their identity, also as a DTensor that is laid out anew.
        self._trained = {block.index: _trained(block) for stage in stages for block in stage.blocks}
        self.state = ProgramState((), is_training=False)
        self.probe: Probe | None = None

    # ---- between the instructions of microbatches

    def begin(self, batches: Sequence[Batch], *, training: bool, keeps_logits: bool = False) -> None:
        """Begin a program; this also releases what one that raised has left behind.

        batches: of each microbatch, whole; each is repeated for its slices, as actions count.
        """
        self.state = ProgramState(batches, is_training=training, keeps_logits=keeps_logits)
        self._routers.begin()
        if self.kept is not None:
            self.kept.begin()
        if self.sequences is not None:
            self.sequences.clear()

    def enter(self, microbatch: int | None) -> None:
        """Begin with an action of a microbatch, or of none."""
        if self.sequences is not None and microbatch is not None:
            self.sequences.part.enter(microbatch, self.state.batches[microbatch])

    def drain(self) -> None:
        """Release everything except the results."""
        ended = self.state
        self.state = ProgramState(
            (), is_training=ended.is_training, losses=ended.losses, counts=ended.counts, logits=ended.logits
        )

    def take(self) -> ProgramState:
        """End the program. Return its results."""
        ended, self.state = self.state, ProgramState((), is_training=False)
        return ended

    def loss_sum(self) -> torch.Tensor | None:
        """Return the sum of this rank's losses, if it has and counts any."""
        losses = self.state.losses
        return torch.stack(list(losses.values())).sum() if losses and self._counts_loss else None

    def counts(self) -> tuple[torch.Tensor | float, ...]:
        """Return what the losses say that they are sums over. Raises RunError if only some of them do."""
        counts, losses = self.state.counts, self.state.losses
        if 0 < len(counts) < len(losses):
            raise RunError(
                f"the loss returned a count for {len(counts)} of {len(losses)} microbatches; it gives a sum for each, "
                "or a pair (sum, count) for each"
            )
        return tuple(counts.values()) if self._counts_loss else ()

    # ---- forward; the blocks themselves are run by the model's own forward (`counter.py`)

    def take_output(self, stage: int, microbatch: int) -> torch.Tensor:
        """Return what the stage's forward has returned, which is then released, as is its input without training."""
        state, key = self.state, (stage, microbatch)
        if not state.is_training:
            state.inputs.pop(key, None)
            state.received.pop(key, None)
        return state.outputs.pop(key)

    def finish_forward(self, stage: int, microbatch: int) -> None:
        """Compute the loss on the last stage, or the input of the next stage."""
        state, at = self.state, self.stages[stage]
        output = self.take_output(stage, microbatch)
        if at.is_last and state.keeps_logits:
            state.logits.append(whole_output(output))
            return
        if at.is_last:
            output, count = sum_and_count(self._loss(output, state.batches[microbatch]))
            output = whole_output(output)
            if count is not None:
                state.counts[microbatch] = count.detach() if isinstance(count, torch.Tensor) else count
            state.losses[microbatch] = output.detach()
            self.look(NonFinite.LOSS, [output], at.run.stop - 1, microbatch=microbatch)
        # For the backward, or for SEND_F: without either, nothing would take it out before DRAIN.
        is_passed = not at.is_last and stage + 1 in self.stages
        if state.is_training or not (at.is_last or is_passed):
            state.outputs[stage, microbatch] = output
        if is_passed:
            # Between two stages of a rank there is no message, but the same cut: a leaf, in which FINISH_I of the next
            # stage finds the gradient.
            passed = output.detach()
            state.inputs[stage + 1, microbatch] = passed.requires_grad_(output.requires_grad and state.is_training)

    # ---- backward

    def start_input_backward(self, stage: int, microbatch: int) -> None:
        """Give the gradient of the stage's output to the outputs of its last block; on the last stage, run the loss's
        own backward."""
        state, at, key = self.state, self.stages[stage], (stage, microbatch)
        output = state.outputs.pop(key)
        gradient = state.gradients.pop(key, None)
        state.pending[key] = {}
        if at.has_loss:
            gradient = torch.full_like(output, state.scale)
        if output.requires_grad:
            # Through what the model computes after its last block, up to that block's leaf. If there is nothing, the
            # output is that leaf, and the received buffer itself becomes its gradient: see `ProgramState.received`.
            pass_on(output, gradient)
        if at.entry is not None:  # for a forward that runs again in the I of its block; FINISH_I clears it
            at.entry.rows = state.inputs.get(key)

    def block_backward(self, block: LocalBlock, key: StageMicrobatch) -> None:
        """Run one block's backward. Its gradients go to the tensors' producers, and inputs of W are kept.

        If a weight with deferred W is also used outside of its linear layer, autograd computes that part of the
        gradient, and it is added to the pending ones.
        """
        passages = self.state.passages.get(key)
        passage = None if passages is None else passages.pop(block.index, None)
        if passage is None:  # the model has skipped it, or nothing of its output needs a gradient
            return
        pending = self.state.pending[key]
        if self.probe is not None:
            # The gradient from the following block or, in the last block of a stage, the received one.
            is_last = block.index == self.stages[key[0]].run.stop - 1
            made, of = (NonFinite.GRADIENT, block.index) if is_last else (NonFinite.INPUT_GRADIENT, block.index + 1)
            self.look(made, [leaf.grad for leaf in passage.leaves], of, microbatch=key[1])
        # On CUDA autograd runs a backward on a thread of its own, while this one waits in it: layers append to
        # `collected` from there, and by the end of this context it is complete.
        with self._collector.collecting() as collected:
            block.backward(passage)
        if self.sequences is not None:
            self.sequences.ended_backward(block.index)
        for unit, name, kept in collected:
            pending.setdefault(unit, []).append((name, kept))
        # Behind each block, so that what I computes is outside of the flat buffers for one block at a time, and is
        # added there in the gradient's dtype: autograd adds to `grad` in that of the parameter.
        with torch.no_grad():
            for unit, name, parameter, is_of_input, is_split in self._trained[block.index]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                parameter.grad = None
                own = local_part(like_parameter(parameter, gradient)) if is_split else gradient
                if is_of_input:
                    unit.touched.add(name)
                    unit.gradient_buffer(name, "I").add(own)
                else:  # not into the buffer of W, which is opened in W: a pending W holds no gradient buffer
                    pending.setdefault(unit, []).append((name, own))
        if self.probe is not None:
            self._look_at_gradients(block.units, "I", block.index, microbatch=key[1])

    def finish_input_backward(self, stage: int, microbatch: int) -> None:
        """Keep the input's gradient for the previous stage, zero if the output does not depend on the input."""
        state, at, key = self.state, self.stages[stage], (stage, microbatch)
        hidden = state.inputs.pop(key, None)
        state.passages.pop(key, None)
        if at.entry is not None:
            at.entry.rows = None
        if hidden is not None and hidden.requires_grad:
            # Whether a message follows is agreed once, with the shape (`Wire.has_gradient`). Without this zero, the
            # previous stage would wait for one that is never sent.
            gradient = hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)
            state.gradients[stage - 1, microbatch] = gradient
            self.look(NonFinite.INPUT_GRADIENT, [gradient], at.run.start, microbatch=microbatch)

    def offload_owed(self, unit: Unit, key: StageMicrobatch) -> None:
        """Begin to copy what W of a unit needs to host memory."""
        assert self.kept is not None, "a program has this if the plan does"
        owed = self.state.pending[key].get(unit, ())
        self.kept.owe(unit.spec.index, key[1], (each for _, kept in owed for each in nested_tensors(kept)))
        self.kept.offload((Kept.OFFLOAD_OWED, unit.spec.index, key[1]))

    def weights(self, unit: Unit, key: StageMicrobatch) -> None:
        """Compute the gradients of a unit's weights."""
        compute_weights(unit, self.state.pending[key].pop(unit, []))
        if self.probe is not None:
            block = next(at for at in unit.spec.blocks if at in self.stages[key[0]].run)
            self._look_at_gradients([unit], "W", block, microbatch=key[1])

    def finish_weights(self, stage: int, microbatch: int) -> None:
        """Release everything of the microbatch; its received buffers are reused."""
        key = stage, microbatch
        del self.state.pending[key]  # empty by now
        # Not before: [Note: received buffers] in mail.py. The products that read them have been launched, and a receive
        # into a reused buffer starts after them.
        for buffer, wire in self.state.received.pop(key, ()):
            self._mail.recycle(buffer, wire)

    # ---- messages

    def send_forward(self, stage: int, microbatch: int) -> None:
        """Send a stage's output; without training, the outbox alone holds it from now on."""
        key = stage, microbatch
        self._mail.send_forward(stage, microbatch, self.state.outputs[key])
        if not self.state.is_training:
            del self.state.outputs[key]

    def receive_forward(self, stage: int, microbatch: int) -> None:
        """Wait for the input of a stage."""
        state = self.state
        received = self._mail.receive(Op.RECV_F, stage)
        assert received is not None, "an activation is always sent"
        buffer, wire = received
        state.received[stage, microbatch] = [received]
        # A leaf of this microbatch alone: the buffer returns to `Mail` and must not take a gradient with it.
        hidden = buffer.detach()
        state.inputs[stage, microbatch] = hidden.requires_grad_(wire.has_gradient and state.is_training)

    def send_backward(self, stage: int, microbatch: int) -> None:
        """Send the gradient of a stage's input, if the previous stage needs it."""
        gradient = self.state.gradients.pop((stage - 1, microbatch), None)
        if gradient is not None:  # otherwise the receiver does not wait for it: it knows `Wire.has_gradient`
            self._mail.send_backward(stage, microbatch, gradient)

    def receive_backward(self, stage: int, microbatch: int) -> None:
        """Wait for the gradient of a stage's output, if it needs one."""
        received = self._mail.receive(Op.RECV_B, stage)
        if received is not None:
            self.state.gradients[stage, microbatch] = received[0]
            self.state.received.setdefault((stage, microbatch), []).append(received)

    # ---- a step that is inspected

    def look(
        self,
        made: NonFinite,
        values: Iterable[torch.Tensor | None],
        block: int,
        microbatch: int,
        *,
        name: str | None = None,
    ) -> None:
        """Have the probe inspect values of a training step, if there is one."""
        if self.probe is not None and self.state.is_training:
            self.probe.look(made, values, block, microbatch=microbatch, name=name)

    def _look_at_gradients(self, units: Iterable[Unit], phase: Phase, block: int, microbatch: int) -> None:
        for unit in units:
            for name, _ in unit.trained():
                self.look(
                    NonFinite.WEIGHT_GRADIENT, [unit.gradient(name, phase)], block, microbatch=microbatch, name=name
                )


def _trained(block: LocalBlock) -> tuple[Trained, ...]:
    return tuple(
        (unit, name, parameter, "I" in unit.phases_of(name), isinstance(parameter, DTensor))
        for unit in block.units
        for name, parameter in unit.trained()
    )
