"""Goal and search space of the planner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, TypeVar

from atoll.base.errors import ConfigError
from atoll.plans.host import HostState
from atoll.plans.ir import Schedule
from atoll.plans.ir.residency import REDUCTIONS, RESIDENCIES, Reduction, Residency, current
from atoll.plans.layouts import EFFECTIVE, NO_CODECS, Codecs, Layout, Level, Precision
from atoll.plans.plan import AXES, ORDERS, RECOMPUTE, MeshShape, View
from atoll.plans.schedules.catalogue import takes
from atoll.prediction.cost import Cluster, Use

Word = TypeVar("Word", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The requirements of a step.

    global_batch: samples per step, of `sequence` tokens each.  ranks: devices; by default all of the cluster.
    headroom: share of a device's memory that a plan has to leave free, for errors of the prediction.  imbalance: as in
    `Plan`.

    Raises ConfigError for impossible sizes.
    """

    global_batch: int
    sequence: int
    ranks: int | None = None
    headroom: float = 0.05
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        sizes = {"global_batch": self.global_batch, "sequence": self.sequence, "ranks": self.ranks}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ConfigError(f"goal: {name} = {size}; it must be 1 or more")
        if not 0 <= self.headroom < 1:
            raise ConfigError(f"goal: headroom = {self.headroom}; it is a share of the memory, from 0 to below 1")


class Made(NamedTuple):
    """An order searched for one plan, and the number of layers of each of its stages."""

    schedule: Schedule
    layers_per_stage: tuple[int, ...]


class Order(NamedTuple):
    """A schedule by name, with its stages per rank if it takes a number; or a searched order with a name of its own.
    slices: of each sequence.  layers: of each stage, on nodes of several kinds; None for the even split."""

    name: str
    chunks: int | None = None
    made: Made | None = None
    slices: int = 1
    layers: tuple[int, ...] | None = None

    @property
    def layers_per_stage(self) -> tuple[int, ...] | None:
        """The number of layers of each stage; None for the even split."""
        return self.layers if self.made is None else self.made.layers_per_stage


LONG = 32_768
"""Tokens of a sequence from which on dividing it is among the choices."""

SLICES = (1, 2, 4, 8, 16)
"""Slices of such a sequence."""

LOSS_TOKENS = 8_192
"""Tokens of which the logits are computed at a time, if the loss of such sequences is computed in chunks."""

SLICED = ("1f1b", "zb-v", "interleaved")
"""Schedules that are tried with them, if it is not said which."""

ORDERS_ALONE = (Order("1f1b"), Order("breadth-first"))
"""Orders without a pipeline: each microbatch forward and backward, or chunk by chunk."""

ORDERS_OF_A_PIPELINE = (
    Order("1f1b"),
    Order("zb-h1"),
    Order("zb-v"),
    Order("interleaved", 2),
    Order("interleaved", 4),
    Order("zb-h2"),
    Order("v-half"),
    Order("v-min"),
    Order("dualpipe-v"),
    Order("breadth-first", 2),
    Order("unit", 2),
    Order("gpipe"),
)


class Frame(NamedTuple):
    """The choices on which the work of a microbatch depends."""

    mesh: MeshShape
    microbatch: int
    microbatches: int
    recompute: str
    precision: str
    sequence_parallel: bool
    vocabulary_parallel: bool
    loss_chunks: int = 1

    def use(self, goal: Goal) -> Use:
        """Return how a rank executes the model."""
        return Use(
            samples=self.microbatch,
            sequence=goal.sequence,
            divide=self.mesh.sequence,
            tensor=self.mesh.tensor,
            expert=self.mesh.expert,
            imbalance=goal.imbalance,
            sequence_parallel=self.sequence_parallel,
            compute=Precision.preset(self.precision).compute,
            recompute=self.recompute,
            chunks=self.loss_chunks,
            products=Precision.preset(self.precision).products,
        )


class Travel(NamedTuple):
    """The choices of storage and communication on data-parallel ranks."""

    layout: Layout
    residency: Residency
    reduction: Reduction
    unit: int
    prefetch: int | None
    post_validation: bool
    expert_layout: Layout | None = None
    host: HostState | None = None

    def layout_of(self, view: View) -> Layout:
        """The layout of a view's units."""
        return self.layout if view is View.DENSE or self.expert_layout is None else self.expert_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The values that a planner chooses from, the simplest first; None for all.

    pipeline, tensor, intra: ranks along these axes; by default all divisors. A group is within a node, and so are
    tensor-parallel ranks.  expert: ranks of a group that divide experts; by default all divisors of both.
    divide: ranks of a group that divide sequences; by default all divisors if these have `LONG` tokens or more, and
    none if they are shorter.  slices: of each sequence, with schedules that take them; by default `SLICES` with those
    of `SLICED`, of a pipeline with such sequences.
    loss_chunks: of a microbatch's tokens; by default one, and for such sequences also as many as make chunks of at most
    `LOSS_TOKENS` tokens.
    expert_layout: of experts; if None that of all else, unless another one saves time for the fastest plans.
    order: of the mesh's axes over the ranks.  schedules: of a pipeline, those of
    `atoll.prediction.planner.space.ORDERS_OF_A_PIPELINE` if not given, and orders searched for the fastest plans.
    microbatch: samples; all divisors of a rank's share if not given.  precision: presets of `atoll.Precision`; those
    with a dtype for which the device has no rate are left out.  codecs: of every plan. They change the results, so the
    planner chooses none.  host: what rests in host memory, of every plan; if not given nothing, unless nothing else
    fits, or it saves time, on a cluster whose host memory is known.  nodes: orders in which ranks are started on nodes
    of several kinds, as in `Cluster.ordered`; all if not given.
    """

    pipeline: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    intra: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    divide: tuple[int, ...] | None = None
    slices: tuple[int, ...] | None = None
    expert_layout: Layout | None = None
    order: tuple[tuple[str, ...], ...] = ORDERS
    schedules: tuple[Order, ...] | None = None
    microbatch: tuple[int, ...] | None = None
    layouts: tuple[Layout, ...] = EFFECTIVE
    residency: tuple[Residency, ...] = RESIDENCIES
    reduction: tuple[Reduction, ...] = REDUCTIONS
    unit: tuple[int, ...] = (1, 2, 4)
    prefetch: tuple[int | None, ...] = (None, 0)
    recompute: tuple[str, ...] = RECOMPUTE
    precision: tuple[str, ...] = ("fp32", "bf16")
    post_validation: tuple[bool, ...] = (False, True)
    sequence_parallel: tuple[bool, ...] = (False, True)
    vocabulary_parallel: tuple[bool, ...] = (False, True)
    loss_chunks: tuple[int, ...] | None = None
    codecs: Codecs = NO_CODECS
    nodes: tuple[tuple[str, ...], ...] | None = None
    host: HostState | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "residency", tuple(map(current, self.residency)))

    def frames(self, goal: Goal, cluster: Cluster, *, blocks: int, experts: int = 0) -> Iterator[Frame]:
        """Yield every mesh with its possible microbatches. blocks: of the model, the maximum length of a pipeline.
        experts: of a layer, 0 if there are none.

        Meshes with equal placement on the network are yielded once, in the first order of `order`. Raises ConfigError
        if the device has no rate for any of the precisions.
        """
        computes = {name: Precision.preset(name).compute for name in self.precision}
        devices = [kind.device for kind in cluster.kinds]
        precisions = [name for name, compute in computes.items() if all(compute in device.rates for device in devices)]
        if not precisions:
            for device in devices:
                device.rate(computes[self.precision[0]])
        for mesh in self.meshes(goal, cluster, blocks=blocks, experts=experts):
            share, rest = divmod(goal.global_batch, mesh.shares)
            if rest:
                continue
            sizes = _chosen(self.microbatch, share)
            spread = (False,) if mesh.tensor == 1 else self.sequence_parallel
            sliced = (False,) if mesh.pipeline == 1 else self.vocabulary_parallel
            for size, recompute, precision, is_spread, is_sliced in product(
                sizes, self.recompute, precisions, spread, sliced
            ):
                if is_spread and goal.sequence % (mesh.tensor * mesh.sequence):
                    continue
                for chunks in self._chunks(size * goal.sequence // mesh.sequence, goal):
                    if chunks == 1 or not is_sliced:
                        yield Frame(mesh, size, share // size, recompute, precision, is_spread, is_sliced, chunks)

    def _chunks(self, tokens: int, goal: Goal) -> tuple[int, ...]:
        """Return the numbers of chunks of a rank's tokens of a microbatch."""
        if self.loss_chunks is not None:
            return self.loss_chunks
        return (1,) if goal.sequence < LONG else tuple(sorted({1, -(-tokens // LOSS_TOKENS)}))

    def meshes(self, goal: Goal, cluster: Cluster, *, blocks: int, experts: int = 0) -> Iterator[MeshShape]:
        """Yield every mesh of a goal's ranks."""
        world, devices = world_of(goal, cluster), cluster.node.devices
        divides = (1,) if self.divide is None and goal.sequence < LONG else self.divide
        for tensor in _chosen(self.tensor, world):
            if tensor > devices or experts % tensor:
                continue
            for pipeline in _chosen(self.pipeline, world // tensor):
                if pipeline > blocks:
                    continue
                seen = set()
                for order in self.order:
                    data = world // tensor // pipeline
                    within = devices // tensor // (pipeline if order.index("pp") > order.index("intra") else 1)
                    for intra in _chosen(self.intra, data):
                        mesh = MeshShape(pipeline, data // intra, intra, tensor, order)
                        lies = _lies(mesh, cluster)
                        if intra <= max(1, within) and lies not in seen:
                            seen.add(lies)
                            each = math.gcd(intra, experts // tensor) if experts else 1
                            for expert, divide in product(_chosen(self.expert, each), _chosen(divides, intra)):
                                yield replace(mesh, expert=expert, sequence=divide)

    def cause(self, goal: Goal, cluster: Cluster, *, blocks: int, experts: int = 0) -> str:
        """Return the constraint that leaves no frame; an empty text if there is one.

        The constraints in the order in which `meshes` and `frames` apply them: the first without which there would be a
        frame, if all that follow it were met as well, ruled out the last.
        """
        world = world_of(goal, cluster)
        if any(True for _ in self.frames(goal, cluster, blocks=blocks, experts=experts)):
            return ""
        for axis in ("tensor", "pipeline", "intra", "microbatch"):
            kept = getattr(self, axis)
            share = goal.global_batch if axis == "microbatch" else world
            if kept is not None and not _chosen(kept, share):
                of = "global_batch" if axis == "microbatch" else "ranks"
                return f"{axis} = {_listed(kept)} does not divide {share} ({of})"
        meshes = [*self.meshes(goal, cluster, blocks=blocks, experts=experts)]
        if not meshes:
            devices = cluster.node.devices
            kept_axes = {axis: getattr(self, axis) for axis in ("tensor", "pipeline", "intra")}
            words = [f"{axis} = {_listed(kept)}" for axis, kept in kept_axes.items() if kept is not None]
            return (
                f"{' with '.join(words) or 'every mesh'} leaves no mesh: together they divide the ranks, tensor and "
                f"intra are within the {devices} devices of a node, and a pipeline has at most {blocks} ranks, one for "
                "each block of the model; keep fewer choices, or use other numbers of ranks"
            )
        shares = sorted({mesh.shares for mesh in meshes})
        fitting = [share for share in shares if goal.global_batch % share == 0]
        if not fitting:
            return (
                f"global_batch = {goal.global_batch} is not divisible by {_listed(shares)}, the possible numbers of "
                "data-parallel ranks; use another global batch, or keep fewer choices"
            )
        if self.microbatch is not None and not any(
            _chosen(self.microbatch, goal.global_batch // each) for each in fitting
        ):
            return (
                f"microbatch = {_listed(self.microbatch)} does not divide a rank's share of global_batch = "
                f"{goal.global_batch}: {_listed([goal.global_batch // each for each in fitting])} samples"
            )
        tensors = sorted({mesh.tensor for mesh in meshes})
        return (
            f"sequence_parallel splits {goal.sequence} tokens over tensor = {_listed(tensors)} ranks, which do not "
            "divide them"
        )

    def plain_orders(self, frame: Frame) -> tuple[Order, ...]:
        """Return the schedules of a frame, for whole sequences."""
        if self.schedules is None:
            return ORDERS_ALONE if frame.mesh.pipeline == 1 else ORDERS_OF_A_PIPELINE
        return self.schedules

    def orders(self, frame: Frame, goal: Goal) -> tuple[Order, ...]:
        """Return the schedules of a frame, those of whole sequences first. Raises ConfigError if there is none."""
        every = self.plain_orders(frame)
        is_long = goal.sequence >= LONG and frame.mesh.pipeline > 1
        slices, among = self.slices, None
        if slices is None:
            slices, among = SLICES if is_long else (1,), SLICED
        found = tuple(
            order._replace(slices=count)
            for count in slices
            for order in every
            if count == 1 or (takes(order.name, "slices") and (among is None or order.name in among))
        )
        if not found:
            raise ConfigError(
                f"slices = {_listed(slices)}: none of the schedules {', '.join(order.name for order in every)} runs "
                "slices of sequences"
            )
        return found

    def travels(self, frame: Frame, *, chunks: int) -> Iterator[tuple[Travel, ...]]:
        """Yield the distinct ways to store and send state, in tuples of about equal traffic.

        chunks: stages of a rank. A rank with one stage keeps it for the step, unless its slice of the vocabulary needs
        the memory.
        """
        stays = chunks == 1 and not frame.vocabulary_parallel
        mesh, several = frame.mesh, frame.microbatches > 1 or frame.mesh.pipeline > 1
        validated = (False,) if mesh.pipeline == 1 else self.post_validation
        seen = set()
        for layout in self.layouts:
            placed = _placed(layout, mesh)
            if placed in seen:
                continue
            seen.add(placed)
            own = self.expert_layout
            is_whole = layout.parameters is Level.N and (own is None or own.parameters is Level.N)
            is_summed = layout.gradients is Level.N and (own is None or own.gradients is Level.N)
            units = self.unit[:1] if mesh.data == 1 else self.unit
            prefetch = self.prefetch[:1] if mesh.data == 1 else self.prefetch
            for residency, reduction in product(
                self.residency[:1] if is_whole or not several else _distinct(self.residency, stays),
                self.reduction[:1] if is_summed or not several else _distinct(self.reduction, stays),
            ):
                # With a larger unit more parameters stay gathered between two uses of a stage.
                is_apart = residency == "action" and not is_whole and several
                for alike in [(unit,) for unit in units] if is_apart else [units]:
                    yield tuple(
                        Travel(placed, residency, reduction, unit, ahead, is_validated, own, self.host)
                        for unit, ahead, is_validated in product(alike, prefetch, validated)
                    )

    def expert_layouts(self, mesh: MeshShape, *, besides: Layout) -> Iterator[Layout]:
        """Yield the distinct layouts of experts on a mesh, without that of all else."""
        shared = replace(mesh, intra=mesh.intra // mesh.expert, expert=1)
        seen = {_placed(besides, shared)}
        for layout in self.layouts if shared.data > 1 else ():
            placed = _placed(layout, shared)
            if placed not in seen:
                seen.add(placed)
                yield placed


def world_of(goal: Goal, cluster: Cluster) -> int:
    """Return the ranks of a goal. Raises ConfigError if the cluster has fewer."""
    every = cluster.nodes * cluster.node.devices
    if goal.ranks is not None and goal.ranks > every:
        raise ConfigError(
            f"goal: {goal.ranks} ranks on a cluster of {cluster.nodes} x {cluster.node.devices} devices; use at most "
            f"{every}, or say how many nodes there are (nodes, in the cluster's file)"
        )
    return every if goal.ranks is None else goal.ranks


def _chosen(given: tuple[int, ...] | None, share: int) -> list[int]:
    """Return the divisors of a share, or those of the given numbers that divide it."""
    candidates = range(1, share + 1) if given is None else sorted(set(given))
    return [size for size in candidates if share % size == 0]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:-1])) + (" or " if len(values) > 1 else "") + str(values[-1])


def _distinct(words: tuple[Word, ...], stays: bool) -> tuple[Word, ...]:
    """Return the residencies without "step" if "run" is among them and a rank has one stage."""
    return tuple(word for word in words if not stays or word != "step" or "run" not in words)


def _placed(layout: Layout, mesh: MeshShape) -> Layout:
    """Return the layout with one name for equivalent levels: N in a group of one rank, G if there is one group."""
    alike = "N" if mesh.intra == 1 else "G" if mesh.inter == 1 else "I"
    name = layout.name.replace("I", alike)
    return Layout(name if mesh.data > 1 else "NNN")


def _lies(mesh: MeshShape, cluster: Cluster) -> tuple[object, ...]:
    """Return a key that distinguishes meshes on a cluster: sizes, and the link along each axis."""
    sizes = {axis: mesh.sizes[axis] for axis in AXES}
    axes = [axis for axis, size in sizes.items() if size > 1]
    seats = [tuple(map(id, cluster.at(mesh, rank))) for rank in range(mesh.pipeline if cluster.groups else 0)]
    return (*sizes.values(), *(cluster.along(mesh, axis) for axis in axes), *seats)
