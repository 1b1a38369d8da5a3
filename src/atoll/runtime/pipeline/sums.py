"""The sums behind the verdict on a step: loss, norms and counts over the ranks, and the messages that add them up.

add_up        the ranks of a stage            in SUMS: every rank of it then has the same numbers
begin_total   all ranks at once               from TOTAL to VERDICT, and nobody waits in between
before, pass_on, come_back                    rank by rank along the pipeline: JOIN, PASS, and back at VERDICT
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atoll.runtime.sharding.unit import Unit, UnitSpec
from atoll.runtime.transport import Channel, DirectSum, Later, Tag, Transport

SUMS_HEAD = 4
"""Sums that come before those of the units: loss, idle share, counts that losses gave, and how many did."""


@dataclass(slots=True)
class StepSums:
    """Values summed over ranks, always in the same order of additions: the head, then each unit's squared norm.

    tokens: what the loss was divided by before its backward, on all ranks.

    [Note: a loss that counts] How much a loss is a sum over may be known only when the last microbatch has run forward.
    By then backwards have run, divided by the labels that count. So gradients are right except for one factor, which is
    exactly 1 where no loss says otherwise, and is applied together with clipping. Pipeline ranks that do not know it
    yet take it for 1: a step that was taken ahead with the wrong factor is rolled back, as one that is clipped is.
    """

    # On the host, in float64: `SUMS_HEAD` sums, then a place for each unit of the whole model. It is zero on ranks
    # without the unit, so adding up the stages does not round the norm of a unit that is on one of them.
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
        """The idle shares of all ranks, added up."""
        return float(self.values[1])

    @property
    def norms(self) -> torch.Tensor:
        """The squared norm of each unit."""
        return self.values[SUMS_HEAD:]

    @property
    def norm(self) -> float:
        """The norm, from the units' float64 partial sums in the model's order."""
        return float(self.norms.sum().sqrt()) * self.correction

    @property
    def is_finite(self) -> bool:
        """True if loss and norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    def factor(self, clip: float | None) -> float:
        """Return the factor of gradients: the correction, and clipping as in torch.nn.utils.clip_grad_norm_."""
        return self.correction * (1.0 if clip is None else min(1.0, clip / (self.norm + 1e-6)))

    def is_unchanged(self, clip: float | None) -> bool:
        """Return True if a step is taken with its gradients as they are."""
        return self.is_finite and self.factor(clip) == 1.0


class RankSums:
    """Adds up a rank's values with those of other ranks.

    units: this rank's, in the model's order, which is the same on all ranks of a stage: what is summed over them is
    laid out in it.  specs: of the whole model.
    """

    def __init__(self, units: Sequence[Unit], specs: Sequence[UnitSpec], transport: Transport) -> None:
        self._units, self._count, self._transport = tuple(units), len(specs), transport

    def read(
        self, loss_sum: torch.Tensor | None, counts: Sequence[torch.Tensor | float], routed: torch.Tensor
    ) -> tuple[list[float], torch.Tensor]:
        """Return the squared norms of this rank's units, its loss and its counts, read from the device; and what its
        routers report, a vector."""
        # One transfer of all that the host has to know, and so one wait for the device: each wait leaves it without
        # work until the host has launched more.
        loss = 0.0 if loss_sum is None else loss_sum
        values = [*(unit.squared_norm() for unit in self._units), loss, *counts]
        device = self._transport.device
        there = [each.detach().to(device, torch.float64) for each in values if isinstance(each, torch.Tensor)]
        every = torch.cat([*(each.view(1) for each in there), routed.to(device, torch.float64)]).cpu()
        numbers = iter(every[: len(there)].tolist())
        found = [next(numbers) if isinstance(each, torch.Tensor) else float(each) for each in values]
        return found, every[len(there) :]

    def add_up(
        self, read: Sequence[float], idle: float, tokens: int, *, routed: torch.Tensor
    ) -> tuple[StepSums, frozenset[str], torch.Tensor]:
        """Sum what was read over the ranks of the stage. Return the sums, the parameters that have gradients, and the
        sums of what routers report."""
        loss, *counted = read[len(self._units) :]
        partials = torch.zeros(self._count, dtype=torch.float64)
        for unit, norm in zip(self._units, read, strict=False):  # after the norms come the loss and the counts
            partials[unit.spec.index] = norm
        head = torch.tensor([loss, idle, sum(counted), len(counted)], dtype=torch.float64)
        # A parameter that this rank's samples did not use has a gradient if another rank's did: the flags say on how
        # many ranks. Without them, ranks of one parameter could disagree whether the optimizer steps it.
        names = [(unit, name) for unit in self._units for name, _ in unit.trained()]
        flags = torch.tensor([name in unit.touched for unit, name in names], dtype=torch.float64)
        values = self._transport.total_stage(torch.cat([head, partials, flags, routed]))
        values, flags, routed = values.split([SUMS_HEAD + self._count, len(names), len(routed)])
        self._share_flags(names, flags)
        touched = frozenset(name for (_, name), flag in zip(names, flags.tolist(), strict=True) if flag)
        return StepSums(values, tokens), touched, routed

    def _share_flags(self, names: Sequence[tuple[Unit, str]], flags: torch.Tensor) -> None:
        """Mark a shared parameter as touched if any of its copies is."""
        for unit in self._units:
            if len(unit.owners) > 1:
                own = [at for at, (owner, _) in enumerate(names) if owner is unit]
                shared = flags[own]
                # Of this channel and unit, `sum_copies` has a tag for each segment, and no segment is LAST.
                self._transport.total_ordered(shared, unit.owners, Tag(Channel.SHARED, unit.spec.index, Tag.LAST))
                flags[own] = shared

    def begin_total(self, sums: StepSums) -> Later:
        """Start the sum over stages; the ranks of one stage already have the same values."""
        if self._transport.place.mesh.pipeline == 1:
            return DirectSum([sums.values], [])  # a stage's ranks are all ranks
        # The ranks of a stage have equal sums since SUMS, so one of them speaks; the same bits arrive everywhere.
        said = sums.values if self._transport.speaks else torch.zeros_like(sums.values)
        return self._transport.total_together_later(said)

    def before(self, like: torch.Tensor) -> torch.Tensor:
        """Wait for the sums of the pipeline ranks before this one."""
        # One message for a link and step, and the tag needs no step: the sender's next PASS is after a VERDICT that
        # needs this JOIN.
        place = self._transport.place
        return self._receive(like, place.pp - 1, Tag(Channel.CHAIN, place.pp - 1))

    def pass_on(self, values: torch.Tensor) -> None:
        """Send the sums to the next pipeline rank."""
        place = self._transport.place
        self._send(values, place.pp + 1, Tag(Channel.CHAIN, place.pp))

    def come_back(self, own: StepSums) -> StepSums:
        """Return the last rank's sums, which are passed back along the pipeline."""
        place, sums = self._transport.place, own
        if place.pp + 1 < len(place.peers("pp")):
            verdict = self._receive(own.values, place.pp + 1, Tag(Channel.VERDICT, place.pp))
            sums = StepSums(verdict, own.tokens)
        if place.pp > 0:
            self._send(sums.values, place.pp - 1, Tag(Channel.VERDICT, place.pp - 1))
        return sums

    def _receive(self, like: torch.Tensor, rank: int, tag: Tag) -> torch.Tensor:
        received = torch.zeros_like(like, device=self._transport.device)
        self._transport.receive(received, self._transport.place.peers("pp")[rank], tag).wait()
        return received.cpu()

    def _send(self, values: torch.Tensor, rank: int, tag: Tag) -> None:
        sent = values.to(self._transport.device, copy=True)
        self._transport.post(sent, self._transport.place.peers("pp")[rank], tag)
