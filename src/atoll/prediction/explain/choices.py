"""The choices of a plan, and plans with one choice changed.

A changed plan keeps the ranks and the global batch. If a choice moves ranks from one axis to another or resizes the
microbatch, the number of microbatches changes accordingly, and the schedule is built again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from atoll.base.errors import PlanError
from atoll.plans import schedules
from atoll.plans.host import FROZEN, TRAINED_TOO, UPDATES, HostState
from atoll.plans.layouts import EFFECTIVE, GATHER_PARAMETER, SYNC_PARAMETER, Axis, Codec, Layout, Level, Precision
from atoll.plans.plan import AXES, ORDERS, RECOMPUTE, MeshShape, Plan
from atoll.plans.schedules import CATALOGUE
from atoll.plans.schedules.catalogue import takes

if TYPE_CHECKING:
    from atoll.prediction.cost import Prediction

SAME_LAYOUT = "the same"
"""The layout of experts that is that of all else."""

NO = "off"
YES = "on"

FIXED = tuple(name for name, entry in CATALOGUE.items() if entry.bubbles)
"""Schedules whose order is determined by their sizes. Others are found by a search, which may take minutes."""

UNITS = (1, 2, 4)

CODED = ("int8", "int4")
"""Codecs that are worth a look: the others send as much or more."""

OUTER_CODED = (*CODED, "int2")
"""Those of outer gradients, for which alone two bits have been measured."""


def _always(prediction: Prediction) -> bool:
    return True


def _has_experts(prediction: Prediction) -> bool:
    return prediction.workload.experts > 0


def _knows_host(prediction: Prediction) -> bool:
    return prediction.cluster is not None and prediction.cluster.node.host is not None


def _has_far_stages(prediction: Prediction) -> bool:
    plan, cluster = prediction.plan, prediction.cluster
    return plan.codecs.near or cluster is None or not cluster.share_nodes(plan.mesh, 0, plan.mesh.pipeline - 1)


def _has_all_states(plan: Plan) -> bool:
    return plan.host is not None and plan.host.optimizer is not None and plan.host.fraction == 1


def _has_frozen(prediction: Prediction) -> bool:
    return _knows_host(prediction) and any(work.frozen for work in prediction.ranks.works)


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a plan.

    name: shown to users.  key: of the config.  now: its value in a plan.  others: other values to compare.
    make: returns the plan with another value; raises PlanError or ConfigError if there is none.
    plain: the value without any special feature; None if there is none.
    is_exact: whether a plan with another value has the same results, apart from the order of sums.
    applies: whether it is a choice for a workload on a cluster.
    """

    name: str
    key: str
    now: Callable[[Plan], str]
    others: Callable[[Plan], Iterator[str]]
    make: Callable[[Plan, str], Plan]
    plain: str | None = None
    is_exact: bool = True
    applies: Callable[[Prediction], bool] = _always

    def values(self, plan: Plan) -> list[str]:
        """Return its other values, each once."""
        return [value for value in dict.fromkeys(self.others(plan)) if value != self.now(plan)]


def rebuilt(
    plan: Plan,
    *,
    mesh: MeshShape | None = None,
    schedule: str | None = None,
    microbatch: int | None = None,
    batch: int | None = None,
    chunks: int | None = None,
    slices: int | None = None,
) -> Plan:
    """Return a plan on another mesh, with another schedule, microbatch or global batch.

    chunks: stages per rank, for schedules that take them; the plan's own if the schedule stays.  slices: of each
    sequence; the plan's own if the schedule takes them.

    Raises PlanError if the global batch is not divisible, or if the schedule's order has to be searched.
    """
    mesh, microbatch, batch = mesh or plan.mesh, microbatch or plan.microbatch, batch or plan.global_batch
    if plan.has_islands and mesh.inter != plan.mesh.inter:
        raise PlanError(f"{mesh.inter} islands instead of {plan.mesh.inter} would change the results")
    name = schedule or plan.schedule.name
    microbatches, rest = divmod(batch, microbatch * mesh.shares)
    if rest or not microbatches:
        raise PlanError(
            f"a global batch of {batch} is not a multiple of {microbatch} samples x {mesh.shares} data-parallel ranks"
        )
    if chunks is None and name == plan.schedule.name and takes(name, "chunks"):
        chunks = plan.schedule.chunks
    if slices is None:
        slices = plan.schedule.slices if name == plan.schedule.name or takes(name, "slices") else 1
    same = name, mesh.pipeline, microbatches, chunks or plan.schedule.chunks, slices
    built = plan.schedule
    if same != (built.name, built.ranks, built.whole_microbatches, built.chunks, built.slices):
        if name not in FIXED:
            raise PlanError(
                f"the order of {name!r} is made for one size; name a schedule in the config that is built for this one"
            )
        built = schedules.build(name, ranks=mesh.pipeline, microbatches=microbatches, chunks=chunks, slices=slices)
    return replace(
        plan,
        mesh=mesh,
        schedule=built,
        slice_work=plan.slice_work if built.slices > 1 else 0.0,
        microbatch=microbatch,
        layers_per_stage=plan.layers_per_stage if built.placement == plan.schedule.placement else None,
        vocabulary_parallel=plan.vocabulary_parallel and mesh.pipeline > 1,
        sequence_parallel=plan.sequence_parallel and mesh.tensor > 1,
    )


def with_axis(mesh: MeshShape, axis: str, size: int, *, gives: tuple[str, str]) -> MeshShape:
    """Return the mesh of the same ranks with `size` of them along an axis. gives: the axes that give or take the
    others, in order.

    Raises PlanError if no axis can.
    """
    for other in gives:
        whole = _whole(mesh, axis, other)
        if whole % size == 0:
            sizes: dict[str, Any] = {axis: size, other: whole // size}
            intra = sizes.get("intra", mesh.intra)
            divided: dict[str, Any] = {name: math.gcd(getattr(mesh, name), intra) for name in ("expert", "sequence")}
            return replace(mesh, **sizes, **divided)
    raise PlanError(f"{mesh.world} ranks {mesh.sizes} cannot have {size} along {axis!r}")


def _axis(name: str, key: str, axis: str, *, gives: tuple[str, str], plain: str | None = None) -> Choice:
    """Return the size of an axis: half and twice the present, and one, if the other axes allow it."""

    def now(plan: Plan) -> str:
        return str(getattr(plan.mesh, axis))

    def others(plan: Plan) -> Iterator[str]:
        wanted = [*([plain] if plain else []), *_around(int(now(plan)))]
        return (size for size in wanted if any(_whole(plan.mesh, axis, other) % int(size) == 0 for other in gives))

    def make(plan: Plan, value: str) -> Plan:
        return rebuilt(plan, mesh=with_axis(plan.mesh, axis, int(value), gives=gives))

    return Choice(name, key, now, others, make, plain)


def _whole(mesh: MeshShape, *axes: str) -> int:
    return math.prod(getattr(mesh, axis) for axis in axes)


def _around(now: int) -> Iterator[str]:
    """Return half and twice the number."""
    if now % 2 == 0:
        yield str(now // 2)
    yield str(2 * now)


def _switch(name: str, key: str, field: str, *, where: Callable[[Plan], bool]) -> Choice:
    """Return the choice of a field of `Plan` that is on or off, if it has an effect."""
    return Choice(
        name,
        key,
        now=lambda plan: YES if getattr(plan, field) else NO,
        others=lambda plan: _if(where(plan), YES, NO),
        make=lambda plan, value: replace(plan, **{field: value == YES}),  # type: ignore[arg-type]
        plain=NO,
    )


def _codec(name: str, of: str, applies: Callable[[Prediction], bool] = _always) -> Choice:
    """Return the choice of a codec between groups or stages, with the options of the present one."""

    def make(plan: Plan, value: str) -> Plan:
        codec = None if value == "none" else replace(getattr(plan.codecs, of) or Codec(value), name=value)
        return replace(plan, codecs=replace(plan.codecs, **{of: codec}))  # type: ignore[arg-type]

    def now(plan: Plan) -> str:
        codec = getattr(plan.codecs, of)
        return "none" if codec is None else str(codec.name)

    def others(plan: Plan) -> Iterator[str]:
        moves = [*GATHER_PARAMETER[plan.layout.parameters]]
        moves += SYNC_PARAMETER[plan.layout.optimizer, plan.layout.parameters]
        if of == "hop":
            return _if(_has_pipeline(plan), "none", *CODED)
        crosses = of == "gradient" or any(move.axis is Axis.INTER for move in moves)
        return _if(plan.mesh.inter > 1 and not plan.has_islands and crosses, "none", *CODED)

    return Choice(name, f"parallel.codecs.{of}", now, others, make, plain="none", is_exact=False, applies=applies)


def _outer_codec() -> Choice:
    """Return the choice of the codec of outer gradients, with the options of the present one."""

    def make(plan: Plan, value: str) -> Plan:
        assert plan.outer is not None, "the choice is of plans with outer steps"
        codec = None if value == "none" else replace(plan.outer.codec or Codec(value), name=value)
        return replace(plan, outer=replace(plan.outer, codec=codec))

    def now(plan: Plan) -> str:
        return "none" if plan.outer is None or plan.outer.codec is None else plan.outer.codec.name

    def others(plan: Plan) -> Iterator[str]:
        return _if(plan.outer is not None, "none", *OUTER_CODED)

    return Choice("outer codec", "parallel.outer.codec", now, others, make, plain="none", is_exact=False)


def _host(key: str, of: Callable[[str], Any] = str, none: Any = None) -> Callable[[Plan, str], Plan]:
    """Return what makes a plan with another value of a key of host memory, which is `none` for `NO`, and the options
    of the present one. of: the value from its text."""

    def make(plan: Plan, value: str) -> Plan:
        given: dict[str, Any] = (
            {} if plan.host is None else {f.name: getattr(plan.host, f.name) for f in fields(plan.host)}
        )
        given[key] = of(value) if value != NO else none
        if given.get("optimizer") is None:  # what is trained rests there with its state alone
            given["gradients"] = False
            given["parameters"] = None if given.get("parameters") == TRAINED_TOO else given.get("parameters")
        is_left = any(given.get(other) for other in ("optimizer", "parameters", "activations"))
        return replace(plan, host=HostState(**given) if is_left else None)

    return make


def _of_host(plan: Plan, key: str) -> str:
    value = None if plan.host is None else getattr(plan.host, key)
    if isinstance(value, tuple):
        return ", ".join(f"{share:g}" for share in value)
    return f"{value:g}" if isinstance(value, float) and value else value or NO


def _field(field: str, of: Callable[[str], Any] = str) -> Callable[[Plan, str], Plan]:
    return lambda plan, value: replace(plan, **{field: of(value)})


def _if(condition: bool, *values: str) -> Iterator[str]:
    return iter(values if condition else ())


def _shards_parameters(plan: Plan) -> bool:
    return plan.mesh.data > 1 and plan.layout.parameters is not Level.N


def _shards_gradients(plan: Plan) -> bool:
    return plan.mesh.data > 1 and plan.layout.gradients is not Level.N


def _has_pipeline(plan: Plan) -> bool:
    return plan.mesh.pipeline > 1


def _has_tensor_ranks(plan: Plan) -> bool:
    return plan.mesh.tensor > 1


def _divided_sequences(plan: Plan) -> Iterator[str]:
    return (str(size) for size in range(1, plan.mesh.intra + 1) if plan.mesh.intra % size == 0)


def _expert_layouts(plan: Plan) -> Iterator[str]:
    others = (layout.name for layout in EFFECTIVE if layout != plan.layout)
    return _if(plan.mesh.data > plan.mesh.expert, SAME_LAYOUT, *others)


def _slices(plan: Plan) -> Iterator[str]:
    is_possible = _has_pipeline(plan) and takes(plan.schedule.name, "slices")
    return iter(("1", *_around(plan.schedule.slices)) if is_possible else ())


def _chunks(plan: Plan) -> Iterator[str]:
    is_possible = plan.schedule.name in FIXED and takes(plan.schedule.name, "chunks")
    return _around(plan.schedule.chunks) if is_possible else iter(())


_CHOICES = (
    Choice(
        "layout",
        "parallel.layout",
        now=lambda plan: plan.layout.name,
        others=lambda plan: _if(plan.mesh.data > 1, *(layout.name for layout in EFFECTIVE)),
        make=_field("layout", Layout),
        plain="NNN",
    ),
    Choice(
        "schedule",
        "parallel.schedule",
        now=lambda plan: plan.schedule.name,
        others=lambda plan: _if(_has_pipeline(plan), *FIXED),
        make=lambda plan, value: rebuilt(plan, schedule=value),
        plain="1f1b",
    ),
    Choice(
        "chunks",
        "parallel.chunks",
        now=lambda plan: str(plan.schedule.chunks),
        others=_chunks,
        make=lambda plan, value: rebuilt(plan, chunks=int(value)),
    ),
    _axis("pipeline", "parallel.pipeline", "pipeline", gives=("inter", "intra"), plain="1"),
    _axis("tensor", "parallel.tensor", "tensor", gives=("intra", "inter"), plain="1"),
    _axis("group", "parallel.intra", "intra", gives=("inter", "inter")),
    Choice(
        "experts",
        "parallel.expert",
        now=lambda plan: str(plan.mesh.expert),
        others=lambda plan: (str(size) for size in range(1, plan.mesh.intra + 1) if plan.mesh.intra % size == 0),
        make=lambda plan, value: replace(plan, mesh=replace(plan.mesh, expert=int(value))),
        plain="1",
        applies=_has_experts,
    ),
    Choice(
        "sequences",
        "parallel.sequence",
        now=lambda plan: str(plan.mesh.sequence),
        others=_divided_sequences,
        make=lambda plan, value: rebuilt(plan, mesh=replace(plan.mesh, sequence=int(value))),
        plain="1",
    ),
    Choice(
        "slices",
        "parallel.slices",
        now=lambda plan: str(plan.schedule.slices),
        others=_slices,
        make=lambda plan, value: rebuilt(plan, slices=int(value)),
        plain="1",
    ),
    Choice(
        "loss chunks",
        "parallel.loss_chunks",
        now=lambda plan: str(plan.loss_chunks),
        others=lambda plan: _if(not plan.vocabulary_parallel, "1", "4", "16", "64"),
        make=_field("loss_chunks", int),
        plain="1",
    ),
    Choice(
        "layout of experts",
        "parallel.expert_layout",
        now=lambda plan: SAME_LAYOUT if plan.expert_layout is None else plan.expert_layout.name,
        others=_expert_layouts,
        make=lambda plan, value: replace(plan, expert_layout=None if value == SAME_LAYOUT else Layout(value)),
        plain=SAME_LAYOUT,
        applies=_has_experts,
    ),
    Choice(
        "order",
        "parallel.order",
        now=lambda plan: " ".join(plan.mesh.order),
        others=lambda plan: _if(_has_pipeline(plan) and plan.mesh.data > 1, *map(" ".join, ORDERS)),
        make=lambda plan, value: replace(plan, mesh=replace(plan.mesh, order=tuple(value.split()))),
        plain=" ".join(AXES),
    ),
    Choice(
        "microbatch",
        "train.microbatch",
        now=lambda plan: str(plan.microbatch),
        others=lambda plan: iter(("1", *_around(plan.microbatch))),
        make=lambda plan, value: rebuilt(plan, microbatch=int(value)),
        plain="1",
    ),
    Choice(
        "recompute",
        "parallel.recompute",
        now=lambda plan: plan.recompute,
        others=lambda plan: iter(RECOMPUTE),
        make=_field("recompute"),
        plain="none",
    ),
    Choice(
        "host memory",
        "parallel.host.optimizer",
        now=lambda plan: _of_host(plan, "optimizer"),
        others=lambda plan: _if(plan.whole is None, NO, *UPDATES),
        make=_host("optimizer"),
        plain=NO,
        applies=_knows_host,
    ),
    Choice(
        "parameters in host memory",
        "parallel.host.parameters",
        now=lambda plan: _of_host(plan, "parameters"),
        others=lambda plan: iter((NO, FROZEN, *([TRAINED_TOO] if _has_all_states(plan) else []))),
        make=_host("parameters"),
        plain=NO,
        applies=lambda prediction: _has_frozen(prediction) or _has_all_states(prediction.plan),
    ),
    Choice(
        "gradients in host memory",
        "parallel.host.gradients",
        now=lambda plan: "yes" if plan.host is not None and plan.host.gradients else NO,
        others=lambda plan: _if(plan.host is not None and plan.host.optimizer is not None, NO, "yes"),
        make=_host("gradients", lambda value: value == "yes", none=False),
        plain=NO,
        applies=lambda prediction: prediction.plan.host is not None and prediction.plan.host.optimizer is not None,
    ),
    Choice(
        "activations in host memory",
        "parallel.host.activations",
        now=lambda plan: _of_host(plan, "activations"),
        others=lambda plan: _if(
            plan.recompute != "selective" or plan.compile == "none", NO, "0.25", "0.5", "0.75", "1"
        ),
        make=_host("activations", float, 0.0),
        plain=NO,
        applies=_knows_host,
    ),
    Choice(
        "residency",
        "parallel.residency",
        now=lambda plan: plan.stays,
        others=lambda plan: _if(_shards_parameters(plan), "action", "run", "step"),
        make=lambda plan, value: replace(plan, residency=value, resident=None),  # type: ignore[arg-type]
        plain="action",
    ),
    Choice(
        "reduction",
        "parallel.reduction",
        now=lambda plan: plan.reduction,
        others=lambda plan: _if(_shards_gradients(plan), "microbatch", "run", "step"),
        make=_field("reduction"),
        plain="microbatch",
    ),
    Choice(
        "unit",
        "parallel.unit",
        now=lambda plan: str(plan.unit),
        others=lambda plan: _if(plan.mesh.data > 1, *map(str, UNITS)),
        make=_field("unit", int),
        plain="1",
    ),
    Choice(
        "prefetch",
        "parallel.prefetch",
        now=lambda plan: YES if plan.prefetch is None else NO if plan.prefetch == 0 else str(plan.prefetch),
        others=lambda plan: _if(_shards_parameters(plan) or _shards_gradients(plan), YES, NO),
        make=lambda plan, value: replace(plan, prefetch=None if value == YES else 0),
        plain=YES,
    ),
    _switch("vocabulary", "parallel.vocabulary", "vocabulary_parallel", where=_has_pipeline),
    _switch("sequence parallel", "parallel.sequence_parallel", "sequence_parallel", where=_has_tensor_ranks),
    _switch("post-validation", "parallel.post_validation", "post_validation", where=_has_pipeline),
    Choice(
        "outer steps",
        "parallel.outer",
        now=lambda plan: NO if plan.outer is None else str(plan.outer),
        others=lambda plan: _if(plan.outer is not None, NO),
        make=lambda plan, value: replace(plan, outer=None),
        plain=NO,
        is_exact=False,
    ),
    _outer_codec(),
    Choice(
        "precision",
        "train.precision",
        now=lambda plan: plan.precision.name,
        others=lambda plan: iter(("fp32", "bf16", "fp8-rowwise")),
        make=_field("precision", Precision.preset),
        plain="fp32",
        is_exact=False,
    ),
    _codec("gradient codec", "gradient"),
    _codec("parameter codec", "parameter"),
    _codec("hop codec", "hop", _has_far_stages),
)

CHOICES: Mapping[str, Choice] = {choice.name: choice for choice in _CHOICES}
"""Choices by name, in display order."""
