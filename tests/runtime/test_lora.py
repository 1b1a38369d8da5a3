"""Low-rank adapters on a frozen base: the base rests sharded and travels as p only, the adapters are trained."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from atoll import Engine
from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision, traffic
from atoll.plans.layouts.flat import aligned
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.models import SequentialAdapter
from atoll.testing import run_ranks

HIDDEN, RANK, BLOCKS, MICROBATCHES, STEPS = 16, 2, 4, 2, 3


class LoraBlock(nn.Module):
    """A frozen linear layer and, beside it, two small trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, HIDDEN)
        self.base.requires_grad_(False)
        self.lora_a = nn.Linear(HIDDEN, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, HIDDEN, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.base(hidden) + self.lora_b(self.lora_a(hidden)))


class LoraChain(nn.Sequential):
    def atoll_adapter(self) -> SequentialAdapter:
        return SequentialAdapter(self, lambda outputs, batch: outputs.square().mean(-1).sum())


def build() -> LoraChain:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return LoraChain(*(LoraBlock() for _ in range(BLOCKS))).double()


def inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(MICROBATCHES, 3, HIDDEN, generator=generator, dtype=torch.float64)


def alone(ranks: int) -> dict[str, Tensor]:
    """Parameters after training in one process, on what all ranks have."""
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = torch.cat([inputs(step, rank) for rank in range(ranks)])
        (model(batch).square().mean(-1).sum() / batch[..., 0].numel()).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@dataclass(frozen=True)
class Seen:
    """What a rank saw. counted: bytes it sent in the last step, of parameters and gradients. foretold: by component."""

    parameters: dict[str, Tensor]
    counted: dict[str, int]
    foretold: tuple[int, int, int]


def train(layout: str, mesh: MeshShape) -> Seen:
    schedule = schedules.build("1f1b", ranks=mesh.pipeline, microbatches=MICROBATCHES)
    plan = Plan(mesh, Layout(layout), schedule, 1, precision=Precision.preset("fp64"), prefetch=0)
    engine = Engine(build(), plan, optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.05))
    before = dict(engine.transport.sent)
    for step in range(STEPS):
        if step == STEPS - 1:
            settle(engine)
            before = dict(engine.transport.sent)
        batch = inputs(step, engine.place.data)
        engine.step({"inputs": batch, "labels": torch.zeros(MICROBATCHES, 3, dtype=torch.long)})
    settle(engine)
    counted = {axis: engine.transport.sent[axis] - before.get(axis, 0) for axis in ("intra", "inter")}
    held, foretold = engine.memory(), engine.footprint()
    assert held == foretold.at_rest(plan.layout)
    with engine.full_parameters() as values:
        found = dict(values)
    engine.close()
    return Seen(
        found,
        counted,
        (foretold.parameters, foretold.gradients, foretold.optimizer),
    )


def settle(engine: Engine) -> None:
    for unit in engine.units:
        unit.wait_for_parameters()


@pytest.mark.parametrize("mesh", [MeshShape(inter=2, intra=2), MeshShape(pipeline=2, intra=2)])
@pytest.mark.parametrize("layout", ["NNN", "ING", "IIG", "GGG"])
def test_adapters_train_as_in_one_process(layout: str, mesh: MeshShape) -> None:
    wanted = alone(mesh.data)
    initial = dict(build().named_parameters())
    for seen in run_ranks(train, mesh.world, layout, mesh):
        for name, value in seen.parameters.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12)
            assert torch.equal(value, initial[name]) == (".base." in name)


@pytest.mark.parametrize("layout", ["NNG", "ING", "IIG", "GGG"])
def test_the_base_has_no_gradients_no_state_and_no_syncs(layout: str) -> None:
    mesh = MeshShape(inter=2, intra=2)
    trained = BLOCKS * 2 * HIDDEN * RANK * 8
    every = trained + BLOCKS * aligned(HIDDEN * HIDDEN + HIDDEN, mesh.data) * 8
    sizes = {"parameters_bytes": every, "trainable_bytes": trained, "inter": 2, "intra": 2}
    expected = traffic(Layout(layout), microbatches=MICROBATCHES, **sizes)
    ways = {"N": 1, "I": 2, "G": 4}
    for seen in run_ranks(train, 4, layout, mesh):
        assert seen.counted == {"intra": expected.intra_bytes, "inter": expected.inter_bytes}
        assert seen.foretold[1] == trained // ways[layout[1]]
    if layout == "ING":
        assert expected.inter_bytes == trained / 2 / 2 * 2, "a reduction and a gather of the adapters, across once each"
