"""Muon on hidden matrices, of which each expert has its own, AdamW on everything else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from atoll.testing.reference.model import base_of, blocks_of_family, named_parameters


def hidden_matrices(model: nn.Module, named: Sequence[str] | None = None) -> list[str]:
    """Names of the matrices between the first block and the last, without those of embeddings. named: the blocks, if
    the recipe names them."""
    base = base_of(model)
    if named is not None:
        blocks = [base.get_submodule(name) for name in named]
    else:
        blocks = list(base.children()) if isinstance(model, nn.Sequential) else blocks_of_family(base)
    outside = {id(p) for block in (*blocks[:1], *blocks[-1:]) for p in block.parameters()}
    outside |= {id(p) for module in base.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    inside = {id(p) for block in blocks[1:-1] for p in block.parameters()} - outside
    stacks = [own for module in base.modules() if (own := list(module.parameters(recurse=False))) and _is_stack(own)]
    stacked = {id(p) for own in stacks for p in own}
    return [
        name
        for name, p in named_parameters(model).items()
        if p.dim() == (3 if id(p) in stacked else 2) and id(p) in inside
    ]


def _is_stack(parameters: list[nn.Parameter]) -> bool:
    """Return True for parameters of experts, one after the other: matrices, and perhaps a vector for each."""
    return any(p.dim() == 3 for p in parameters) and len({len(p) for p in parameters}) == 1


class ReferenceMuon(torch.optim.Optimizer):
    """Muon on the last group, in the dtype of its parameters, and AdamW on the others: as torch documents them.

    split: pairs of a pattern and a number of equal parts of the rows, or the rows of each part.  adamw: pairs of
    options.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        split: Iterable[tuple[str, Any]] = (),
        adamw: Iterable[tuple[str, Any]] = (),
        matrices: object = None,
    ) -> None:
        super().__init__([group for group in groups if group["params"]], {})
        self._matrices = groups[-1]
        self._rest = torch.optim.AdamW(groups[:-1], **{"lr": lr, **dict(adamw)})
        self._lr, self._momentum, self._nesterov = lr, momentum, nesterov
        self._polynomial, self._eps, self._steps = ns_coefficients, eps, ns_steps
        self._adjust, self._split = adjust_lr_fn, dict(split)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step everything."""
        self._rest.step()
        for name, parameter in zip(self._matrices["names"], self._matrices["params"], strict=True):
            if parameter.grad is None:
                continue
            average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
            average.copy_(self._momentum * average + (1 - self._momentum) * parameter.grad)
            direction = average
            if self._nesterov:
                direction = self._momentum * average + (1 - self._momentum) * parameter.grad
            parameter -= self._lr * self._matrices["weight_decay"] * parameter
            parts = next((parts for pattern, parts in self._split.items() if fnmatchcase(name, pattern)), 1)
            stacked = parameter.dim() == 3
            for matrix, turned in zip(parameter, direction, strict=True) if stacked else ((parameter, direction),):
                rows = [len(matrix) // parts] * parts if isinstance(parts, int) else list(parts)
                for own, part in zip(matrix.split(rows), turned.split(rows), strict=True):
                    own -= self._lr * self._ratio(*own.shape) * self._orthogonal(part)

    def _ratio(self, rows: int, columns: int) -> float:
        if self._adjust == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        a, b, c = self._polynomial
        wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T
        wide = wide / max(float(wide.norm()), self._eps)
        for _ in range(self._steps):
            gram = wide @ wide.T
            wide = a * wide + b * (gram @ wide) + c * (gram @ (gram @ wide))
        return wide if len(matrix) <= matrix.shape[1] else wide.T
