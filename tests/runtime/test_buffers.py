"""Values that a forward changes besides the parameters: those of one process, or refused with the module's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll import Engine, Layout, MeshShape, Plan
from atoll.base.errors import CheckpointError, PlanError
from atoll.plans import schedules
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
    if kind == "twice":
        norm = Norm(8)
        return nn.Sequential(nn.Embedding(VOCABULARY, 8), norm, nn.Linear(8, 8), norm, nn.Linear(8, VOCABULARY))
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


def test_statistics_that_two_stages_share_are_refused() -> None:
    """One process has one buffer, which both places update; two stages would have two. In one stage it is one."""
    alone = train("twice")
    assert alone["1.num_batches_tracked"] == 16
    for found in run_ranks(train, 2, "twice", pipeline=2):
        assert "each stage changes its own copy of a buffer that stages share" in found["refused"]


def test_a_checkpoint_may_have_buffers_that_are_not_persistent(tmp_path: Path) -> None:
    """Past bug: building a block from meta made all its buffers persistent, so older checkpoints have more of them."""

    class Shifted(nn.Linear):
        def __init__(self, persistent: bool) -> None:
            super().__init__(8, 8)
            self.register_buffer("shift", torch.zeros(8), persistent=persistent)

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "shift"):
                self.shift.zero_()

    def engine(persistent: bool) -> Engine:
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(VOCABULARY, 8), Shifted(persistent), nn.Linear(8, VOCABULARY))
        plan = Plan(MeshShape(), Layout("NNN"), schedules.build("gpipe", ranks=1, microbatches=1), microbatch=2)
        weights = tmp_path / "older" if (tmp_path / "older").exists() else None
        return Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), weights=weights)

    older = engine(True)
    assert "1.shift" in older.state_dict()
    older.save(tmp_path / "older")
    older.close()
    newer = engine(False)
    assert "1.shift" not in newer.state_dict()
    newer.load(tmp_path / "older")
    newer.close()


def test_a_checkpoint_of_a_larger_model_is_refused_as_first_weights(tmp_path: Path) -> None:
    """Past bug: what the model does not have was left out without a word, such as a head that is not tied."""
    plan = Plan(MeshShape(), Layout("NNN"), schedules.build("gpipe", ranks=1, microbatches=1), microbatch=2)

    def engine(bias: bool, weights: Path | None = None) -> Engine:
        model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY, bias=bias))
        return Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), weights=weights)

    larger = engine(True)
    larger.save(tmp_path / "saved")
    larger.close()
    with pytest.raises(CheckpointError, match=r"it has 'model\.1\.bias', which this model does not have"):
        engine(False, tmp_path / "saved")
