"""Values that a forward changes besides the parameters: those of one process, or refused with the module's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll import Engine, Layout, MeshShape, Plan, schedules
from atoll.errors import PlanError
from atoll.testing import run_ranks

VOCABULARY = 16


class Norm(nn.BatchNorm1d):
    """Over the features of tokens."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.flatten(0, 1)).view(hidden.shape)


class Counter(nn.Module):
    """A buffer that every rank changes alike."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        return hidden


def chain(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    middle = Norm(8) if kind == "norm" else Counter()
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), middle, nn.Linear(8, VOCABULARY))


def train(kind: str, *, pipeline: int = 1, groups: int = 1, recompute: str = "none") -> dict[str, Any]:
    plan = Plan(
        mesh=MeshShape(pipeline=pipeline, inter=groups),
        layout=Layout("NNN"),
        schedule=schedules.build("1f1b", ranks=pipeline, microbatches=4 // groups),
        microbatch=2,
        recompute=recompute,
    )
    engine = Engine(chain(kind), plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    generator = torch.Generator().manual_seed(1)
    try:
        for _ in range(2):
            ids = torch.randint(VOCABULARY, (8, 6), generator=generator)
            share = ids.chunk(groups)[engine.place.data]
            engine.step({"input_ids": share, "labels": share.roll(-1, dims=1)})
        values = engine.state_dict()
        own = {name for name, _ in engine.model.named_buffers()}
        return {name: value.tolist() for name, value in values.items() if name in own}
    except PlanError as error:
        return {"refused": str(error)}
    finally:
        engine.close()


def test_statistics_of_a_ranks_own_samples_are_refused_at_the_first_step() -> None:
    """Past bug: they differed between ranks, and a checkpoint had those of rank 0."""
    for found in run_ranks(train, 2, "norm", groups=2):
        assert "the forward changes buffers of 2 (Norm)" in found["refused"]
        assert "each rank has seen its own samples" in found["refused"]
        assert "GroupNorm" in found["refused"]


def test_a_forward_that_is_recomputed_would_count_twice() -> None:
    assert "turn recompute off" in train("norm", recompute="block")["refused"]


def test_in_a_pipeline_they_are_those_of_one_process() -> None:
    alone = train("norm")
    assert alone["2.num_batches_tracked"] == 8
    first, second = run_ranks(train, 2, "norm", pipeline=2)
    assert {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in alone.items()} == first | second


def test_what_all_ranks_change_alike_stays() -> None:
    assert run_ranks(train, 2, "counter", groups=2) == [{"2.forwards": 4.0}] * 2
