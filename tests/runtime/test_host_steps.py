"""Steps on the host, in one process: what comes up, and what is forgotten."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.plans.host import HostState
from atoll.plans.layouts import Layout, Nest, Precision, Sharding
from atoll.plans.plan import MeshShape
from atoll.runtime.lanes import STEP_LANES, Inline, LaneKind
from atoll.runtime.sharding.hosted import begin_copy
from atoll.runtime.sharding.optimizer import ShardedOptimizer
from atoll.runtime.sharding.slices import hosted_of
from atoll.runtime.sharding.surroundings import Surroundings
from atoll.runtime.sharding.unit import Unit, UnitSpec
from atoll.runtime.transport import GlooTransport

CPU = torch.device("cpu")
LANES: tuple[LaneKind, ...] = (*STEP_LANES, "onload", "offload", "host")


class Travels:
    """A clock that notes whose transfers have ended."""

    def __init__(self) -> None:
        self.seen: list[tuple[LaneKind, int]] = []

    def now(self) -> float:
        return 0.0

    def travelled(self, kind: LaneKind, unit: int, start: float) -> None:
        self.seen.append((kind, unit))


def unit_on_host(index: int) -> Unit:
    """A unit of a rank alone, whose state rests in host memory and is stepped there."""
    plain = Sharding(Layout("NNN"), Precision.preset("fp32"), Nest())
    sharding = HostState("update-on-host").placed(plain, is_on_host=True)
    transport = GlooTransport(MeshShape().place(0), CPU)
    around = Surroundings(sharding, transport, CPU, {kind: Inline(kind) for kind in LANES})
    spec = UnitSpec(index, "block", (f"{index}.weight",), (index,), is_shared=False)
    parameters = {f"{index}.weight": nn.Parameter(torch.ones(3))}
    return Unit(spec, parameters, around, owners=(0,), phases={f"{index}.weight": frozenset({"I"})})


@pytest.mark.parametrize("is_ahead", [False, True])
def test_what_is_forgotten_does_not_come_up(is_ahead: bool) -> None:
    """Of a step ahead that was refused before its parameters came up, in each unit; a step that counts still comes."""
    units = [unit_on_host(index) for index in range(2)]
    names = [(name, (3,)) for unit in units for name in unit.spec.names]
    optimizer = ShardedOptimizer(
        units, lambda groups: torch.optim.SGD(groups, lr=0.5), named_shapes=names, options=None
    )
    every = [hosted for unit in units for hosted in hosted_of(unit)]
    assert [hosted.is_due for hosted in every] == [False, False]
    for hosted in every:
        hosted.expect_step(is_ahead=is_ahead)
        hosted.begin_step(hosted.raise_to(torch.zeros(3), torch.zeros(3)), is_ahead=is_ahead)
    optimizer.hosted.forget()
    assert [hosted.is_due for hosted in every] == [not is_ahead] * 2
    assert [hosted.is_due_ahead for hosted in every] == [False, False]


def test_a_copy_is_recorded_as_its_units() -> None:
    (segment,) = unit_on_host(5).segments
    lane, clock = segment.flat.around.lanes["onload"], Travels()
    lane.clock = clock
    target = torch.zeros(3)
    begin_copy(segment.flat, "onload", [(target, torch.arange(3.0))]).wait()
    assert target.tolist() == [0.0, 1.0, 2.0]
    assert clock.seen == [("onload", 5)]
