"""The parts of a segment alone, in one process: who holds a buffer, and until when."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atoll.base.errors import RunError
from atoll.plans.layouts import Layout, Nest, Precision, Sharding
from atoll.plans.plan import MeshShape
from atoll.runtime.lanes import STEP_LANES, Inline
from atoll.runtime.sharding.collectives import Purpose
from atoll.runtime.sharding.host_steps import StepTerms
from atoll.runtime.sharding.optimizer import ShardedOptimizer
from atoll.runtime.sharding.segment import Segment
from atoll.runtime.sharding.surroundings import Surroundings
from atoll.runtime.sharding.unit import Unit, UnitSpec
from atoll.runtime.transport import Channel, GlooTransport, NcclTransport, Tag
from atoll.runtime.transport.base import GroupMemory, Peers
from atoll.testing.ordered import OrderedTransport

CPU = torch.device("cpu")


class Lending(GroupMemory):
    """Memory that is always free, and counts what it lends."""

    lent = 0

    def lend(self, numel: int, dtype: torch.dtype, readers: Peers, *, waits: bool = True) -> torch.Tensor | None:
        self.lent += 1
        return torch.empty(numel, dtype=dtype)


def around(precision: Precision, layout: str = "NIG") -> Surroundings:
    """Of rank 0 of a group of two; nothing is sent before a reduction."""
    transport = GlooTransport(MeshShape(intra=2).place(0), CPU)
    transport.memory = Lending(CPU)  # type: ignore[assignment]
    sharding = Sharding(Layout(layout), precision, Nest(inter=1, intra=2, i=0, j=0))
    return Surroundings(sharding, transport, CPU, {kind: Inline(kind) for kind in STEP_LANES})


def segment(surroundings: Surroundings) -> Segment:
    return Segment({"weight": nn.Parameter(torch.ones(4, 3))}, surroundings, phases=("I",), tag=(0, 0))


@pytest.mark.parametrize(("reduce", "lent"), [("float32", 1), ("bfloat16", 0)])
def test_gradients_that_are_cast_before_they_are_sent_take_no_lent_memory(reduce: str, lent: int) -> None:
    """The group reads the cast copy. Nobody would read the lent memory, and so it would never be free again."""
    surroundings = around(replace(Precision.preset("fp32"), reduce=reduce))
    segment(surroundings).gradients.buffer("weight", "I")
    memory = surroundings.transport.memory
    assert isinstance(memory, Lending)
    assert memory.lent == lent


def test_unsharded_gradients_are_held_until_their_reduction_has_been_waited_for() -> None:
    """On a GPU the job has only been launched: its buffer must not return to the allocator before the wait."""
    gradients = segment(around(Precision.preset("fp32"))).gradients
    buffer = torch.zeros(12)
    alive, seen = weakref.ref(buffer), []

    @dataclass
    class Job:
        def wait(self) -> None:
            seen.append(alive() is not None)

    gradients.reducing.append((Job(), buffer))
    del buffer
    gradients.end_reduction("I")
    assert seen == [True]
    assert alive() is None


def test_purposes_of_collectives_have_tags_of_their_own() -> None:
    """Two of a unit's collectives may be in flight at once, and must not match."""
    assert [purpose.name for purpose in Purpose] == list(Purpose.__members__)


def test_options_are_restored_after_a_step_that_fails() -> None:
    sharding = Sharding(Layout("NNN"), Precision.preset("fp32"), Nest())
    alone = GlooTransport(MeshShape().place(0), CPU)
    surroundings = Surroundings(sharding, alone, CPU, {kind: Inline(kind) for kind in STEP_LANES})
    parameters = {"weight": nn.Parameter(torch.ones(3))}
    spec = UnitSpec(0, "block", ("weight",), (0,), is_shared=False)
    unit = Unit(spec, parameters, surroundings, owners=(0,), phases={"weight": frozenset({"I"})})

    class Failing(torch.optim.SGD):
        rate = 0.0

        def step(self, closure: Any = None) -> Any:
            self.rate = self.param_groups[0]["lr"]
            raise RuntimeError("no kernel for this")

    optimizer = ShardedOptimizer(
        [unit], lambda groups: Failing(groups, lr=0.5), named_shapes=[("weight", (3,))], options=None
    )
    with pytest.raises(RuntimeError, match="no kernel"):
        optimizer.step(StepTerms(frozenset({"weight"}), 1.0, [{"lr": 2.0}]))
    assert isinstance(optimizer.torch, Failing)
    assert optimizer.torch.rate == 2.0
    assert optimizer.torch.param_groups[0]["lr"] == 0.5


def test_a_group_for_swaps_is_made_once() -> None:
    """Without tensor parallelism the ranks along the axes are those along the axes and tp."""
    made: list[tuple[int, ...]] = []

    def new_group(ranks: list[int]) -> object:
        made.append(tuple(ranks))
        return object()

    with patch.object(dist, "new_group", new_group):
        transport = NcclTransport(MeshShape(intra=2, pipeline=2).place(0), CPU)
        before = len(made)
        for axes in (("intra",), ("intra", "tp"), ("intra",)):
            transport.open_swaps(*axes)
    assert len(made) - before == len(set(made[before:])) == 2


def test_a_message_on_a_link_that_nobody_opened_is_refused() -> None:
    """NCCL would have no communicator for it."""
    transport = OrderedTransport(MeshShape(pipeline=4).place(0), CPU)
    with pytest.raises(RunError, match="SHARED from pipeline rank 0 to 2: this link was not opened"):
        transport.send(torch.zeros(1), 2, Tag(Channel.SHARED, 0))
    with pytest.raises(RunError, match="VERDICT from pipeline rank 1 to 0"):
        transport.receive(torch.zeros(1), 1, Tag(Channel.VERDICT, 0))
