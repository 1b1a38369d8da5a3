"""Steps of the unsplit model, alone or as islands, with and without codecs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from atoll.testing.coded import Buffer, Coding, Setting, uses_apart
from atoll.testing.reference.balance import Balancing
from atoll.testing.reference.dropout import Seeding
from atoll.testing.reference.initial import start
from atoll.testing.reference.losses import _count, forward, rows, summed_loss
from atoll.testing.reference.model import Recipe, base_of, named_parameters, tied
from atoll.testing.reference.muon import hidden_matrices


@dataclass(slots=True)
class History:
    """The result of a run: mean loss and gradient norm before clipping per step; the final parameters.

    gradients: those of the first step before clipping, if recorded.
    masters: the values that the optimizer steps, if codecs change the parameters.  buffers: of a rank with codecs.
    biases: selection biases of routers, by the names of these.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)
    buffers: tuple[Buffer, ...] = ()
    biases: dict[str, Tensor] = field(default_factory=dict)


def train_islands(
    recipe: Recipe,
    *,
    islands: int,
    outer: Mapping[str, Any],
    fragment_of: Callable[[str], int],
    seed: int,
    dtype: torch.dtype,
    device: str,
    steps: int,
    microbatches: int,
    microbatch: int,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    clip: float | None,
    codecs: Setting | None = None,
) -> list[History]:
    """Train k replicas of the unsplit model in this process, with outer steps: the history of each.

    ReferenceReplica m takes the m-th part of each step's microbatches.

    outer: every, fragments, delay, lr, momentum, nesterov, mix.  fragment_of: the fragment of a parameter, by name.
    codecs: where outer gradients are encoded, if they are.

    Algorithm 2 of arXiv 2501.18512, which with one fragment and no delay is Algorithm 1 of arXiv 2311.08105. The outer
    optimizer is torch's SGD on the anchors.
    """
    each = microbatches // islands
    common = (recipe, seed, dtype, device, optimizer)
    replicas = [ReferenceReplica(*common, first=at * each, microbatches=each) for at in range(islands)]
    anchors = {name: nn.Parameter(value.detach().clone()) for name, value in replicas[0].trained.items()}
    stepping = {
        name: torch.optim.SGD([anchor], lr=outer["lr"], momentum=outer["momentum"], nesterov=outer["nesterov"])
        for name, anchor in anchors.items()
    }
    sent: dict[int, dict[str, Tensor]] = {}
    coding = None if codecs is None else Coding(codecs)
    for step in range(steps):
        for replica in replicas:
            batch = rows(recipe.batch(step, microbatches * microbatch), 0, microbatches * microbatch, device)
            replica.step(step, batch, microbatch, clip)
        done = step + 1
        for fragment in range(outer["fragments"]):
            names = [name for name in anchors if fragment_of(name) == fragment]
            offset = max(1, (fragment + 1) * outer["every"] // outer["fragments"])
            if done >= offset and (done - offset) % outer["every"] == 0:
                own = [
                    {name: anchors[name].detach() - replica.trained[name].detach() for name in names}
                    for replica in replicas
                ]
                if coding is None:
                    sent[fragment] = {
                        name: torch.stack([each[name] for each in own]).sum(0) / islands for name in names
                    }
                else:
                    sent[fragment] = coding.mean(own, step)
            before = done - outer["delay"]
            if before >= offset and (before - offset) % outer["every"] == 0:
                for name, gradient in sent.pop(fragment).items():
                    anchors[name].grad = gradient
                    stepping[name].step()
                    for replica in replicas:
                        values = replica.trained[name].data
                        values.copy_(outer["mix"] * values + (1 - outer["mix"]) * anchors[name].detach())
    for replica in replicas:
        replica.history.parameters = {n: v.detach().clone() for n, v in named_parameters(replica.model).items()}
        replica.history.gradients = {}
    return [replica.history for replica in replicas]


class ReferenceReplica:
    """An unsplit model, its optimizer, and the steps that it has taken.

    first, microbatches: its microbatches of a step.
    """

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        dtype: torch.dtype,
        device: str,
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        first: int,
        microbatches: int,
        codecs: Setting | None = None,
        balance: Mapping[str, float] | None = None,
        convert: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self._recipe, self._first, self._count = recipe, first, microbatches
        with torch.random.fork_rng(devices=[]):
            self.model = start(recipe, seed).to(device=device, dtype=dtype)
        if convert is not None:
            convert(self.model)
        self._seeding = Seeding(recipe, self.model, seed)
        self.trained = {name: p for name, p in named_parameters(self.model).items() if p.requires_grad}
        self._decayed = [parameter for parameter in self.trained.values() if parameter.dim() > 1]
        self._others = [parameter for parameter in self.trained.values() if parameter.dim() <= 1]
        named = getattr(recipe, "blocks", None)
        hidden = {id(self.trained[name]): name for name in hidden_matrices(self.model, named) if name in self.trained}
        matrices = [p for p in self._decayed if id(p) in hidden]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._decayed if id(p) not in hidden], "weight_decay": 0.1},
            {"params": self._others, "weight_decay": 0.0},
            {"params": matrices, "weight_decay": 0.1, "names": [hidden[id(p)] for p in matrices]},
        ]
        self._stepping = optimizer(groups)
        self.coding = None if codecs is None else _Coded(self.model, codecs)
        self.balancing = None if balance is None else Balancing(recipe, self.model, balance)
        self.history = History()

    def step(self, step: int, batch: Mapping[str, Any], microbatch: int, clip: float | None) -> None:
        """Take a step on this replica's microbatches of a batch; a bad one is skipped."""
        history, device = self.history, str(next(iter(self.trained.values())).device)
        with torch.random.fork_rng(devices=[]):
            numbers = range(self._first, self._first + self._count)
            pieces = {at: rows(batch, at * microbatch, microbatch, device) for at in numbers}
            tokens: float = sum(map(_count, pieces.values()))
            self._stepping.zero_grad(set_to_none=True)
            total = counted = 0.0
            for at, piece in pieces.items():
                with nullcontext() if self.coding is None else self.coding.watching():
                    with self._seeding.of(step, at), self._routing():
                        loss = summed_loss(self._recipe, forward(self.model, piece), piece)
                    if isinstance(loss, tuple):
                        loss, own = loss
                        counted += float(own)
                    if self.balancing is not None:
                        loss = loss + self.balancing.loss(microbatch) * tokens / (self._count * microbatch)
                    (loss / tokens).backward()
                total += float(loss.detach())
            if self.coding is not None:
                self.coding.make_gradients(step)
            if counted:  # known only now: gradients have been divided by something else
                for parameter in self.trained.values():
                    parameter.grad = None if parameter.grad is None else parameter.grad * (tokens / counted)
                tokens = counted
            if step == 0:
                found = {name: parameter.grad for name, parameter in self.trained.items()}
                history.gradients = {name: value.clone() for name, value in found.items() if value is not None}
            largest = float("inf") if clip is None else clip
            norm = nn.utils.clip_grad_norm_(self._decayed + self._others, largest)
            is_taken = math.isfinite(total) and bool(
                norm.isfinite()
            )  # else it is skipped, as `bad_steps = "skip"` does
            if self.balancing is not None:
                self.balancing.end(is_taken=is_taken)
            if is_taken:
                if self.coding is None:
                    self._stepping.step()
                else:
                    self.coding.step(self._stepping)
            elif self.coding is not None:
                self.coding.skip()
            history.losses.append(total / tokens)
            history.norms.append(float(norm))

    def _routing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.balancing is None else self.balancing.watching()


def train_alone(
    recipe: Recipe,
    *,
    seed: int,
    dtype: torch.dtype,
    device: str,
    steps: int,
    microbatches: int,
    microbatch: int,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    clip: float | None,
    codecs: Setting | None = None,
    balance: Mapping[str, float] | None = None,
    convert: Callable[[nn.Module], None] | None = None,
) -> History:
    """Train the unsplit model in this process, microbatch after microbatch; bad steps are skipped.

    balance: of experts, see `Balancing`.  convert: what replaces modules of the model, which keep their parameters.
    """
    own: dict[str, Any] = {"first": 0, "microbatches": microbatches, "codecs": codecs, "balance": balance}
    own["convert"] = convert
    replica = ReferenceReplica(recipe, seed, dtype, device, optimizer, **own)
    for step in range(steps):
        samples = microbatches * microbatch
        replica.step(step, rows(recipe.batch(step, samples), 0, samples, device), microbatch, clip)
    history = replica.history
    history.parameters = {n: value.detach().clone() for n, value in named_parameters(replica.model).items()}
    history.biases = {} if replica.balancing is None else replica.balancing.biases()
    history.masters = {} if replica.coding is None else replica.coding.masters
    return history


class _Coded:
    """A model whose gradients and parameters cross groups with codecs.

    masters: what the optimizer steps; the model's parameters are what the forward uses.
    """

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self._coding = Coding(setting)
        self._model = base_of(model)
        self._named = named_parameters(model)
        self._tied = tied(model)
        self._pieces: list[dict[str, Tensor]] = []
        self._touched: set[str] = set()
        self.masters = {name: parameter.detach().clone() for name, parameter in self._named.items()}
        self._follow()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the gradients of a microbatch by the names of their uses."""
        names = sorted({*self._tied, *self._tied.values()})
        with uses_apart(self._model, names) as apart:
            yield
        found = {name: alias.grad for name, alias in apart.items()}
        for name, parameter in self._named.items():
            if name not in apart:
                found[name] = parameter.grad
            parameter.grad = None
        self._pieces.append({name: value.clone() for name, value in found.items() if value is not None})
        self._touched.update(self._tied.get(name, name) for name in self._pieces[-1])

    def make_gradients(self, step: int) -> None:
        """Give the parameters the gradients that are left of the microbatches' after their messages."""
        for name, value in self._coding.gradients(self._pieces, step).items():
            self._named[name].grad = value
        self._pieces.clear()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the masters, and let the parameters follow. What no microbatch has used has no gradient."""
        with torch.no_grad():
            used = {name: parameter.detach().clone() for name, parameter in self._named.items()}
            for name, parameter in self._named.items():
                parameter.grad = parameter.grad if name in self._touched else None
                parameter.copy_(self.masters[name])
            optimizer.step()
            self.masters = {name: parameter.detach().clone() for name, parameter in self._named.items()}
            for name, parameter in self._named.items():
                parameter.copy_(used[name])
        self._touched.clear()
        self._follow()

    def skip(self) -> None:
        """The step is not taken."""
        self._touched.clear()
        self._coding.skip()

    def _follow(self) -> None:
        with torch.no_grad():
            self._coding.parameters(self.masters, {name: each.detach() for name, each in self._named.items()})
