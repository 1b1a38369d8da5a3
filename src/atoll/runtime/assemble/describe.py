"""The programs of a plan before it runs: each rank is built on `meta`, with the code that builds it for a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from atoll.base._torch import pretended_ranks
from atoll.plans.layouts import Level
from atoll.plans.plan import Plan
from atoll.program import Program, Programs
from atoll.runtime.assemble.build import build_rank
from atoll.runtime.experts.division import DividedExperts
from atoll.runtime.experts.kinds import stacked_in
from atoll.runtime.models import adapter_for
from atoll.runtime.outline import Outline
from atoll.runtime.pipeline.deferred import Collector
from atoll.runtime.pipeline.routing import Balance
from atoll.runtime.sequence.divide import DividedSequences
from atoll.runtime.sharding.surroundings import Surroundings
from atoll.runtime.sharding.tensor_parallel import tensor_parallel
from atoll.runtime.sharding.unit import Unit
from atoll.runtime.transport import Later, Message, Peers, Tag, Transport
from atoll.runtime.transport.base import new_name


@dataclass(frozen=True, slots=True)
class Described:
    """A pipeline rank of a plan: its program, and the names of its units and blocks.

    outgoing: elements of each unit's outer gradient on a rank, one number for each segment; none without outer steps.
    count: number of units of the model.
    """

    program: Program
    units: Mapping[int, str]
    blocks: Mapping[int, str]
    outgoing: Mapping[int, tuple[int, ...]]
    count: int


def describe_rank(
    make_model: Callable[[], nn.Module], plan: Plan, rank: int, *, reads_in_place: bool = False, training: bool = True
) -> Described:
    """Return the program of a pipeline rank for a step, or for an evaluation of as many microbatches.

    make_model: returns the model on `meta`, a new one each time.  reads_in_place: whether the ranks of a group read
    each other's memory, as on one host's CPUs.

    Raises PlanError if plan and model do not match.
    """
    first = next(each for each in range(plan.mesh.world) if plan.mesh.place(each).pp == rank)
    pretended: AbstractContextManager[None] = nullcontext()
    if plan.mesh.tensor > 1 or plan.vocabulary_parallel or plan.mesh.expert > 1:
        pretended = pretended_ranks(first, plan.mesh.world)
    with pretended:
        transport = Nowhere(plan.mesh.place(first), torch.device("meta"))
        adapter = adapter_for(make_model())
        outline = Outline.of(adapter, plan, stacked=stacked_in(adapter.blocks()).values())
        sequences = DividedSequences.of(adapter, plan, transport.place)
        tensor = None
        if plan.mesh.tensor > 1:
            tensor = tensor_parallel(adapter, plan, transport.mesh_along("tp"), apart=outline.ends)
        mesh = None if tensor is None else tensor.mesh
        experts = DividedExperts.of(adapter, plan, transport, tensor=mesh, balance=Balance())
        around = Surroundings(plan.sharding(transport.place), transport, transport.device, lanes={})
        sharded = build_rank(
            outline, around=around, collector=Collector(), seed=0, tensor=tensor, experts=experts, sequences=sequences
        )
        shape = sharded.rank(transport.place, reads_in_place=reads_in_place)
        end = plan.end if training else None
        program = outline.program(rank, outline.row(rank, training=training), shape, end=end)
        names = [block.name for block in adapter.blocks()]
        return Described(
            program,
            {unit.spec.index: unit.spec.name for unit in sharded.units},
            {at: names[at] for stage in sharded.stages for at in stage.run},
            outgoing={} if plan.outer is None else _outgoing(sharded.units),
            count=len(sharded.specs),
        )


def _outgoing(units: Iterable[Unit]) -> dict[int, tuple[int, ...]]:
    """Return the trained elements of units at level G, by segment."""
    return {
        unit.spec.index: tuple(len(segment.flat.range(Level.G)) for segment in unit.segments if segment.flat.trainable)
        for unit in units
    }


def programs_of(
    make_model: Callable[[], nn.Module], plan: Plan, *, reads_in_place: bool = False, training: bool = True
) -> Programs:
    """Return the programs of all pipeline ranks, for `atoll.simulate`. Arguments and errors: as of `describe_rank`."""
    options = {"reads_in_place": reads_in_place, "training": training}
    ranks = range(plan.mesh.pipeline)
    return Programs(
        plan.schedule.placement, tuple(describe_rank(make_model, plan, rank, **options).program for rank in ranks)
    )


class Nowhere(Transport):
    """A transport that sends nothing. Ranks are built with it but do not run."""

    def send(self, tensor: Tensor, peer: int, tag: Tag) -> Message:
        _refuse()

    def receive(self, tensor: Tensor, peer: int, tag: Tag) -> Message:
        _refuse()

    def gather(self, whole: Tensor, peers: Peers, tag: Tag, *, own: Tensor | None = None, again: bool = False) -> None:
        _refuse()

    def reduce(self, whole: Tensor, peers: Peers, tag: Tag, *, out: Tensor | None = None) -> None:
        _refuse()

    def all_to_all(self, sent: Tensor, received: Tensor, peers: Peers, tag: Tag) -> None:
        _refuse()

    def exchange_rows(
        self, sent: Tensor, counts: tuple[Sequence[int], Sequence[int]], peers: Peers, tag: Tag
    ) -> AbstractContextManager[list[Tensor]]:
        _refuse()

    def total_later(self, values: Tensor) -> Later:
        _refuse()

    def mesh_along(self, *axes: str) -> DeviceMesh:
        """Return the mesh of simulated ranks along `axes`."""
        return DeviceMesh("cpu", list(self.place.peers(*axes)), mesh_dim_names=(new_name(axes),))


def _refuse() -> NoReturn:
    raise AssertionError("a rank that is only described sends nothing")
