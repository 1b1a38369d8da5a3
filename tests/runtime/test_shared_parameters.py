"""Parameters that stages share are updated where any copy has a gradient, and nowhere else: all copies stay equal."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll import Engine
from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.models import Adapter, adapter_for, initialise_model
from atoll.runtime.models.adapter import SequentialAdapter
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity, whole_parameters
from atoll.testing.tiny import TinyConfig

BLOCKS, WIDTH, MICROBATCHES = 6, 5, 4
LINEAR, GAIN = 0, 1


class Bend(nn.Module):
    """Its own linear, and what all blocks share: a linear, whose weight's gradient comes in W, and a gain, in I."""

    def __init__(self, shared: nn.Linear, gain: nn.Parameter) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.shared = shared
        self.gain = gain

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 0.8)

    def forward(self, hidden: Tensor, use: Tensor) -> Tensor:
        """use: whether this microbatch uses the shared linear, and the gain."""
        out: Tensor = hidden + 0.3 * torch.tanh(self.own(hidden))
        if use[LINEAR]:
            out = out + 0.3 * self.shared(out)
        if use[GAIN]:
            out = out * self.gain
        return out


class Bends(nn.Sequential):
    def __init__(self) -> None:
        shared, gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.empty(WIDTH))
        super().__init__(*(Bend(shared, gain) for _ in range(BLOCKS)))

    def atoll_adapter(self) -> Adapter:
        return BendsAdapter(self, lambda outputs, batch: outputs.square().sum())


class BendsAdapter(SequentialAdapter):
    """Tells each block what the microbatch, of one sample, uses of it."""

    def forward(self, first: int, last: int, hidden: Tensor | None, batch: Mapping[str, Any]) -> Tensor:
        value: Tensor = batch["inputs"] if hidden is None else hidden
        for at, block in enumerate(self.blocks()[first:last], first):
            value = block.module(value, batch["use"][0, at])
        return value


def batch_of(step: int) -> dict[str, Tensor]:
    """All ranks' microbatches of a step. What is used: all by all; one block's or one microbatch's alone; nothing."""
    generator = torch.Generator().manual_seed(step)
    use = torch.zeros(MICROBATCHES, BLOCKS, 2, dtype=torch.bool)
    match step:
        case 0 | 6:
            use[:] = True
        case 1:  # the first stage alone, in one microbatch
            use[1, 0, LINEAR] = use[2, 1, GAIN] = True
        case 2:  # the last stage alone
            use[3, BLOCKS - 1] = True
        case 4:  # the linear in the first stage, the gain in the last
            use[:, 0, LINEAR] = use[:, BLOCKS - 1, GAIN] = True
        case 5:  # a stage in the middle
            use[0, 3, GAIN] = True
    inputs = torch.randn(MICROBATCHES, 3, WIDTH, generator=generator, dtype=torch.float64)
    return {"inputs": inputs, "labels": torch.zeros(MICROBATCHES, 3).long(), "use": use}


STEPS = 7


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.3)


def train_bends(mesh: MeshShape, layout: str, post_validation: bool) -> list[dict[str, Tensor]]:
    """This rank's whole parameters after each step."""
    with torch.device("meta"):
        model = Bends()
    schedule = schedules.build("zb-h1", ranks=mesh.pipeline, microbatches=MICROBATCHES // mesh.data)
    precision = Precision.preset("fp64")
    plan = Plan(mesh, Layout(layout), schedule, 1, precision=precision, post_validation=post_validation)
    engine = Engine(model, plan, optimizer=adamw)
    share = slice(engine.place.data * schedule.microbatches, (engine.place.data + 1) * schedule.microbatches)
    found = []
    for step in range(STEPS):
        engine.step({name: value[share] for name, value in batch_of(step).items()})
        found.append(whole_parameters(engine))
    engine.close()
    return found


def plain() -> list[dict[str, Tensor]]:
    """The same by plain PyTorch in one process."""
    model = Bends()
    adapter = adapter_for(model)
    initialise_model(adapter, 0)
    model.double()
    optimizer = adamw(model.parameters())
    found = []
    for step in range(STEPS):
        batch = batch_of(step)
        optimizer.zero_grad(set_to_none=True)
        for at in range(MICROBATCHES):
            piece = {name: value[at : at + 1] for name, value in batch.items()}
            loss = adapter.loss(adapter.forward(0, BLOCKS, None, piece), piece) / batch["labels"].numel()
            loss.backward()
        optimizer.step()
        found.append({name: value.detach().clone() for name, value in model.named_parameters()})
    return found


def test_the_batches_leave_copies_without_gradients() -> None:
    """What the cases below rest on: the shared parameters move in some steps and in others not."""
    values = plain()
    moves = {
        name: [not torch.equal(one[name], other[name]) for one, other in pairwise(values)]
        for name in ("0.shared.weight", "0.shared.bias", "0.gain")
    }
    assert moves["0.shared.weight"] == moves["0.shared.bias"] == [True, True, False, True, False, True]
    assert moves["0.gain"] == [True, True, False, True, True, True]


@pytest.mark.wide(4)
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        (MeshShape(), "NNN"),
        (MeshShape(intra=2), "IIG"),
        (MeshShape(pipeline=2), "NNN"),
        (MeshShape(pipeline=2, intra=2), "NNG"),
        (MeshShape(pipeline=2, inter=2), "GGG"),
        (MeshShape(pipeline=3, intra=2), "IIG"),
    ],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value.sizes.values())),
)
def test_copies_are_updated_where_any_of_them_has_a_gradient(
    mesh: MeshShape, layout: str, post_validation: bool
) -> None:
    wanted = plain()
    for rank, found in enumerate(run_ranks(train_bends, mesh.world, mesh, layout, post_validation)):
        assert {"0.shared.weight", "0.shared.bias", "0.gain"} < found[0].keys()
        for step, (values, same) in enumerate(zip(found, wanted, strict=True)):
            for name, value in values.items():
                where = f"rank {rank}, step {step}: {name}"
                assert torch.allclose(value, same[name], rtol=0, atol=1e-10), where


class Repeated:
    """A model that runs one module in two places, and one without parameters in two others."""

    def build(self) -> nn.Module:
        shared, activation = nn.Linear(8, 8), nn.Tanh()
        return nn.Sequential(
            nn.Embedding(16, 8), shared, activation, nn.Linear(8, 8), shared, activation, nn.Linear(8, 16)
        )

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        return TinyConfig().batch(step, samples)


@pytest.mark.wide(5)
@pytest.mark.parametrize("layout", ["NNG", "IIG", "GGG"])
@pytest.mark.parametrize(("schedule", "pipeline"), [("1f1b", 1), ("1f1b", 2), ("zb-v", 2)])
def test_a_repeated_module_trains_like_in_one_process(schedule: str, pipeline: int, layout: str) -> None:
    assert_parity(Case(layout, pipeline=pipeline, intra=2, schedule=schedule, model=Repeated()))
