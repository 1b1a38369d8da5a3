"""The end of a step: gradient norm, verdict, clipping, optimizer. `atoll.program.end` gives the order.

With a post-validated step, no rank waits for the norm: the forwards of the next step fill the cool-down of this one,
and the verdict is needed only before the next backward. If the step was wrong, all ranks roll back their parameter
shards and run the forwards again.

[Note: a step ahead of its verdict] Step k and the next one on two pipeline ranks, 1F1B with two microbatches. Both step
ahead, and then the norm of all stages is above `clip`:

              step k         | k + 1, on a guess            | k + 1 again, rolled back
    rank 0        B1 AHEAD TOTAL F0 F1 VERDICT STEP TAKE_BACK F0 F1 .  B0 .  B1 SUMS PASS AHEAD
    rank 1  B1 AHEAD TOTAL .  .  F0    VERDICT STEP TAKE_BACK .  F0 B0 F1 B1 SUMS .  JOIN AHEAD

    AHEAD      parameters <- step k, each unit when its gradients arrive, as if nothing were clipped. Masters, states
               and gradients stay as they are
    TOTAL      begins to add up the sums of all ranks, and nobody waits for it
    VERDICT    waits for the sums: from here on all ranks know the same
    STEP       masters and states <- step k, clipped. If it is refused or skipped, they stay. The gradients, kept until
               now, are discarded
    TAKE_BACK  rolls back: parameters <- masters (with a codec between groups see `Segment.roll_back`). F0, F1 and the
               message between them are discarded, and the program begins again; VERDICT then finds no step to wait for

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
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from atoll.base.faults import Fault, Rollback
from atoll.program import Do, Ending, Hosted, Operation
from atoll.runtime.pipeline.routing import Routers
from atoll.runtime.pipeline.sums import SUMS_HEAD, RankSums, StepSums
from atoll.runtime.sharding.host_steps import StepTerms
from atoll.runtime.sharding.optimizer import ShardedOptimizer
from atoll.runtime.sharding.unit import Unit, UnitSpec
from atoll.runtime.transport import Later, Transport


@dataclass(slots=True)
class LossScaler:
    """Keeps half gradients in range: losses are scaled up by a power of two, gradients back down.

    A step that overflows is skipped and halves the scale; `growth_steps` good ones in a row double it. A loss that is
    not finite, or gradients that are not where the scale is 1 already, are no overflow: no scale would help.
    """

    scale: float = 2.0**16  # a power of two, so scaling rounds nothing; never below 1
    growth_steps: int = 2000
    good_steps: int = 0  # since the last overflow or growth

    @property
    def can_shrink(self) -> bool:
        """True if a smaller scale could keep gradients in range."""
        return self.scale > 1.0

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


@dataclass(slots=True)
class _Outstanding:
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
    sums: StepSums
    touched: frozenset[str] = frozenset()
    # From SUMS on: the tokens of each expert, of all ranks, for the step of selection biases.
    routed: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    # A guess, made before SUMS, or along the chain what SUMS and JOIN decide. None: nothing is stepped ahead.
    ahead: frozenset[str] | None = None
    # None along the chain, whose sums are in messages between neighbours.
    everyone: Later | None = None
    verdict: StepSums | None = None
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

    `OF_ALL` says what an instruction calls here, `unit_end.OF_UNIT` what it does to a unit. SUMS is given the losses of
    the program: `add_up`.

    was_right: whether the parameters were right up to the last verdict, so that nothing has to be rolled back.
    busy: seconds that this rank computed in the last step.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        specs: Sequence[UnitSpec],
        optimizer: ShardedOptimizer,
        transport: Transport,
        *,
        routers: Routers,
        clip: float | None,
        scaler: LossScaler | None,
        is_post_validated: bool,
    ) -> None:
        self._units = tuple(units)
        self._ranks = RankSums(units, specs, transport)
        self.optimizer = optimizer
        self._transport = transport
        self.routers = routers
        self.clip = clip
        self.scaler = scaler  # None unless compute is fp16; `Engine.load` replaces it
        self._is_post_validated = is_post_validated
        # This rank's parameters that had gradients in the last step, if STEP took it unchanged: the guess for this one.
        # None otherwise and at first. Which of both is the same on all ranks, as it follows from the verdict.
        self._usual: frozenset[str] | None = None
        # The step of the running program, from `begin` on. Here a placeholder that nothing reads.
        self._now = _Outstanding(0, 0, 0.0, options=[], sums=StepSums(torch.zeros(SUMS_HEAD), 1))
        # The same object from SUMS to STEP: within one program, or post-validated across the beginning of the next one,
        # where `_now` already is the following step. Its gradients are held as long.
        self._outstanding: _Outstanding | None = None
        # From STEP until the engine takes them, one or the other. RETURN asks `_result` whether there is a step.
        self._result: StepResult | None = None
        self._refused: Refused | None = None
        self._look: Callable[[], None] | None = None  # of `begin`; VERDICT calls it
        # Written by STEP and read by TAKE_BACK: whether the parameters are right, and if not, whether the masters were
        # stepped.
        self.was_right = True
        self._was_taken = False
        # Of the last step that was taken, from STEP on, for units whose state rests in host memory.
        self.terms = StepTerms()
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
        self.optimizer.remember_options(options)
        sums = StepSums(torch.zeros(SUMS_HEAD), tokens)
        self._now = _Outstanding(step, tokens, since, options=options, sums=sums, is_rehearsal=is_rehearsal)
        self._look = look

    @property
    def loss_scale(self) -> float:
        """The factor of the loss before its backward, by which the gradients are then divided."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def tokens(self) -> int:
        """The divisor of the running step's loss, applied before its backward."""
        return self._now.tokens

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
        self.wait()
        self.conclude()
        self.roll_back()

    def roll_back(self) -> bool:
        """Roll back the parameter shards if the step was applied before its verdict and rejected. Return True then."""
        if self.was_right:
            return False
        # All ranks of a stage get here, as the verdict is the same: the syncs that begin here match.
        for unit in self._units:
            unit.roll_back(was_applied=self._was_taken)
        return True

    def forget(self) -> None:
        """Discard the step."""
        self._outstanding = None
        self.optimizer.forget()
        self.routers.undo()
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

    # ---- sums

    def add_up(
        self, loss_sum: torch.Tensor | None, counts: Sequence[torch.Tensor | float], busy: Callable[[], float]
    ) -> None:
        """Sum over the data-parallel ranks what the verdict needs.

        counts: what losses said that they are sums over.  busy: gives the seconds that were computed.
        """
        now = self._now
        routers = self.routers
        loss_sum = routers.loss_sum(loss_sum, counts, now.tokens)
        read, routed = self._ranks.read(loss_sum, counts, routers.counts())
        self.busy = busy()  # the device has passed its events
        idle = 1.0 - self.busy / max(time.monotonic() - now.begin, 1e-9)
        now.sums, now.touched, now.routed = self._ranks.add_up(read, idle, now.tokens, routed=routed)
        if self._is_post_validated and not now.is_rehearsal:  # [Note: biases ahead of the verdict] in routing.py
            routers.step(now.routed)
        self._outstanding = now
        self._allow()

    def total(self) -> None:
        """Start the sum over stages."""
        self._now.everyone = self._ranks.begin_total(self._now.sums)

    def join(self) -> None:
        """Add the sums of the pipeline ranks before."""
        values = self._now.sums.values
        values += self._ranks.before(values)
        self._allow()  # again: SUMS has allowed what this rank's sums alone allow

    def pass_on(self) -> None:
        """Give the sums to the next pipeline rank."""
        self._ranks.pass_on(self._now.sums.values)

    def wait(self) -> None:
        """Wait for the verdict on the outstanding step."""
        step = self._outstanding
        if step is None:  # in the first step, after `settle`, and in a program that begins again
            return
        if step.everyone is None:
            step.verdict = self._ranks.come_back(step.sums)
        else:
            step.verdict = StepSums(step.everyone.wait(), step.tokens)
        if self._look is not None:
            self._look()

    # ---- steps

    def _allow(self) -> None:
        """Decide whether a step along the chain is taken ahead, given the sums so far; in other forms, do nothing."""
        if self._is_post_validated and self._usual is None:
            is_taken = self._now.sums.is_unchanged(self.clip) and not self._now.is_rehearsal
            self._now.ahead = self._now.touched if is_taken else None

    def correct(self) -> None:
        """Step units ahead once more whose parameters with gradients were guessed wrong."""
        now = self._now
        assert now.ahead is not None, "a step was guessed"
        if now.ahead != now.touched:
            # In the order of AHEAD. Each rank of a unit knows the same `touched`, and guessed from the same, so all of
            # them step it again. It starts where AHEAD did: stepping ahead leaves masters and states as they were.
            for unit in reversed(self._units):
                if any((name in now.ahead) != (name in now.touched) for name, _ in unit.trained()):
                    if self.optimizer.hosted.has(unit):
                        self._correct_hosted(unit)
                        continue
                    if self.optimizer.has_matrices(unit):
                        self.optimizer.collect_ahead(unit, now.touched)
                        self.optimizer.transform(unit)
                        self.optimizer.update_ahead(unit)
                    self.optimizer.step_ahead(unit, now.touched)

    def _correct_hosted(self, unit: Unit) -> None:
        """The same of a unit whose state rests in host memory."""
        hosted, touched = self.optimizer.hosted, self._now.touched
        if hosted.steps_there(unit):
            unit.end_step()
            hosted.begin_ahead(unit, touched)
            return
        hosted.onload(unit)
        hosted.step_ahead(unit, touched)
        unit.sync_parameters(is_ahead=True)
        hosted.offload(unit)
        hosted.drop(unit)

    def conclude(self) -> None:
        """Take the step finally, or refuse it."""
        step, self._outstanding = self._outstanding, None
        # Before the return: a program that begins again gets here without a step, and TAKE_BACK, which has rolled the
        # parameters back, must not begin it once more.
        self.was_right = True
        if step is None:
            return
        sums = step.verdict
        assert sums is not None, "VERDICT comes before STEP"
        is_finite = sums.is_finite
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
        is_unchanged = sums.is_unchanged(self.clip)
        self.was_right = step.is_rehearsal or is_unchanged
        self._usual = step.touched if self._is_post_validated and is_unchanged else None
        # An overflow is of gradients: the scale multiplies the backward's start, and no loss.
        can_overflow = self.scaler is not None and self.scaler.can_shrink
        has_overflowed = not is_finite and can_overflow and math.isfinite(sums.loss)
        if step.is_rehearsal or not (is_finite or has_overflowed):
            bad = tuple(at for at, norm in enumerate(sums.norms.tolist()) if not math.isfinite(norm))
            self._refused = Refused(replace(result, seconds=time.monotonic() - step.begin), bad)
            self._was_taken = False
            self.optimizer.forget()
            self.routers.undo()
            for unit in self._units:
                unit.clear_gradients()
                unit.clear_residuals()  # they may hold what is not finite, and would carry it into the next step
            return
        # Wait for the previous step's parameter sync: it may still read what the optimizer is about to write, as p and
        # master can be one storage.
        for unit in self._units:
            unit.wait_for_parameters()
        if is_finite:
            self.terms = StepTerms(step.touched, sums.factor(self.clip), step.options)
            self.optimizer.step(self.terms)
            if self._is_post_validated:  # otherwise the program has COLLECT, TRANSFORM and UPDATE after STEP
                self.optimizer.commit()
            else:
                self.routers.step(step.routed)
            self.routers.confirm()
        else:
            self.optimizer.forget()
            self.routers.undo()
        self._was_taken = is_finite
        # Post-validated, the next backward is about to write to these buffers.
        for unit in self._units:
            if not is_finite or self._is_post_validated or not self.optimizer.hosted.waits_for_step(unit):
                unit.clear_gradients()
            if not is_finite:
                unit.clear_residuals()
            if self.was_right:
                unit.confirm()
        if self.scaler is not None:
            self.scaler.update(is_finite=is_finite)
        self._result = replace(result, seconds=time.monotonic() - step.begin)

    @property
    def ahead(self) -> frozenset[str] | None:
        """The parameters with which the running step is stepped ahead of its verdict; None if it is not."""
        return self._now.ahead

    @property
    def is_taken(self) -> bool:
        """True if the step was made for good: nothing was written where it was skipped or refused."""
        return not self._is_post_validated and self._result is not None and not self._result.skipped


OF_ALL: Mapping[Operation, Callable[[StepEnd], None]] = {
    Do.QUIET: lambda end: end._transport.memory.wait_for_readers(),
    Do.CORRECT: StepEnd.correct,
    Do.JOIN: StepEnd.join,
    Do.PASS: StepEnd.pass_on,
    Do.TOTAL: StepEnd.total,
    Do.VERDICT: StepEnd.wait,
    Do.STEP: StepEnd.conclude,
    Hosted.LANDED: lambda end: end.optimizer.hosted.leave(),
}
"""The calls that execute the instructions of the step's end on all units; `unit_end` has those on one."""
