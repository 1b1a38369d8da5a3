"""Muon for hidden matrices and AdamW for everything else, on ranges of flat buffers.

Muon's definition and defaults are those of `torch.optim.Muon`: with a float32 master, the same bits. With a float64
master matrices are orthogonalized in float64 too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from atoll.base.errors import PlanError
from atoll.plans.layouts import NewtonSchulz, Whole
from atoll.runtime.sharding.matrices import Options
from atoll.runtime.sharding.optimizer import fused_by_default

MOST_STEPS = 99
"""Newton-Schulz steps that torch.optim.Muon takes at most."""


class Muon:
    """The optimizer of an engine: `Engine(..., optimizer=Muon(lr=0.02))`.

    Momentum, then orthogonalization by Newton-Schulz in bfloat16, for the hidden matrices of a model: trained
    parameters of two dimensions that belong to no `nn.Embedding` and are in neither the first nor the last block.
    AdamW steps everything else in the same run.

    lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in `torch.optim.Muon`.
    matrices: name patterns (* and ?) of the parameters that are matrices, in place of that rule.
    split: name pattern -> the number of equal matrices that a parameter's rows are made of, or the rows of each: fused
    projections, or heads.
    adamw: options of `torch.optim.AdamW` for everything else; its `lr` is that of the matrices if not given.

    Raises PlanError for options that torch refuses, and for patterns of the wrong kind.
    """

    keys = ("momentum_buffer",)

    def __init__(
        self,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        matrices: Sequence[str] | None = None,
        split: Mapping[str, int | Sequence[int]] | None = None,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._adamw = {"lr": lr, **(adamw or {})}
        patterns, parts = matrices, split or {}
        try:
            torch.optim.Muon([torch.nn.Parameter(torch.zeros(1, 1))], **self._options)
            torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **self._adamw)
        except (TypeError, ValueError) as error:
            raise PlanError(f"Muon: {error}") from error
        if type(ns_steps) is not int or not 1 <= ns_steps <= MOST_STEPS or len(ns_coefficients) != 3:
            raise PlanError(
                f"Muon: ns_steps = {ns_steps}, ns_coefficients = {list(ns_coefficients)}: 1 to {MOST_STEPS} steps, and "
                "three coefficients"
            )
        if isinstance(patterns, str) or not all(isinstance(each, str) for each in patterns or ()):
            raise PlanError(f"Muon: matrices = {patterns!r}; give a list of name patterns, such as ['*.weight']")
        if not all(_is_parts(each) for each in parts.values()):
            raise PlanError(
                f"Muon: split = {dict(parts)}; give each name pattern a number of equal parts, or the rows of each part"
            )
        self.whole = Whole(
            "Muon",
            NewtonSchulz(ns_steps),
            patterns=None if patterns is None else tuple(patterns),
            split=tuple((name, each if isinstance(each, int) else tuple(each)) for name, each in parts.items()),
        )

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimizer of some groups; in those marked `whole`, parameters are slices of matrices."""
        if not any("whole" in group for group in groups):
            raise PlanError(
                "Muon steps whole matrices, which the engine tells it: give it to the engine itself, as in "
                "Engine(..., optimizer=atoll.Muon(lr=0.02))"
            )
        return MatricesAndRest(groups, self._options, self._adamw)

    def direct(self, gradient: torch.Tensor, state: dict[str, Any], options: Options) -> torch.Tensor:
        """Advance the momentum of a slice, and return the slice of what is orthogonalized."""
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: torch.Tensor = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - options["momentum"])
        return gradient.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum

    def transform(self, matrices: torch.Tensor, options: Options, kept: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Orthogonalize matrices [n, rows, columns]."""
        del kept
        return orthogonalize(
            matrices, coefficients=options["ns_coefficients"], steps=options["ns_steps"], eps=options["eps"]
        )

    def update(self, values: torch.Tensor, result: torch.Tensor, options: Options, *, shape: tuple[int, int]) -> None:
        """Decay a slice, and take the slice of the orthogonal matrix off it."""
        values.mul_(1 - options["lr"] * options["weight_decay"])
        values.add_(result, alpha=-options["lr"] * ratio(options["adjust_lr_fn"], shape))


def _is_parts(parts: object) -> bool:
    if isinstance(parts, (list, tuple)):
        return bool(parts) and all(type(each) is int and each > 0 for each in parts)
    return type(parts) is int and parts > 0


def orthogonalize(matrices: torch.Tensor, *, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    """Orthogonalize matrices [n, rows, columns] by a quintic Newton-Schulz iteration, in their dtype.

    Writes to `matrices`. The operations are those of `torch.optim.Muon`, for all at once.
    """
    a, b, c = coefficients
    is_tall = matrices.size(1) > matrices.size(2)
    found = matrices.mT if is_tall else matrices
    for each in found:
        each.div_(each.norm().clamp(min=eps))
    if len(found) == 1:  # on a GPU a batch of one may take another kernel than torch.optim.Muon does
        alone = found[0]
        for _ in range(steps):
            gram = alone @ alone.T
            alone = torch.addmm(alone, torch.addmm(gram, gram, gram, beta=b, alpha=c), alone, beta=a)
        found = alone[None]
    else:
        for _ in range(steps):
            gram = found @ found.mT
            found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if is_tall else found


def ratio(adjust: str | None, shape: tuple[int, int]) -> float:
    """The factor of the learning rate for a matrix, as in `torch.optim.Muon`."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


class MatricesAndRest(torch.optim.Optimizer):
    """Groups of slices of matrices, which the engine steps by a `MatrixUpdate`, and an AdamW for all other groups. They
    share groups and states, so that schedules and checkpoints see one optimizer.

    options: of the groups of matrices, where they have none.  adamw: options of `torch.optim.AdamW`.
    """

    def __init__(self, groups: list[dict[str, Any]], options: Options, adamw: Mapping[str, Any]) -> None:
        for group in groups:
            for key, value in options.items() if group["whole"] else ():
                group.setdefault(key, value)
        super().__init__(groups, {})
        others = [group for group in self.param_groups if not group["whole"]]
        self._rest = torch.optim.AdamW(others, **fused_by_default(adamw, others), **adamw) if others else None
        if self._rest is not None:
            self._rest.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step everything but the matrices."""
        if self._rest is not None:
            self._rest.step(closure)
