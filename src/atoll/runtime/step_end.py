"""The end of a step: the global norm, the check, clipping, the optimizer; at once, or validated afterwards.

At once, all ranks add up the norm and wait for it. Post-validated (Zero Bubble, arXiv 2401.10241, section 4), nobody
waits, so that the next step's forwards fill this step's drain:

    1. each rank has stepped each unit as its gradients arrived. It sends its sums to all, and what all sums say is the
       verdict, which it waits for before its first backward of the next step
    2. where the step before was clipped or refused, it does not guess: it takes the sums of the pipeline ranks before
       it, adds its own, passes them on, and steps unless what it knows already forbids it; the norm only grows, so once
       a rank declines, all later ones do. The last rank knows everything; its verdict travels back
    3. a rank that stepped wrongly takes its step back, takes the right one, and runs the forwards again

[Note: the lazy commit] Stepping ahead writes the parameters alone: the optimizer steps on its true tensors, unit by
unit, and they are put back from a copy of that unit's. The verdict makes the step for good, from the same gradients,
so the result is the same to the last bit; taking it back is a cast of the untouched master. Between a step and its
verdict the gradients live on and nobody reads the parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from atoll.errors import RunError
from atoll.runtime.pipeline.executor import Outcome
from atoll.runtime.sharding.optimizer import ShardedOptimizer
from atoll.runtime.sharding.unit import Unit, UnitSpec
from atoll.runtime.transport import Channel, Exchange, Later, Tag, Transport


@dataclass(slots=True)
class LossScaler:
    """Keeps half gradients in range: losses are scaled up by a power of two, gradients back down.

    A step that overflows is skipped and halves the scale; `growth_steps` good ones in a row double it.
    """

    scale: float = 2.0**16
    growth_steps: int = 2000
    good_steps: int = 0

    def update(self, *, is_finite: bool) -> None:
        """Take note of a step."""
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps == self.growth_steps:
            self.scale, self.good_steps = self.scale * 2, 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step gave, the same on every rank.

    loss: mean over the step's tokens.  grad_norm: before clipping.  seconds: wall time on this rank.
    bubble: share of the step that the pipeline's ranks on average did not compute, up to the optimizer.
    skipped: whether the step changed nothing because fp16 overflowed.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    bubble: float
    skipped: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second."""
        return self.tokens / self.seconds


@dataclass(slots=True)
class _Sums:
    """Loss, idle share and squared norm of each unit, summed over some ranks; always the same additions."""

    values: torch.Tensor

    @property
    def loss(self) -> float:
        return float(self.values[0])

    @property
    def idle(self) -> float:
        return float(self.values[1])

    @property
    def norm(self) -> float:
        """From the units' float64 partials, in the model's order."""
        return float(self.values[2:].sum().sqrt())


@dataclass(slots=True)
class Ending:
    """A step whose actions are over, until its verdict. everyone: the sums of all ranks, where they are under way."""

    step: int
    tokens: int
    begin: float
    sums: _Sums
    touched: frozenset[str]
    options: list[dict[str, Any]] = field(default_factory=list)
    has_stepped: bool = False
    everyone: Later | None = None


class StepEnd:
    """What happens to a step's gradients on this rank."""

    def __init__(
        self,
        units: Sequence[Unit],
        specs: Sequence[UnitSpec],
        optimizer: ShardedOptimizer,
        transport: Transport,
        *,
        clip: float | None,
        scaler: LossScaler | None,
    ) -> None:
        self._units = tuple(units)
        self._specs = tuple(specs)
        self._optimizer = optimizer
        self._transport = transport
        self.clip = clip
        self.scaler = scaler
        self._usual: frozenset[str] | None = None

    def gather_up(self, outcome: Outcome, *, step: int, tokens: int, begin: float, steps_ahead: bool) -> Ending:
        """Sync the gradients, and sum over the data-parallel ranks what the check needs.

        steps_ahead: whether units may be stepped as their gradients arrive: where the step before was taken as it was,
        and as if the same parameters had gradients. Both are the same on all ranks, and so is the order of the syncs.
        """
        options: list[dict[str, Any]] = []
        self._optimizer.remember_options(options)
        guess = self._usual if steps_ahead else None
        for unit in reversed(self._units):
            unit.sync_gradients()
        for unit in self._arrived():
            unit.sum_copies()
            if self.scaler is not None:
                unit.scale_gradients(1.0 / self.scaler.scale)
            if guess is not None:
                self._optimizer.step_ahead(unit, guess)
        partials = torch.zeros(len(self._specs), dtype=torch.float64)
        if self._units:
            norms = torch.stack([unit.squared_norm() for unit in self._units]).cpu()
            partials[[unit.spec.index for unit in self._units]] = norms
        loss = 0.0 if outcome.loss_sum is None else float(outcome.loss_sum)
        # The norms have just waited for the device.
        idle = 1.0 - outcome.clock.busy() / max(time.monotonic() - begin, 1e-9)
        head = torch.tensor([loss, idle], dtype=torch.float64)
        names = [(unit, name) for unit in self._units for name, _ in unit.trained()]
        flags = torch.tensor([name in unit.touched for unit, name in names], dtype=torch.float64)
        values = self._transport.total_stage(torch.cat([head, partials, flags]))
        flags = values[2 + len(self._specs) :]
        self._share_flags(names, flags)
        touched = frozenset(name for (_, name), flag in zip(names, flags.tolist(), strict=True) if flag)
        if guess is not None and guess != touched:
            for unit in reversed(self._units):
                if any((name in guess) != (name in touched) for name, _ in unit.trained()):
                    self._optimizer.step_ahead(unit, touched)
        sums = _Sums(values[: 2 + len(self._specs)])
        return Ending(step, tokens, begin, sums, touched, options, has_stepped=guess is not None)

    def _arrived(self) -> Iterator[Unit]:
        """Units whose gradients have come, in the order of the backward."""
        units = list(reversed(self._units))
        if self.scaler is not None or any(len(unit.owners) > 1 for unit in units):
            for unit in units:
                self._settle(unit)
            self._transport.wait_for_readers()  # of whole gradients, which are about to be written
            yield from units
            return
        for unit in units:
            self._settle(unit)
            yield unit

    def _settle(self, unit: Unit) -> None:
        unit.settle_gradients()
        unit.settle_parameters()  # of what the step did not use: see [Note: reading in place]

    def _share_flags(self, names: Sequence[tuple[Unit, str]], flags: torch.Tensor) -> None:
        """A shared parameter is touched where any of its copies is."""
        for unit in self._units:
            if len(unit.owners) > 1:
                own = [at for at, (owner, _) in enumerate(names) if owner is unit]
                shared = flags[own]
                self._transport.total_ordered(shared, unit.owners, Tag(Channel.SHARED, unit.spec.index, Tag.LAST))
                flags[own] = shared

    # ---- at once

    def finish(self, ending: Ending) -> StepResult:
        """Wait for all ranks' sums, then step."""
        return self._conclude(ending, _Sums(self._everyone(ending).wait()))

    def _everyone(self, ending: Ending) -> Later:
        """The sums of all ranks; those of one stage have the same already."""
        own, place = ending.sums.values, self._transport.place
        if place.mesh.pipeline == 1:
            return Exchange([own], [])  # a stage's ranks are all ranks
        return self._transport.total_later(own if place.data == place.tp == 0 else torch.zeros_like(own))

    # ---- validated afterwards

    def step_ahead(self, ending: Ending) -> None:
        """Send the sums to all; or, where nothing has been stepped, add to those of the ranks before, pass them on, and
        step unless they forbid it."""
        if ending.has_stepped:
            ending.everyone = self._everyone(ending)
            return
        place = self._transport.place
        line = place.peers("pp")
        if place.pp > 0:
            before = torch.zeros_like(ending.sums.values, device=self._transport.device)
            self._transport.receive(before, line[place.pp - 1], Tag(Channel.CHAIN, place.pp - 1)).wait()
            ending.sums.values += before.cpu()
        if place.pp + 1 < len(line):
            passed = ending.sums.values.to(self._transport.device, copy=True)
            self._transport.post(passed, line[place.pp + 1], Tag(Channel.CHAIN, place.pp))
        if _is_finite(ending.sums) and self._scale(ending.sums) == 1.0:
            for unit in reversed(self._units):
                self._optimizer.step_ahead(unit, ending.touched)
            ending.has_stepped = True

    def settle(self, ending: Ending) -> tuple[StepResult, bool]:
        """Wait for the verdict and make it true; whether the parameters were right so far."""
        sums = self._verdict(ending) if ending.everyone is None else _Sums(ending.everyone.wait())
        was_right = _is_finite(sums) and self._scale(sums) == 1.0
        if ending.has_stepped and not _is_finite(sums):
            for unit in self._units:
                unit.sync_parameters()
        return self._conclude(ending, sums), was_right

    def _verdict(self, ending: Ending) -> _Sums:
        """The last rank's sums, passed back along the pipeline."""
        place = self._transport.place
        line = place.peers("pp")
        sums = ending.sums
        if place.pp + 1 < len(line):
            verdict = torch.zeros_like(sums.values, device=self._transport.device)
            self._transport.receive(verdict, line[place.pp + 1], Tag(Channel.VERDICT, place.pp)).wait()
            sums = _Sums(verdict.cpu())
        if place.pp > 0:
            passed = sums.values.to(self._transport.device, copy=True)
            self._transport.post(passed, line[place.pp - 1], Tag(Channel.VERDICT, place.pp - 1))
        return sums

    # ---- both

    def _conclude(self, ending: Ending, sums: _Sums) -> StepResult:
        """Make the step for good, or refuse it."""
        is_finite = _is_finite(sums)
        self._usual = ending.touched if is_finite and self._scale(sums) == 1.0 else None
        if not is_finite and self.scaler is None:
            raise RunError(
                f"step {ending.step}: loss {sums.loss} (sum over tokens), gradient norm {sums.norm}: not finite. "
                f"Nothing was updated. Lower the learning rate, set train.clip, or use precision fp32"
            )
        for unit in self._units:
            unit.settle_parameters()
        if is_finite:
            self._optimizer.step(ending.touched, self._scale(sums), ending.options)
        for unit in self._units:
            unit.clear_gradients()
            if is_finite and not (ending.has_stepped and self._scale(sums) == 1.0):
                unit.sync_parameters()
        if self.scaler is not None:
            self.scaler.update(is_finite=is_finite)
        return StepResult(
            ending.step,
            sums.loss / ending.tokens,
            sums.norm,
            ending.tokens,
            seconds=time.monotonic() - ending.begin,
            bubble=sums.idle / self._transport.place.mesh.world,
            skipped=not is_finite,
        )

    def _scale(self, sums: _Sums) -> float:
        """What clipping multiplies the gradients by, as torch.nn.utils.clip_grad_norm_ does."""
        return 1.0 if self.clip is None else min(1.0, self.clip / (sums.norm + 1e-6))


def _is_finite(sums: _Sums) -> bool:
    return math.isfinite(sums.loss) and math.isfinite(sums.norm)
