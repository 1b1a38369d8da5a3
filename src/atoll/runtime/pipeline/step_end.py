"""The end of a step: gradient norm, verdict, clipping, optimizer. `atoll.program.end` gives the order.

With a post-validated step, no rank waits for the norm: the forwards of the next step fill the cool-down of this one,
and the verdict is needed only before the next backward. If the step was wrong, all ranks bring right parameters back
and run the forwards again.

[Note: a step ahead of its verdict] Step k and the next one on two pipeline ranks, 1F1B with two microbatches. Both step
ahead, and then the norm of all stages is above `clip`:

              step k         | k + 1, on a guess            | k + 1 again, on right parameters
    rank 0        B1 AHEAD TOTAL F0 F1 VERDICT STEP TAKE_BACK F0 F1 .  B0 .  B1 SUMS PASS AHEAD
    rank 1  B1 AHEAD TOTAL .  .  F0    VERDICT STEP TAKE_BACK .  F0 B0 F1 B1 SUMS .  JOIN AHEAD

    AHEAD      parameters <- step k, each unit when its gradients arrive, as if nothing were clipped. Masters, states
               and gradients stay as they are
    TOTAL      begins to add up the sums of all ranks, and nobody waits for it
    VERDICT    waits for the sums: from here on all ranks know the same
    STEP       masters and states <- step k, clipped. If it is refused or skipped, they stay. The gradients, kept until
               now, are discarded
    TAKE_BACK  parameters <- masters (with a codec between groups see `Segment.roll_back`). F0, F1 and the message
               between them are discarded, and the program begins again, where VERDICT finds no step to wait for

If the verdict is that nothing was clipped, STEP gives the masters the values that the parameters have already, and
TAKE_BACK continues the step.

The first step, and one after a wrong one, ends along the chain. Its squared norm is summed from the first pipeline rank
to the last (PASS, JOIN), and each rank steps ahead unless the sum up to it forbids it. The sum only grows, so once a
rank declines to step, all later ranks do. The last rank has the whole norm; at VERDICT the ranks pass it back, from the
last to the first.

[Note: the lazy commit] Stepping ahead writes the parameters only: the optimizer steps on its own tensors, unit by unit,
and they are restored from a copy of the unit's. After the verdict the step is repeated from the same gradients, so the
result is bitwise equal; reverting is a cast of the unchanged master. Between a step and its verdict the gradients are
kept, and no code outside the step reads the parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from atoll.base.faults import Fault, Rollback
from atoll.program import Do, Ending, Operation
from atoll.runtime.sharding.optimizer import ShardedOptimizer
from atoll.runtime.sharding.unit import Unit, UnitSpec
from atoll.runtime.transport import Channel, Exchange, Later, Tag, Transport


@dataclass(slots=True)
class LossScaler:
    """Keeps half gradients in range: losses are scaled up by a power of two, gradients back down.

    A step that overflows is skipped and halves the scale; `growth_steps` good ones in a row double it. A loss that is
    not finite, or gradients that are not where the scale is 1 already, are no overflow: no scale would help.
    """

    scale: float = 2.0**16  # a power of two, so scaling rounds nothing; never below 1
    growth_steps: int = 2000
    good_steps: int = 0  # since the last overflow or growth

    def update(self, *, is_finite: bool) -> None:
        """Record a step."""
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps == self.growth_steps:
            self.scale, self.good_steps = self.scale * 2, 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a training step, the same on every rank.

    loss: mean over what counts.  tokens: labels that count, or samples where a batch has no labels.
    grad_norm: before clipping.  seconds: wall time on this rank.
    bubble: share of the step, up to the optimizer, in which pipeline ranks did not compute, averaged over ranks.
    skipped: whether the step changed nothing, because fp16 overflowed or because of the policy for bad steps.
    fault: where a bad step's numbers first were not finite.  rollback: the checkpoint that was loaded after it.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    bubble: float
    skipped: bool = False
    fault: Fault | None = None
    rollback: Rollback | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second."""
        return self.tokens / self.seconds


_HEAD = 4
"""Sums that come before those of the units: loss, idle share, counts that losses gave, and how many did."""


@dataclass(slots=True)
class _Sums:
    """Values summed over ranks, always in the same order of additions: the head, then each unit's squared norm.

    tokens: what the loss was divided by before its backward, on all ranks.

    [Note: a loss that counts] How much a loss is a sum over may be known only when the last microbatch has run forward.
    By then backwards have run, divided by the labels that count. So gradients are right except for one factor, which is
    exactly 1 where no loss says otherwise, and is applied together with clipping. Pipeline ranks that do not know it
    yet take it for 1: a step that was taken ahead with the wrong factor is taken back, as one that is clipped is.
    """

    # On the host, in float64: `_HEAD` sums, then a place for each unit of the whole model. It is zero on ranks without
    # the unit, so adding up the stages does not round the norm of a unit that is on one of them.
    values: torch.Tensor
    tokens: int

    @property
    def loss(self) -> float:
        """The mean; NaN where nothing counts."""
        return float(self.values[0]) / self._counted if self._counted > 0 else math.nan

    @property
    def correction(self) -> float:
        """The factor still to be applied to gradients."""
        return self.tokens / self._counted if self._counted > 0 else math.nan

    @property
    def _counted(self) -> float:
        return float(self.values[2]) if self.values[3] else self.tokens

    @property
    def idle(self) -> float:
        return float(self.values[1])

    @property
    def norms(self) -> torch.Tensor:
        """The squared norm of each unit."""
        return self.values[_HEAD:]

    @property
    def norm(self) -> float:
        """The norm, from the units' float64 partial sums in the model's order."""
        return float(self.norms.sum().sqrt()) * self.correction


@dataclass(slots=True)
class _Unsettled:
    """A step until its verdict.

    options: of the optimizer's groups, as they were when the step began.
    sums, touched: of this rank's stage, then of the ranks before it too; the parameters that have gradients.
    ahead: the parameters that it was stepped ahead with, where it was.
    everyone: the sums of all ranks, where they are under way.  verdict: what they say.
    is_rehearsal: whether it is executed only for its sums, and never taken.
    """

    step: int
    tokens: int
    begin: float
    # A copy: the caller may set the next step's rates before STEP.
    options: list[dict[str, Any]]
    # Zeros until SUMS; JOIN adds to them in place.
    sums: _Sums
    touched: frozenset[str] = frozenset()
    # A guess, made before SUMS, or along the chain what SUMS and JOIN decide. None: nothing is stepped ahead.
    ahead: frozenset[str] | None = None
    # None along the chain, whose sums are in messages between neighbours.
    everyone: Later | None = None
    verdict: _Sums | None = None
    is_rehearsal: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A step that was not taken, as its loss or gradients are not finite.

    result: what is known of it.  units: places of the units whose gradients are not finite.
    """

    result: StepResult
    units: tuple[int, ...]

    @property
    def is_finite(self) -> bool:
        """True if the values are finite nevertheless, as a rehearsal's may be."""
        return math.isfinite(self.result.loss) and math.isfinite(self.result.grad_norm)


class StepEnd:
    """Ends the steps of this rank.

    The two tables say what an instruction of a unit, or of all, calls. SUMS is given what the row gave: `add_up`.

    was_right: whether the parameters were right up to the last verdict.
    busy: seconds that this rank computed in the last step.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        specs: Sequence[UnitSpec],
        optimizer: ShardedOptimizer,
        transport: Transport,
        *,
        clip: float | None,
        scaler: LossScaler | None,
        is_post_validated: bool,
    ) -> None:
        # In the model's order, the same on all ranks of a stage: what is summed over them is laid out in it.
        self._units = tuple(units)
        self._specs = tuple(specs)  # of the whole model
        self._optimizer = optimizer
        self._transport = transport
        self.clip = clip
        self.scaler = scaler  # None unless compute is fp16; `Engine.load` replaces it
        self._is_post_validated = is_post_validated
        # This rank's parameters that had gradients in the last step, if STEP took it unchanged: the guess for this one.
        # None otherwise and at first. Which of both is the same on all ranks, as it follows from the verdict.
        self._usual: frozenset[str] | None = None
        # The step of the running program, from `begin` on. Here a placeholder that nothing reads.
        self._now = _Unsettled(0, 0, 0.0, options=[], sums=_Sums(torch.zeros(_HEAD), 1))
        # The same object from SUMS to STEP: within one program, or post-validated across the beginning of the next one,
        # where `_now` already is the following step. Its gradients are held as long.
        self._outstanding: _Unsettled | None = None
        # From STEP until the engine takes them, one or the other. RETURN asks `_result` whether there is a step.
        self._result: StepResult | None = None
        self._refused: Refused | None = None
        self._look: Callable[[], None] | None = None  # of `begin`; VERDICT calls it
        # Written by STEP and read by TAKE_BACK: whether the parameters are right, and if not, whether the masters have
        # moved.
        self.was_right = True
        self._was_taken = False
        self.busy = 0.0

    # ---- between programs

    def begin(
        self,
        *,
        step: int,
        tokens: int,
        since: float,
        look: Callable[[], None] | None = None,
        is_rehearsal: bool = False,
    ) -> None:
        """Prepare for a step's program. since: begin of the step on the monotonic clock.  look: called
        when the gradients are complete.  is_rehearsal: the step is refused whatever its result is."""
        options: list[dict[str, Any]] = []
        self._optimizer.remember_options(options)
        sums = _Sums(torch.zeros(_HEAD), tokens)
        self._now = _Unsettled(step, tokens, since, options=options, sums=sums, is_rehearsal=is_rehearsal)
        self._look = look

    @property
    def loss_scale(self) -> float:
        """The factor of the loss before its backward, by which the gradients are then divided."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def is_outstanding(self) -> bool:
        """True if a step waits for its verdict."""
        return self._outstanding is not None

    def choose(self) -> Ending:
        """Choose the ending of this step from the verdict on the previous one: ahead of its own verdict, assuming
        gradients of the same parameters, if that one was taken unchanged. The choice is the same on all ranks."""
        self._now.ahead = self._usual
        return Ending.CHAIN if self._usual is None else Ending.AHEAD

    def settle(self) -> None:
        """Apply the verdict if no step follows: do the work of VERDICT, STEP and TAKE_BACK, without a replay."""
        self._wait()
        self._conclude()
        self.take_back()

    def take_back(self) -> bool:
        """Restore right parameters if a step wrote wrong ones. Return True if it did."""
        if self.was_right:
            return False
        # All ranks of a stage get here, as the verdict is the same: the syncs that begin here match.
        for unit in self._units:
            unit.roll_back(was_applied=self._was_taken)
        return True

    def forget(self) -> None:
        """Discard the step."""
        self._outstanding = None
        self._optimizer.forget()
        for unit in self._units:
            unit.clear_gradients()
            unit.clear_residuals()

    def cancel(self) -> None:
        """Discard the step that waits for its verdict, and what it has written before that; all ranks do."""
        if self._outstanding is not None:
            # It followed a refused step and so ended along the chain, where VERDICT alone sends the verdict: no message
            # of it is in flight.
            self.forget()
            for unit in self._units:
                unit.roll_back(was_applied=False)

    def take_refused(self) -> Refused | None:
        """Return the step that was refused last, if it has not been taken yet."""
        refused, self._refused = self._refused, None
        return refused

    def take_result(self) -> StepResult | None:
        """Return the result of the step that was settled last, if it has not been taken yet."""
        result, self._result = self._result, None
        # After the program: RETURN is part of the time of a step that is not post-validated.
        if result is not None and not self._is_post_validated:
            return replace(result, seconds=time.monotonic() - self._now.begin)
        return result

    @property
    def correction(self) -> float:
        """The factor still to be applied to the gradients that `look` sees: see [Note: a loss that counts]."""
        verdict = None if self._outstanding is None else self._outstanding.verdict
        assert verdict is not None, "the gradients are complete"
        return verdict.correction

    # ---- gradients

    def _settle(self, unit: Unit) -> None:
        unit.wait_for_gradients()
        unit.wait_for_parameters()  # of what the step did not use: see [Note: reading in place]

    def _unscale(self, unit: Unit) -> None:
        # In a program STEP alone changes the scale, and none is between a step's first backward and here.
        unit.scale_gradients(1.0 / self.loss_scale)

    def add_up(
        self, loss_sum: torch.Tensor | None, counts: Sequence[torch.Tensor | float], busy: Callable[[], float]
    ) -> None:
        """Sum over the data-parallel ranks what the verdict needs.

        counts: what losses said that they are sums over.  busy: gives the seconds that were computed.
        """
        # One transfer of all that the host has to know, and so one wait for the device: each wait leaves it without
        # work until the host has launched more.
        read = self._read(
            [*(unit.squared_norm() for unit in self._units), 0.0 if loss_sum is None else loss_sum, *counts]
        )
        loss, *counted = read[len(self._units) :]
        partials = torch.zeros(len(self._specs), dtype=torch.float64)
        for unit, norm in zip(self._units, read, strict=False):  # after the norms come the loss and the counts
            partials[unit.spec.index] = norm
        self.busy = busy()  # the device has passed its events
        idle = 1.0 - self.busy / max(time.monotonic() - self._now.begin, 1e-9)
        head = torch.tensor([loss, idle, sum(counted), len(counted)], dtype=torch.float64)
        # A parameter that this rank's samples did not use has a gradient if another rank's did: the flags say on how
        # many ranks. Without them, ranks of one parameter could disagree whether the optimizer steps it.
        names = [(unit, name) for unit in self._units for name, _ in unit.trained()]
        flags = torch.tensor([name in unit.touched for unit, name in names], dtype=torch.float64)
        values = self._transport.total_stage(torch.cat([head, partials, flags]))
        flags = values[_HEAD + len(self._specs) :]
        self._share_flags(names, flags)
        now = self._outstanding = self._now
        now.touched = frozenset(name for (_, name), flag in zip(names, flags.tolist(), strict=True) if flag)
        now.sums = _Sums(values[: _HEAD + len(self._specs)], now.tokens)
        self._allow()

    def _read(self, values: Sequence[torch.Tensor | float]) -> list[float]:
        """Return numbers, of which some are on the device."""
        device = self._transport.device
        there = [each.detach().to(device, torch.float64) for each in values if isinstance(each, torch.Tensor)]
        read = iter(torch.stack(there).tolist() if there else ())
        return [next(read) if isinstance(each, torch.Tensor) else float(each) for each in values]

    def _share_flags(self, names: Sequence[tuple[Unit, str]], flags: torch.Tensor) -> None:
        """Mark a shared parameter as touched if any of its copies is."""
        for unit in self._units:
            if len(unit.owners) > 1:
                own = [at for at, (owner, _) in enumerate(names) if owner is unit]
                shared = flags[own]
                # Of this channel and unit, `sum_copies` has a tag for each segment, and no segment is LAST.
                self._transport.total_ordered(shared, unit.owners, Tag(Channel.SHARED, unit.spec.index, Tag.LAST))
                flags[own] = shared

    # ---- sums of all ranks

    def _total(self) -> None:
        """Start the sum over stages; the ranks of one stage already have the same values."""
        now, place = self._now, self._transport.place
        own = now.sums.values
        if place.mesh.pipeline == 1:
            now.everyone = Exchange([own], [])  # a stage's ranks are all ranks
        else:
            # The ranks of a stage have equal sums since SUMS, so one of them speaks; the same bits arrive everywhere.
            said = own if self._transport.speaks else torch.zeros_like(own)
            now.everyone = self._transport.total_together_later(said)

    def _join(self) -> None:
        # One message for a link and step, and the tag needs no step: the sender's next PASS is after a VERDICT that
        # needs this JOIN.
        place, values = self._transport.place, self._now.sums.values
        before = torch.zeros_like(values, device=self._transport.device)
        self._transport.receive(before, place.peers("pp")[place.pp - 1], Tag(Channel.CHAIN, place.pp - 1)).wait()
        values += before.cpu()
        self._allow()  # again: SUMS has allowed what this rank's sums alone allow

    def _pass(self) -> None:
        place = self._transport.place
        passed = self._now.sums.values.to(self._transport.device, copy=True)
        self._transport.post(passed, place.peers("pp")[place.pp + 1], Tag(Channel.CHAIN, place.pp))

    def _wait(self) -> None:
        step = self._outstanding
        if step is None:  # in the first step, after `settle`, and in a program that begins again
            return
        if step.everyone is None:
            step.verdict = self._come_back(step)
        else:
            step.verdict = _Sums(step.everyone.wait(), step.tokens)
        if self._look is not None:
            self._look()

    def _come_back(self, step: _Unsettled) -> _Sums:
        """Return the last rank's sums, passed back along the pipeline."""
        place = self._transport.place
        line = place.peers("pp")
        sums = step.sums
        if place.pp + 1 < len(line):
            verdict = torch.zeros_like(sums.values, device=self._transport.device)
            self._transport.receive(verdict, line[place.pp + 1], Tag(Channel.VERDICT, place.pp)).wait()
            sums = _Sums(verdict.cpu(), step.tokens)
        if place.pp > 0:
            passed = sums.values.to(self._transport.device, copy=True)
            self._transport.post(passed, line[place.pp - 1], Tag(Channel.VERDICT, place.pp - 1))
        return sums

    # ---- steps

    def _allow(self) -> None:
        """Decide whether a step along the chain is taken ahead, given the sums so far; in other forms, do nothing."""
        if self._is_post_validated and self._usual is None:
            is_taken = self._is_right(self._now.sums) and not self._now.is_rehearsal
            self._now.ahead = self._now.touched if is_taken else None

    def _step_ahead(self, unit: Unit) -> None:
        if self._now.ahead is not None:
            self._optimizer.step_ahead(unit, self._now.ahead)

    def _correct(self) -> None:
        now = self._now
        assert now.ahead is not None, "a step was guessed"
        if now.ahead != now.touched:
            # In the order of AHEAD. Each rank of a unit knows the same `touched`, and guessed from the same, so all of
            # them step it again. It starts where AHEAD did: stepping ahead leaves masters and states as they were.
            for unit in reversed(self._units):
                if any((name in now.ahead) != (name in now.touched) for name, _ in unit.trained()):
                    if self._optimizer.has_matrices(unit):
                        self._optimizer.collect_ahead(unit, now.touched)
                        self._optimizer.transform(unit)
                        self._optimizer.update_ahead(unit)
                    self._optimizer.step_ahead(unit, now.touched)

    def _collect(self, unit: Unit) -> None:
        if self._is_taken:
            self._optimizer.collect(unit)
        elif self._now.ahead is not None:
            self._optimizer.collect_ahead(unit, self._now.ahead)

    def _transform(self, unit: Unit) -> None:
        if self._is_taken or self._now.ahead is not None:
            self._optimizer.transform(unit)

    def _update(self, unit: Unit) -> None:
        if self._is_taken:
            self._optimizer.update(unit)
        elif self._now.ahead is not None:
            self._optimizer.update_ahead(unit)

    def _conclude(self) -> None:
        """Take the step finally, or refuse it."""
        step, self._outstanding = self._outstanding, None
        # Before the return: a program that begins again gets here without a step, and TAKE_BACK, which has brought the
        # parameters back, must not begin it once more.
        self.was_right = True
        if step is None:
            return
        sums = step.verdict
        assert sums is not None, "VERDICT comes before STEP"
        is_finite = _is_finite(sums)
        result = StepResult(
            step.step,
            sums.loss,
            sums.norm,
            tokens=step.tokens,
            seconds=0.0,
            bubble=sums.idle / len(self._transport.together),
            skipped=not is_finite,
        )
        # A rehearsal never steps ahead, so the parameters are right.
        self.was_right = step.is_rehearsal or self._is_right(sums)
        self._usual = step.touched if self._is_post_validated and self._is_right(sums) else None
        # An overflow is of gradients: the scale multiplies the backward's start, and no loss.
        has_overflowed = not is_finite and self._can_overflow and math.isfinite(sums.loss)
        if step.is_rehearsal or not (is_finite or has_overflowed):
            bad = tuple(at for at, norm in enumerate(sums.norms.tolist()) if not math.isfinite(norm))
            self._refused = Refused(replace(result, seconds=time.monotonic() - step.begin), bad)
            self._was_taken = False
            self._optimizer.forget()
            for unit in self._units:
                unit.clear_gradients()
                unit.clear_residuals()  # they may hold what is not finite, and would carry it into the next step
            return
        # The optimizer writes where the previous parameter sync may still read: p and master can be one storage.
        for unit in self._units:
            unit.wait_for_parameters()
        if is_finite:
            self._optimizer.step(step.touched, self._scale(sums), step.options)
            if self._is_post_validated:  # otherwise the program has COLLECT, TRANSFORM and UPDATE after STEP
                self._optimizer.commit()
        else:
            self._optimizer.forget()
        self._was_taken = is_finite
        # Post-validated, the next backward is about to write to these buffers.
        for unit in self._units:
            unit.clear_gradients()
            if not is_finite:
                unit.clear_residuals()
            if self.was_right:
                unit.confirm()
        if self.scaler is not None:
            self.scaler.update(is_finite=is_finite)
        self._result = replace(result, seconds=time.monotonic() - step.begin)

    @property
    def _can_overflow(self) -> bool:
        """Return True if a smaller loss scale could bring gradients back into range."""
        return self.scaler is not None and self.scaler.scale > 1.0

    def _give_back(self, unit: Unit) -> None:
        if self._is_taken:
            unit.sync_parameters()

    @property
    def _is_taken(self) -> bool:
        """Return True if the step was made for good: nothing was written where it was skipped or refused."""
        return not self._is_post_validated and self._result is not None and not self._result.skipped

    def _is_right(self, sums: _Sums) -> bool:
        """Return True if a step is taken with its gradients unchanged."""
        return _is_finite(sums) and self._scale(sums) == 1.0

    def _scale(self, sums: _Sums) -> float:
        """Return the factor of gradients: the correction, and clipping as in torch.nn.utils.clip_grad_norm_."""
        return sums.correction * (1.0 if self.clip is None else min(1.0, self.clip / (sums.norm + 1e-6)))


def _is_finite(sums: _Sums) -> bool:
    return math.isfinite(sums.loss) and math.isfinite(sums.norm)


OF_UNIT: Mapping[Operation, Callable[[StepEnd, Unit], None]] = {
    Do.SYNCED: StepEnd._settle,
    Do.UNSCALE: StepEnd._unscale,
    Do.COPIES: lambda _, unit: unit.sum_copies(),
    Do.AHEAD: StepEnd._step_ahead,
    Do.COLLECT: StepEnd._collect,
    Do.TRANSFORM: StepEnd._transform,
    Do.UPDATE: StepEnd._update,
    Do.RETURN: StepEnd._give_back,
}
"""The calls that execute the instructions of the step's end on a unit."""

OF_ALL: Mapping[Operation, Callable[[StepEnd], None]] = {
    Do.QUIET: lambda end: end._transport.memory.wait_for_readers(),
    Do.CORRECT: StepEnd._correct,
    Do.JOIN: StepEnd._join,
    Do.PASS: StepEnd._pass,
    Do.TOTAL: StepEnd._total,
    Do.VERDICT: StepEnd._wait,
    Do.STEP: StepEnd._conclude,
}
"""The same on all units."""
