"""The load of experts in a step: what its routers report, losses of routers, and the step of their selection biases.

    bias       each router adds a bias to its scores when it chooses experts, and only then. A step raises the bias of
               experts with fewer tokens than the mean, and lowers that of the others: arXiv 2412.19437, section 2.1.2
    sequence   E / (k S) * sum over experts of (tokens of the expert) * (its mean share of the scores), of S tokens that
               choose k of E experts: equation 17 of the same
    z          mean over tokens of logsumexp(logits) ** 2: arXiv 2202.08906, equation 5

Both losses are of one router and one sequence, and a step adds their means over its sequences to its loss. A mean over
sequences is a sum divided by a number that is known before the step: it does not depend on microbatches and ranks.

[Note: what is counted] A router reports in the first forward of a microbatch: not in an evaluation, and not when its
block runs again. What a program reports is discarded when one begins. The ranks of a tensor-parallel group have the
same tokens, and one of them reports; with parts of the sequence all of them do.

[Note: biases ahead of the verdict] The forwards of a post-validated step's successor need the new biases, so SUMS steps
them: the ranks of a layer know its counts by then. STEP takes that back if the step is not taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.errors import PlanError, RunError
from atoll.plans.plan import Place, Plan


@dataclass(frozen=True, slots=True)
class Balance:
    """How the load of experts is balanced; see the module. 0 turns a part off.

    bias_rate: what a step adds to selection biases, or takes from them; DeepSeek-V3 has 0.001.
    sequence_loss, z_loss: coefficients of the losses, for each router; DeepSeek-V3 has 0.0001, ST-MoE 0.001.
    """

    bias_rate: float = 0.0
    sequence_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        """Raise PlanError for a value below 0."""
        wrong = [
            f"{each.name} = {getattr(self, each.name)}" for each in fields(self) if not getattr(self, each.name) >= 0
        ]
        if wrong:
            raise PlanError(f"balance: {', '.join(wrong)}; rate and coefficients are 0 (off) or above")

    @property
    def has_losses(self) -> bool:
        """True if routers have losses."""
        return self.sequence_loss > 0 or self.z_loss > 0


@dataclass(slots=True)
class Load:
    """The tokens that a router gave each of its experts, as far as it has reported them.

    owner, key: the module and the name of its selection bias, a buffer [E].
    """

    owner: nn.Module
    key: str
    counts: Tensor

    @property
    def bias(self) -> Tensor:
        """The selection bias."""
        return self.owner.get_buffer(self.key)


class ExpertWork:
    """Rows and seconds of the experts of a rank in the running program.

    rows: computed by this rank's experts, in first forwards.  seconds: in exchanges, with the waits for other ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin()

    def begin(self) -> None:
        """Begin a program."""
        self.rows = 0
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Context of an exchange."""
        if self._device.type != "cuda":
            since = time.monotonic()
            yield
            self._seconds += time.monotonic() - since
            return
        stream = torch.cuda.current_stream(self._device)
        both = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        both[0].record(stream)
        yield
        both[1].record(stream)
        self._events.append(both)

    @property
    def seconds(self) -> float:
        """Seconds in exchanges; behind the step's end, which waits for the device."""
        return self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1e3


@dataclass(slots=True)
class Routers:
    """The routers of a rank.

    sequences: in a step, over the ranks that take it together.  reports: whether this rank's reports count.
    scale: the gradient of a loss of routers, once it is known: loss scale / sequences.
    work: of experts, if ranks divide them.
    """

    balance: Balance = field(default_factory=Balance)
    sequences: int = 1
    reports: bool = True
    loads: list[Load] = field(default_factory=list)
    scale: float = torch.nan
    work: ExpertWork | None = None
    # Sums over the first forwards of the running program.
    _loss: Tensor | None = None
    # The biases before a step that may still be taken back.
    _before: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(balance: Balance, plan: Plan, place: Place) -> Routers:
        """Return the routers of a rank, before any is watched. Raises PlanError if plan and balance do not match."""
        if balance.bias_rate and plan.outer is not None:
            raise PlanError(
                f"bias_rate = {balance.bias_rate}: islands have tokens of their own, and their selection biases would "
                "drift apart, which no outer step averages; use sequence_loss, or leave outer steps out"
            )
        if balance.has_losses and plan.schedule.slices > 1:
            raise PlanError(
                f"slices = {plan.schedule.slices}: losses of routers are of whole sequences, of which a slice is not; "
                "use bias_rate alone, or slices = 1"
            )
        sequences = plan.global_batch // plan.islands
        return Routers(balance, sequences, reports=place.tp == 0 or plan.sequence_parallel)

    def begin(self) -> None:
        """Begin a program."""
        self._loss, self.scale = None, torch.nan
        if self.work is not None:
            self.work.begin()
        for load in self.loads:
            load.counts.zero_()

    def add_loss(self, loss: Tensor) -> None:
        """Report a loss, summed over the sequences of a microbatch."""
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def attach(self, weights: Tensor, loss: Tensor) -> Tensor:
        """Return the weights of a router's choice, whose backward is also that of its loss."""
        attached: Tensor = _Attached.apply(weights, loss, self)
        return attached

    def take_scale(self, scale: float, tokens: int) -> None:
        """Set the gradient of the routers' losses. scale: that of the model's loss, which is divided by the tokens."""
        self.scale = scale * tokens / self.sequences

    # ---- the step's end

    def loss_sum(self, loss_sum: Tensor | None, counts: Sequence[Tensor | float], tokens: int) -> Tensor | None:
        """Return a rank's sum of losses with those of its routers, so that divided by the tokens they are what they are
        divided by the sequences."""
        if self._loss is None or not self.reports:
            return loss_sum
        if counts:
            raise RunError(
                "the loss returned a count, which divides all gradients once it is known, and losses of routers are "
                "divided by sequences: give a loss that returns a sum, or balance = Balance(bias_rate = ...) alone"
            )
        own = self._loss.double() * (tokens / self.sequences)
        return own if loss_sum is None else loss_sum.double() + own

    def counts(self) -> Tensor:
        """Return the tokens of each expert of each router that has a bias, of this rank, in one vector."""
        found = [load.counts if self.reports else torch.zeros_like(load.counts) for load in self.loads]
        return torch.cat(found) if found else torch.zeros(0)

    @torch.no_grad()
    def step(self, counts: Tensor) -> None:
        """Step the biases. counts: as in `counts`, of all ranks, on the host."""
        sizes = [len(load.counts) for load in self.loads]
        self._before = [load.bias.clone() for load in self.loads]
        for load, own in zip(self.loads, counts.split(sizes), strict=True):
            # In whole numbers: the sign is exact, and so the same on all ranks.
            sign = (own.sum() - len(own) * own).sign()
            load.bias.add_(sign.to(load.bias), alpha=self.balance.bias_rate)

    def confirm(self) -> None:
        """The step is taken."""
        self._before = []

    @torch.no_grad()
    def undo(self) -> None:
        """The step is not taken: restore the biases, if they have been stepped."""
        for load, before in zip(self.loads, self._before, strict=bool(self._before)):
            load.bias.copy_(before)
        self._before = []


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, routers: Routers) -> Tensor:
        ctx.routers, ctx.dtype = routers, loss.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.full((), ctx.routers.scale, dtype=ctx.dtype, device=gradient.device), None
