"""State of experts that ranks divide: whole matrices, checkpoints, access, bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.testing.parity import Case, assert_checkpoint_parity, assert_parity
from tests.mixtures import Mixture
from tests.runtime.test_experts import PAIR
from tests.runtime.test_matrix_updates import Matrices, Reference, step_of_dion, step_of_shampoo

# ---- each expert is a matrix

ADAMW = ("adamw", (("lr", 3e-3), ("betas", (0.8, 0.95))))


MUON = replace(
    PAIR, optimizer="Muon", model=Mixture(), options=(ADAMW, ("split", (("*.gate_up_proj", 2),))), layout="IIG"
)


@pytest.mark.parametrize(
    "case",
    [
        replace(MUON, layout="NNN", intra=4),
        replace(MUON, layout="III", intra=4),
        replace(MUON, layout="GGG", inter=2, pipeline=2, schedule="zb-v"),
        replace(MUON, intra=1, expert=1),
        replace(MUON, expert=1, post_validation=True, clip=None, steps=3),
        replace(MUON, intra=1, expert=1, tensor=2),
        replace(MUON, tensor=2),
        replace(MUON, layout="NNG", expert_layout="III", intra=4, post_validation=True),
    ],
    ids=str,
)
def test_each_expert_is_orthogonalized_by_itself(case: Case) -> None:
    assert_parity(case)


def each(step: Callable[[Tensor, dict[str, Any]], Tensor]) -> Callable[[Tensor, dict[str, Any]], Tensor]:
    """The same for stacked matrices, each with a state of its own."""

    def of_stack(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if gradient.dim() == 2:
            return step(gradient, state)
        own = state.setdefault("of", [{} for _ in gradient])
        state.setdefault("momentum", torch.zeros_like(gradient))
        for at, one in enumerate(own):
            one.setdefault("momentum", torch.zeros_like(gradient[at]))
        return torch.stack([step(one, kept) for one, kept in zip(gradient, own, strict=True)])

    return of_stack


@dataclass(frozen=True)
class Stacked(Matrices):
    """Optimizers that keep state of whole matrices."""

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Reference(groups, self.lr, each({"Shampoo": step_of_shampoo, "Dion": step_of_dion}[self.optimizer]))


KEPT = Stacked(intra=2, expert=2, microbatches=4, model=Mixture(), layout="IIG", steps=2)


@pytest.mark.parametrize(
    "second",
    [
        replace(KEPT, layout="NNG", intra=1, expert=1),
        replace(KEPT, layout="GGG", intra=1, expert=1, tensor=2),
        replace(KEPT, layout="III", intra=4, expert=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["Shampoo", "Dion"])
def test_state_of_an_expert_is_found_under_another_division(second: Case, optimizer: str, tmp_path: Path) -> None:
    first, second = replace(KEPT, optimizer=optimizer), replace(second, optimizer=optimizer)
    assert_checkpoint_parity(first, second, tmp_path / "there")
    assert_checkpoint_parity(second, first, tmp_path / "back")
