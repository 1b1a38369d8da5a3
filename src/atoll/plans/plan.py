"""Plans, which the planner returns and the engine executes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import product

from atoll.base.errors import PlanError
from atoll.plans.host import HostState
from atoll.plans.ir import Schedule
from atoll.plans.ir.residency import REDUCTIONS, RESIDENCIES, Reduction, Residency, current
from atoll.plans.layouts import (
    GATHER_PARAMETER,
    NO_CODECS,
    Axis,
    Codecs,
    Holders,
    Layout,
    Nest,
    Precision,
    Sharding,
    Whole,
)
from atoll.plans.outer import Outer
from atoll.plans.slices import even_slices

MOST_MICROBATCHES = 8_191
"""Maximum number of microbatches of a rank in a step. A message's tag has 13 bits for its microbatch."""

RECOMPUTE = ("none", "block", "selective")
COMPILE = ("none", "block", "block-eager")


class Ending(StrEnum):
    """The kind of a step's end."""

    AT_ONCE = "at once"
    AHEAD = "ahead"
    CHAIN = "chain"


class View(StrEnum):
    """The units that see the data-parallel ranks in one way: experts, which some of the ranks of a group divide, and
    all others."""

    DENSE = "dense"
    EXPERTS = "experts"


_INTRA = {View.DENSE: "intra", View.EXPERTS: "shard"}
"""The axis inside a group over which units of a view are sharded."""


AXES = ("pp", "inter", "intra", "tp")
"""The axes of a mesh in their usual order, outermost first."""

ORDERS = (AXES, ("inter", "pp", "intra", "tp"), ("inter", "intra", "pp", "tp"))
"""Allowed orders of the axes: the pipeline between nodes, or inside them as far as it fits."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Ranks along each mesh axis.

    order: the axes over the ranks of the world, outermost first. Ranks along inner axes are consecutive, so they share
    a node as far as possible. `pp` may be first, before `intra` or after it; `inter` comes before `intra`, and `tp`
    last.
    expert: consecutive ranks of a group that divide the experts of a mixture. They are no further ranks: the experts
    see `inter` x `intra / expert` data-parallel ranks, everything else `inter` x `intra`.
    sequence: consecutive ranks of a group that divide each sequence. They are no further ranks either: they have the
    same samples, of which each takes a part, and parameters see all of them as data-parallel ranks.

    Raises PlanError for an axis without ranks, for any other order, and if `expert` or `sequence` does not divide
    `intra`.
    """

    pipeline: int = 1
    inter: int = 1
    intra: int = 1
    tensor: int = 1
    order: tuple[str, ...] = AXES
    expert: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            known = "; ".join(", ".join(order) for order in ORDERS)
            raise PlanError(f"order of the mesh's axes = {', '.join(self.order)}; known: {known}")
        for axis, size in self.sizes.items():
            if size < 1:
                raise PlanError(f"mesh axis {axis!r} has {size} ranks; every axis needs at least 1")
        if self.expert < 1 or self.intra % self.expert:
            raise PlanError(
                f"expert = {self.expert} does not divide intra = {self.intra}: the ranks of a group divide the experts "
                "among them; use a divisor, or 1 to leave experts whole"
            )
        if self.sequence < 1 or self.intra % self.sequence:
            raise PlanError(
                f"sequence = {self.sequence} does not divide intra = {self.intra}: ranks of a group divide each "
                "sequence among them; use a divisor, or 1 to leave sequences whole"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> ranks, outermost first."""
        sizes = {"pp": self.pipeline, "inter": self.inter, "intra": self.intra, "tp": self.tensor}
        return {axis: sizes[axis] for axis in self.order}

    @property
    def data(self) -> int:
        """Data-parallel ranks, inter * intra."""
        return self.inter * self.intra

    @property
    def shares(self) -> int:
        """The shares of a step's samples: one for each data-parallel rank, or for each that divide their sequences."""
        return self.data // self.sequence

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pipeline * self.data * self.tensor

    def stride(self, axis: str) -> int:
        """Return how far neighbours along an axis are apart in the world."""
        return math.prod(self.sizes[inner] for inner in self.order[self.order.index(axis) + 1 :])

    def place(self, rank: int) -> Place:
        """Return the place of the world rank `rank`."""
        if not 0 <= rank < self.world:
            raise PlanError(f"rank {rank} is outside a mesh of {self.world} ranks {self.sizes}")
        at = {}
        for axis, size in reversed(self.sizes.items()):
            rank, at[axis] = divmod(rank, size)
        return Place(self, **at)


@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of one rank in a mesh."""

    mesh: MeshShape
    pp: int
    inter: int
    intra: int
    tp: int

    @property
    def coordinates(self) -> dict[str, int]:
        """Axis name -> position."""
        return {"pp": self.pp, "inter": self.inter, "intra": self.intra, "tp": self.tp}

    @property
    def rank(self) -> int:
        """The world rank."""
        rank, at = 0, self.coordinates
        for axis, size in self.mesh.sizes.items():
            rank = rank * size + at[axis]
        return rank

    @property
    def data(self) -> int:
        """Index of the data-parallel rank."""
        return self.inter * self.mesh.intra + self.intra

    @property
    def share(self) -> int:
        """Index of its share of a step's samples, which is the `share`-th run of consecutive microbatches."""
        return self.data // self.mesh.sequence

    @property
    def sequence(self) -> int:
        """The part of each sequence that this rank has."""
        return self.intra % self.mesh.sequence

    @property
    def expert(self) -> int:
        """The part of the experts that this rank has."""
        return self.intra % self.mesh.expert

    @property
    def nest(self) -> Nest:
        """The place among the data-parallel ranks."""
        return self.nest_of(View.DENSE)

    def nest_of(self, view: View) -> Nest:
        """The place among the data-parallel ranks that share units of a view."""
        each = self.mesh.expert if view is View.EXPERTS else 1
        return Nest(self.mesh.inter, self.mesh.intra // each, self.inter, self.intra // each)

    def peers(self, *axes: str) -> tuple[int, ...]:
        """Return the world ranks along `axes` through this one, in order; along one axis, this rank is at its own
        coordinate.

        Three axes lie along `intra`: `expert`, the ranks that divide the experts, `shard`, those that share them, and
        `sequence`, those that divide sequences.
        """
        own = self.coordinates
        positions = product(*(self._along(axis) for axis in axes))
        return tuple(Place(self.mesh, **{**own, **dict(at)}).rank for at in positions)

    def _along(self, axis: str) -> Iterator[tuple[str, int]]:
        """Yield the coordinate that differs along an axis."""
        each, size, first = self.mesh.expert, self.mesh.intra, self.intra - self.sequence
        within = {"expert": range(self.intra - self.expert, self.intra - self.expert + each),
                  "shard": range(self.expert, size, each),
                  "sequence": range(first, first + self.mesh.sequence)}  # fmt: skip
        if axis in within:
            yield from (("intra", at) for at in within[axis])
        else:
            yield from ((axis, at) for at in range(self.mesh.sizes[axis]))


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan: mesh, layout, schedule, precision, recompute and microbatches.

    microbatch: samples of one microbatch. Microbatches a rank and step: `schedule.microbatches`.
    residency: how long gathered parameters are kept: `action`, each block during its use; `run`, stages while they fit
    in memory; `step`. If not given, `step` where a gather sends nothing, and `action` elsewhere.
    resident: bytes of gathered parameters that `run` may keep on a rank between actions; the size of its largest stage
    if not given.
    unit: blocks that are gathered and reduced together, where they follow each other in a stage and are of one class.
    reduction: how often gradients are reduced to their shards: `microbatch`, `run` (before another stage's), `step`.
    compile: `block` compiles each block with torch.compile; `block-eager` traces the same graphs and runs them without
    generating code, which needs no compiler.
    post_validation: stages take the optimizer step without waiting for the global norm, which is checked afterwards.
    sequence_parallel: with tensor parallelism, modules between the split ones compute a part of the sequence.
    vocabulary_parallel: each pipeline rank has a slice of embedding and head, looks up and scores every microbatch.
    With tensor parallelism, each rank of its group has a part of that slice.
    loss_chunks: the number of chunks of a microbatch's tokens in which logits and loss are computed, one after the
    other, so that no more than the logits of one exist.
    prefetch: bytes of parameters that may be prefetched; the size of a block for each link that a gather crosses if not
    given. 0 uses the least memory: nothing is prefetched, and a block's gradients are reduced before those of the next
    block are computed.
    layers_per_stage: the number of layers of each stage; as even as possible if not given (atoll.plans.stages).
    states: tensors that the optimizer keeps of every parameter besides the master (Adam 2, momentum 1, SGD 0), for
    predicted bytes.  whole: matrices that it transforms whole, and what it keeps of these; an engine takes it from its
    optimizer.
    codecs: what is sent of gradients and parameters between groups; nothing is encoded if not given.
    outer: outer steps of islands that train independently, each at one position along `inter`: see `atoll.plans.outer`.
    Levels I and G of the layout are then both of the island's data-parallel ranks. If islands are worlds of their own
    (`Outer.apart`), the mesh is that of one island.
    expert_layout: the layout of the experts, as `layout` if not given. Their levels are of the ranks that share them,
    `inter` x `intra / expert`.
    imbalance: the most rows that a rank's experts are sent, as a multiple of an even share, for predictions.
    host: what rests in host memory instead of the device's; nothing if not given.
    slice_work: with slices of sequences (`schedule.slices`), the work of a token for each token that it attends to,
    relative to its own: slices have equal work. 0: equal lengths.
    """

    mesh: MeshShape
    layout: Layout
    schedule: Schedule
    microbatch: int
    precision: Precision = field(default_factory=lambda: Precision.preset("fp32"))
    residency: Residency | None = None
    reduction: Reduction = "microbatch"
    resident: int | None = None
    unit: int = 1
    recompute: str = "none"
    post_validation: bool = False
    compile: str = "none"
    prefetch: int | None = None
    sequence_parallel: bool = False
    vocabulary_parallel: bool = False
    layers_per_stage: tuple[int, ...] | None = None
    states: int = 2
    codecs: Codecs = NO_CODECS
    outer: Outer | None = None
    whole: Whole | None = None
    expert_layout: Layout | None = None
    imbalance: float = 1.0
    host: HostState | None = None
    slice_work: float = 0.0
    loss_chunks: int = 1

    def __post_init__(self) -> None:
        if not self.imbalance >= 1.0:
            raise PlanError(f"imbalance = {self.imbalance}; a multiple of an even share, 1.0 or more")
        if self.host is not None and self.host.optimizer and self.whole is not None:
            raise PlanError(
                f"host memory with {self.whole.name}: the state of matrices that are transformed whole stays with the "
                "rank that owns each; use an elementwise optimizer such as AdamW, or leave host out"
            )
        if self.outer is not None and self.outer.apart is None and self.mesh.inter < 2:
            raise PlanError(
                "outer steps are between islands, and a mesh with inter = 1 has one; use two groups or more, islands "
                "that are worlds of their own (apart), or leave outer out"
            )
        if self.schedule.ranks != self.mesh.pipeline:
            raise PlanError(
                f"schedule {self.schedule.name!r} is for {self.schedule.ranks} pipeline ranks, the mesh has "
                f"{self.mesh.pipeline}; build the schedule for the mesh"
            )
        if not (math.isfinite(self.slice_work) and self.slice_work >= 0):
            raise PlanError(f"slice_work = {self.slice_work}: work of a token relative to its own, 0 or more")
        if self.schedule.microbatches > MOST_MICROBATCHES:
            each = "microbatches" if self.schedule.slices == 1 else "slices of microbatches"
            raise PlanError(
                f"{self.schedule.microbatches} {each} a rank and step: at most {MOST_MICROBATCHES}, so that each has a "
                "message of its own; make them larger"
            )
        if self.microbatch < 1:
            raise PlanError(f"microbatch = {self.microbatch}; a microbatch needs at least one sample")
        if self.recompute not in RECOMPUTE:
            raise PlanError(f"recompute = {self.recompute!r}; known: {', '.join(RECOMPUTE)}")
        if self.offloads and self.recompute == "selective" and self.compile != "none":
            raise PlanError(
                "host: activations, with recompute = 'selective' and compile: what a compiled block keeps then is not "
                "seen; use recompute = 'none' or 'block', or compile = 'none'"
            )
        shares = None if self.host is None else self.host.activations
        if isinstance(shares, tuple) and len(shares) != self.schedule.stages:
            raise PlanError(
                f"host: activations = {list(shares)}, of {len(shares)} stages, and the schedule has "
                f"{self.schedule.stages}; give a share for each, or one number"
            )
        if self.compile not in COMPILE:
            raise PlanError(f"compile = {self.compile!r}; known: {', '.join(COMPILE)}")
        if self.prefetch is not None and self.prefetch < 0:
            raise PlanError(f"prefetch = {self.prefetch} bytes; use 0 for the least memory, or leave it out")
        if self.unit < 1:
            raise PlanError(f"unit = {self.unit}; a unit has at least one block")
        if self.sequence_parallel and self.mesh.tensor == 1:
            raise PlanError("sequence_parallel splits sequences over a tensor-parallel group, and tensor = 1 has none")
        if self.vocabulary_parallel and self.mesh.pipeline == 1:
            raise PlanError(
                "vocabulary_parallel splits embedding and head over two or more pipeline ranks, and the mesh has one; "
                "turn it off, or use pipeline = 2 or more"
            )
        if self.loss_chunks < 1:
            raise PlanError(f"loss_chunks = {self.loss_chunks}: 1 to compute the loss of all tokens at once, or more")
        if self.loss_chunks > 1 and self.vocabulary_parallel:
            raise PlanError(
                f"loss_chunks = {self.loss_chunks} with vocabulary_parallel, whose ranks score their slices of the "
                "vocabulary for all tokens of a microbatch; leave one of them out"
            )
        if self.residency is not None:
            object.__setattr__(self, "residency", current(self.residency))
        if self.residency not in (None, *RESIDENCIES):
            raise PlanError(f"residency = {self.residency!r}; known: {', '.join(RESIDENCIES)}")
        if self.reduction not in REDUCTIONS:
            raise PlanError(f"reduction = {self.reduction!r}; known: {', '.join(REDUCTIONS)}")
        if self.resident is not None and (self.resident < 0 or self.residency != "run"):
            raise PlanError(
                f"resident = {self.resident} bytes with residency = {self.stays!r}; 0 or more, for 'run' alone"
            )

    @property
    def stays(self) -> Residency:
        """How long gathered parameters are kept: `residency`, or its default.

        A gather that sends nothing, and copies nothing from host memory, is a copy on the device, or a cast of the
        master where p and os are sharded alike. `action` would save the memory of these copies, and make two of each
        block in a microbatch.
        """
        if self.residency is not None:
            return self.residency
        views = (View.DENSE, View.EXPERTS) if self.divides_experts else (View.DENSE,)
        each = [self.sharding(self.mesh.place(0), view) for view in views]
        is_sent = any(sharding.real(GATHER_PARAMETER[sharding.layout.parameters]) for sharding in each)
        comes = self.host is not None and self.host.parameters is not None
        return "action" if is_sent or comes else "step"

    @property
    def least_states(self) -> int:
        """The fewest tensors that the optimizer keeps of any parameter besides the master."""
        return self.states if self.whole is None else min(self.states, self.whole.states)

    @property
    def matrices(self) -> str | None:
        """The ranks that transform matrices whole, in words; None for an elementwise optimizer."""
        if self.whole is None:
            return None
        among = []
        for view, parts in ((View.DENSE, self.mesh.tensor), (View.EXPERTS, 1)):
            nest = self.nest(self.mesh.place(0), view)
            holders = Holders(nest, self.layout_of(view).optimizer, parts)
            among.append(_owned(holders.count, groups=self.islands * nest.ranks // holders.shards))
        said = ", an expert's ".join(among if self.divides_experts else among[:1])
        return f"{self.whole.name}: each matrix is transformed whole, {said}; AdamW for everything else"

    @property
    def slice_lengths(self) -> Callable[[int], tuple[int, ...]] | None:
        """The lengths of the slices of a sequence, given its length; None for equal ones."""
        if self.schedule.slices == 1 or not self.slice_work:
            return None
        return partial(
            even_slices, slices=self.schedule.slices, quadratic=self.slice_work, multiple=self.slice_multiple
        )

    @property
    def slice_multiple(self) -> int:
        """The length of each slice is a multiple of this: of the ranks that divide its positions."""
        return self.mesh.sequence * (self.mesh.tensor if self.sequence_parallel else 1)

    @property
    def end(self) -> Ending:
        """The rule by which the plan's steps end."""
        return Ending.AHEAD if self.post_validation else Ending.AT_ONCE

    @property
    def offloads(self) -> float:
        """The share of activations that leaves for host memory, of stages on average."""
        return 0.0 if self.host is None else self.host.share

    @property
    def islands(self) -> int:
        """Islands among the ranks, which train independently: 1 without outer steps, and where each is a world of its
        own."""
        return self.mesh.inter if self.has_islands else 1

    @property
    def has_islands(self) -> bool:
        """True if the groups of the mesh are islands."""
        return self.outer is not None and self.outer.apart is None

    @property
    def divides_experts(self) -> bool:
        """True if the experts of a block are a unit of their own."""
        return self.mesh.expert > 1 or self.expert_layout not in (None, self.layout)

    def layout_of(self, view: View) -> Layout:
        """The layout of a view's units."""
        return self.layout if view is View.DENSE or self.expert_layout is None else self.expert_layout

    def nest(self, place: Place, view: View = View.DENSE) -> Nest:
        """The place of a rank among the data-parallel ranks that it shares the layout with: those of its island."""
        nest = place.nest_of(view)
        return Nest(1, nest.intra, 0, nest.j) if self.has_islands else nest

    def sharding(self, place: Place, view: View = View.DENSE) -> Sharding:
        """Return the layout of a view's units on the rank at `place`.

        Experts that no other rank has are whole, and their parameters are not copied to be gathered: where `expert` is
        `intra`, their level I is N. Their gradients have memory within a step alone, as at level I.
        """
        layout, nest = self.layout_of(view), self.nest(place, view)
        if view is View.EXPERTS:
            first = "N" if nest.parts(layout.parameters) == 1 else layout.parameters.name
            layout = Layout(first + layout.name[1:])
        return Sharding(
            layout,
            self.precision,
            nest,
            keeps_apart=self.post_validation,
            states=self.states,
            codecs=self.codecs,
            anchors=0 if self.outer is None else self.outer.tensors,
            anchors_on_host=self.outer is not None and not self.has_islands,
            whole=self.whole,
            tp=place.tp,
            along={Axis.INTER: "inter", Axis.INTRA: _INTRA[view]},
        )

    @property
    def global_batch(self) -> int:
        """Number of samples per step over all ranks."""
        return self.microbatch * self.schedule.whole_microbatches * self.mesh.shares


def _owned(count: int, *, groups: int) -> str:
    """Return which rank transforms a matrix, in words. count: ranks that shard its state.  groups: of that many ranks,
    each with the whole state."""
    if count == 1:
        return "on every rank that stores it" if groups > 1 else "on the rank that stores it"
    of = "of each group that shards its state" if groups > 1 else "that shard its state"
    return f"on one of the {count} ranks {of}"
