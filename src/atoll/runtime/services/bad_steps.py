"""A step whose loss or gradients are not finite: find the fault, then stop, skip the step, or load a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from atoll.base.errors import BadStepError, CheckpointError, DamageError, RankError
from atoll.base.faults import (
    ROLLBACKS,
    SKIPS_IN_A_ROW,
    BadStepAnswer,
    BadStepPolicy,
    Fault,
    NonFinite,
    Rollback,
    Sighting,
)
from atoll.runtime.assemble.rank import Rank
from atoll.runtime.batches import BatchShare
from atoll.runtime.pipeline.executor import Outcome
from atoll.runtime.pipeline.probe import Probe, bad_parameter, first_of_all, places_of
from atoll.runtime.pipeline.step_end import Refused, StepResult
from atoll.runtime.services.checkpoints import Checkpoints


class Replay(Protocol):
    """Executes the program of the step after `step` again."""

    def __call__(self, share: BatchShare, step: int, *, is_rehearsal: bool) -> object:
        """is_rehearsal: the step is refused whatever its result is."""


class BadSteps:
    """The policy for bad steps, and what it has led to.

    policy: what to do.  replay: executes a step again.  load: loads a checkpoint into the engine.
    """

    def __init__(
        self,
        policy: BadStepPolicy,
        rank: Rank,
        checkpoints: Checkpoints,
        *,
        replay: Replay,
        load: Callable[[Path], dict[str, Any]],
    ) -> None:
        self.policy = policy
        self._plan, self._sharded = rank.plan, rank.sharded
        self._blocks = [block.name for block in rank.adapter.blocks()]
        self._end, self._executor, self._checkpoints = rank.end, rank.executor, checkpoints
        self._transport, self._agreement = rank.transport, rank.agreement
        self._replay, self._load = replay, load
        self._skips = self._rollbacks = 0  # in a row; rollbacks since a step beyond the furthest refused one
        self._furthest = 0
        # The last two steps, by number: a post-validated step is judged when the next one has run.
        self._played: dict[int, tuple[BatchShare, Outcome]] = {}

    def remember(self, step: int, share: BatchShare, outcome: Outcome) -> None:
        """Keep a step until it is judged."""
        self._played = {at: played for at, played in self._played.items() if at == step - 1}
        self._played[step] = share, outcome

    def count(self, result: StepResult | None) -> StepResult | None:
        """Record that a step was taken."""
        if result is not None and not result.skipped:
            self._skips = 0
            if result.step > self._furthest:
                self._rollbacks = 0
        return result

    def answer(self, refused: Refused) -> StepResult:
        """Apply the policy to a bad step and return its result with the fault. Raises BadStepError on every rank if the
        run stops; the state is then that before the step."""
        step = refused.result.step
        self._end.cancel()
        fault = self._find(refused)
        result = replace(refused.result, fault=fault)
        why = "Nothing was updated"
        if self.policy.answer is BadStepAnswer.SKIP:
            self._skips += 1
            if fault.is_of_parameters:
                why = "Nothing was updated; skipping steps does not repair parameters"
            elif self._skips > SKIPS_IN_A_ROW:
                why = f"Nothing was updated in the {SKIPS_IN_A_ROW} steps before either, which were skipped"
            else:
                return result
        if self.policy.answer is BadStepAnswer.ROLLBACK:
            self._rollbacks += 1
            self._furthest = max(self._furthest, step)
            if self._rollbacks > ROLLBACKS:
                why = f"Nothing was updated; {ROLLBACKS} rollbacks did not bring the run beyond step {self._furthest}"
            elif rollback := self._roll_back(step - self.policy.steps):
                return replace(result, rollback=rollback)
            else:
                why = f"There is no complete checkpoint of step {max(0, step - self.policy.steps)} or before"
        narrow = ", or use precision fp32" if self._plan.precision.compute in ("float16", "bfloat16") else ""
        others = [f'"{each}"' for each in ("skip", "rollback N") if not each.startswith(self.policy.answer)]
        raise BadStepError(
            f"{fault.describe()}\n{why}. Lower the learning rate, clip the gradient norm{narrow}; or continue past "
            f"such steps with bad_steps = {' or '.join(others)}",
            fault=fault,
        )

    def _roll_back(self, step: int) -> Rollback | None:
        """Load the newest complete checkpoint of `step` or before; return None on every rank if there is none."""
        with suppress(CheckpointError, RankError):  # a failed save is not a checkpoint to return to
            self._checkpoints.finish()
        known = self._checkpoints.known
        while (found := self._checkpoints.newest(step)) is not None:
            try:
                return Rollback(found, known[found], self._load(known[found]))
            except DamageError:
                del known[found]
        return None

    # ---- the fault

    def _find(self, refused: Refused) -> Fault:
        """Find where a step's values became non-finite: in the parameters, or in the replayed step."""
        step, specs, place = refused.result.step, self._sharded.specs, self._transport.place
        share, outcome = self._played[step]
        count, slices = self._plan.schedule.whole_microbatches, self._plan.schedule.slices
        first, total = place.share * count, count * self._plan.mesh.shares
        names = places_of(specs)
        # If the replay does not show the fault again, the losses of the step itself tell more.
        probe = Probe(place.rank, first=first, size=self._plan.microbatch, names=names, slices=slices)
        last = len(self._blocks) - 1
        for microbatch, loss in outcome.losses.items():
            probe.look(NonFinite.LOSS, [loss], last, microbatch=microbatch)
        with self._agreement.guard(f"looking for the fault of step {step}", self._executor.doing):
            for unit in self._sharded.units:  # a step that was taken back may still be on its way to the parameters
                unit.wait_for_parameters()
            bad = bad_parameter(self._sharded.units, place.rank, names)
            of_step, marked = first_of_all([*probe.seen, *([bad] if bad else [])], self._transport, total)
        was_repeated, cause = True, of_step
        if of_step is None or of_step.made is not NonFinite.PARAMETER:
            probe = Probe(place.rank, first=first, size=self._plan.microbatch, names=names, slices=slices)
            self._executor.microbatches.probe = probe
            try:
                self._replay(share, step - 1, is_rehearsal=True)
            finally:
                self._executor.microbatches.probe = None
            with self._agreement.guard(f"looking for the fault of step {step}"):
                self._end.settle()
                again = self._end.take_refused()
                assert again is not None, "a rehearsal is refused"
                was_repeated = not again.is_finite
                cause, seen = first_of_all(probe.seen, self._transport, total)
            marked = seen or marked
        return self._describe(refused, cause if was_repeated else None, marked, was_repeated=was_repeated)

    def _describe(
        self, refused: Refused, cause: Sighting | None, marked: Sequence[int], *, was_repeated: bool
    ) -> Fault:
        specs, size = self._sharded.specs, self._plan.microbatch
        fault = Fault(
            refused.result.step,
            refused.result.loss,
            refused.result.grad_norm,
            units=tuple(specs[at].name for at in refused.units),
            microbatches=tuple(marked),
            was_repeated=was_repeated,
        )
        if cause is None:
            return fault
        names = [name for spec in specs for name in spec.names]
        block = self._blocks[cause.block] if cause.block >= 0 else "vocabulary"
        coordinates = self._plan.mesh.place(cause.rank).coordinates.items()
        held = f"rank {cause.rank} ({', '.join(f'{axis} {at}' for axis, at in coordinates)})"
        name = names[cause.name] if cause.name >= 0 else ""
        if cause.made is NonFinite.PARAMETER:
            what = f"parameter {name} on {held}, before the step: an earlier update or a load wrote it"
            return replace(fault, rank=cause.rank, block=block, what=what, is_of_parameters=True)
        at = cause.microbatch * size
        samples = range(at, at + size) if cause.sample < 0 else range(at + cause.sample, at + cause.sample + 1)
        said = {
            NonFinite.INPUT: f"what block {block} received in the forward",
            NonFinite.OUTPUT: f"the output of block {block}",
            NonFinite.LOSS: "the loss, from a finite output of the model",
            NonFinite.GRADIENT: f"the gradient that the backward of block {block} began with",
            NonFinite.WEIGHT_GRADIENT: f"the gradient of {name}",
            NonFinite.INPUT_GRADIENT: f"the gradient of the input of block {block}",
        }[cause.made]
        which = f"sample {samples[0]}" if len(samples) == 1 else f"one of samples {samples[0]} to {samples[-1]}"
        what = f"{said}, in microbatch {cause.microbatch} on {held}; {which} of the step"
        return replace(fault, rank=cause.rank, block=block, microbatch=cause.microbatch, samples=samples, what=what)
