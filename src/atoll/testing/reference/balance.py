"""The balance of experts: losses of routers, and the step of their selection biases.

    sequence_loss   E / (k S) * sum of counts * mean shares of the scores, of each sequence of S tokens
    z_loss          mean of logsumexp(logits) ** 2 over the tokens of each sequence
    bias_rate       after a step that is taken, bias += rate * sign(mean of the step's counts - count)

Losses of all routers are added to the step's loss, as means over its sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atoll.testing.reference.model import Recipe, Routing


class Balancing:
    """The routers of a model, by the recipe's `routing`. options: bias_rate, sequence_loss, z_loss."""

    def __init__(self, recipe: Recipe, model: nn.Module, options: Mapping[str, float]) -> None:
        self._recipe: Any = recipe
        self._model, self._options = model, options
        self._seen: list[tuple[str, Routing]] = []
        self._counts: dict[str, Tensor] = {}
        self._biases: dict[str, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the forward of a microbatch."""
        hooks = [module.register_forward_hook(partial(self._see, name)) for name, module in self._model.named_modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _see(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        found = self._recipe.routing(module, output)
        if found is not None:
            self._seen.append((name, found))

    def loss(self, sequences: int) -> Tensor:
        """Return the losses of the last microbatch, summed over its sequences, and count its tokens."""
        total = torch.zeros((), dtype=torch.float64)
        for name, routing in self._seen:
            parts = (part.chunk(sequences) for part in (routing.index, routing.scores, routing.logits))
            for index, scores, logits in zip(*parts, strict=True):
                experts = logits.shape[-1]
                counts = torch.stack([(index == expert).sum() for expert in range(experts)])
                shares = (scores.double() / scores.double().sum(-1, keepdim=True)).mean(0)
                balance = experts * (counts.double() / index.numel() * shares).sum()
                total = total + self._options["sequence_loss"] * balance
                total = total + self._options["z_loss"] * logits.double().logsumexp(-1).square().mean()
                self._counts[name] = self._counts.get(name, 0) + counts
            if routing.bias is not None:
                self._biases[name] = routing.bias
        self._seen.clear()
        return total

    @torch.no_grad()
    def end(self, *, is_taken: bool) -> None:
        """End a step."""
        for name, bias in self._biases.items() if is_taken else ():
            counts = self._counts[name].double()
            bias += self._options["bias_rate"] * (counts.mean() - counts).sign()
        self._counts.clear()

    def biases(self) -> dict[str, Tensor]:
        """Return the biases by the names of their routers."""
        return {name: bias.detach().clone() for name, bias in self._biases.items()}
