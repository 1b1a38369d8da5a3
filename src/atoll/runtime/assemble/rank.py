"""Assembles a rank from a model, a plan and the options of an engine, and lowers its programs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from atoll.base.errors import CostWarning, PlanError, WeightsWarning
from atoll.base.faults import BadStepAnswer, BadStepPolicy
from atoll.base.machine import free_memory
from atoll.base.units import format_bytes
from atoll.plans.layouts import ITEM_BYTES, swapped_along
from atoll.plans.plan import Place, Plan, View
from atoll.prediction.advice import advice
from atoll.program import Program, needed_in_a_step
from atoll.runtime.agreement import Agreement
from atoll.runtime.assemble.build import build_rank
from atoll.runtime.assemble.sharded import Sharded
from atoll.runtime.assemble.ties import untie_as_stored
from atoll.runtime.batches import Batches, Labels
from atoll.runtime.checkpoint import is_complete
from atoll.runtime.experts.division import DividedExperts
from atoll.runtime.experts.implementation import choose_implementation
from atoll.runtime.experts.kinds import stacked_in
from atoll.runtime.federation.seat import IslandSeat
from atoll.runtime.lanes import JobLane, LaneKind, host_lanes, lane_of, lanes_of
from atoll.runtime.mail import Mail, far_ranks
from atoll.runtime.models import Adapter, Batch, Loss, adapter_for, weights_for
from atoll.runtime.models.sums import check_sum
from atoll.runtime.models.weights import Weights
from atoll.runtime.outline import Outline
from atoll.runtime.pipeline.deferred import Collector
from atoll.runtime.pipeline.executor import Executor
from atoll.runtime.pipeline.kept import KeptActivations
from atoll.runtime.pipeline.routing import Balance, Routers
from atoll.runtime.pipeline.step_end import LossScaler, StepEnd
from atoll.runtime.randomness import keeping_random_state
from atoll.runtime.sequence.divide import DividedSequences
from atoll.runtime.sharding.anchors import AnchorSteps
from atoll.runtime.sharding.coding import Moment
from atoll.runtime.sharding.federated import FederatedSteps
from atoll.runtime.sharding.optimizer import GroupOptions, OptimizerFactory, ShardedOptimizer
from atoll.runtime.sharding.outer import OuterSteps
from atoll.runtime.sharding.surroundings import Surroundings
from atoll.runtime.sharding.tensor_parallel import tensor_parallel
from atoll.runtime.sharding.tensors import dtype_of, whole_output
from atoll.runtime.transport import Channel, Peers, Transport, shared_memory
from atoll.runtime.vocabulary.split import SplitVocabulary, ways_of


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of an engine, besides model and plan; see `Engine`. moment: of the running step."""

    optimizer: OptimizerFactory
    groups: GroupOptions | None
    clip: float | None
    _: KW_ONLY
    seed: int
    labels: Labels
    loss: Loss | None
    weights: Path | None
    bad_steps: BadStepPolicy
    balance: Balance
    moment: Moment
    away: Sequence[int] = ()
    seat: IslandSeat | None = None

    def check(self, plan: Plan) -> None:
        """Raise PlanError if a value is out of range or does not fit the plan."""
        if self.labels not in get_args(Labels):
            raise PlanError(f'labels = {self.labels!r}; it is "shifted" or "unshifted"')
        if self.clip is not None and not self.clip > 0:  # NaN too
            raise PlanError(
                f"clip = {self.clip}; the largest gradient norm is above 0, or None to leave gradients alone"
            )
        if len(self.away) not in (0, plan.mesh.pipeline):
            raise PlanError(f"away = {self.away}; a number of bytes for each of {plan.mesh.pipeline} pipeline ranks")
        options = {"vocabulary_parallel": plan.vocabulary_parallel, "loss_chunks": plan.loss_chunks > 1}
        named = [name for name, is_on in options.items() if is_on]
        if self.loss is not None and named:
            raise PlanError(
                f"{named[0]} computes token cross-entropy on parts of the logits, and the engine was given another "
                "loss; leave one of them out"
            )
        apart = None if plan.outer is None else plan.outer.apart
        if (apart is None) != (self.seat is None):
            raise PlanError(
                "a federation needs a plan with islands that are worlds of their own (Outer.apart) and a seat; "
                f"there is no {'seat' if self.seat is None else 'such plan'}"
            )
        if plan.outer is not None and self.bad_steps.answer is BadStepAnswer.ROLLBACK:
            raise PlanError(
                f'bad_steps = "{self.bad_steps}" would bring one island back to an earlier step than the others; with '
                'outer steps use "stop" or "skip"'
            )


@dataclass(frozen=True, slots=True)
class Rank:
    """The parts of an assembled rank.

    shapes: of the model's parameters by name, before they are divided.  outer: with outer steps.
    notes: what of the initial weights is not used, or not as their config says.
    advice: wasteful settings of the plan.
    """

    plan: Plan
    transport: Transport
    agreement: Agreement
    adapter: Adapter
    outline: Outline
    sharded: Sharded
    batches: Batches
    optimizer: ShardedOptimizer
    end: StepEnd
    executor: Executor
    outer: AnchorSteps[Any] | None
    sequences: DividedSequences | None
    shapes: Mapping[str, Sequence[int]]
    lanes: dict[LaneKind, JobLane]
    notes: tuple[str, ...]
    advice: tuple[str, ...]


def assemble(
    model: nn.Module,
    plan: Plan,
    options: EngineOptions,
    *,
    transport: Transport,
    device: torch.device,
    agreement: Agreement,
) -> Rank:
    """Assemble this rank. Raises PlanError if model, plan and options do not match."""
    options.check(plan)
    place = transport.place
    adapter, stored, notes = _adapt(model, options)
    shapes = _shapes(adapter)
    for note in notes if place.rank == 0 else ():
        warnings.warn(note, WeightsWarning, stacklevel=3)
    outline = Outline.of(adapter, plan, stacked=stacked_in(adapter.blocks()).values())
    sequences = DividedSequences.of(adapter, plan, place)
    tensor = None
    if plan.mesh.tensor > 1:
        tensor = tensor_parallel(adapter, plan, transport.mesh_along("tp"), apart=outline.ends)
    mesh = None if tensor is None else tensor.mesh
    experts = DividedExperts.of(adapter, plan, transport, tensor=mesh, balance=options.balance)
    choose_implementation(model, dtype_of(plan.precision.compute), device)
    _open_links(outline, transport)
    lanes, timed = _lanes(plan, transport, device)
    around = Surroundings(
        plan.sharding(place), transport, device, lanes=lanes, weights=stored, seed=options.seed, moment=options.moment
    )
    wasteful = _advice(outline, place)
    collector = Collector()
    sharded = build_rank(
        outline,
        around=around,
        collector=collector,
        seed=options.seed,
        tensor=tensor,
        experts=experts,
        sequences=sequences,
    )
    if sequences is not None:
        sequences.install((block for stage in sharded.stages for block in stage.blocks), transport)
    batches = _batches(plan, options, adapter, transport=transport, agreement=agreement, of=(sharded, sequences))
    if not sharded.trainable:
        raise PlanError("the model has no trainable parameter; set requires_grad on what is to be trained")
    own, end = _end(sharded, plan, options, transport=transport, routers=experts.routers)
    kept = _kept(plan, options, lanes, transport=transport)
    executor = _executor(
        outline,
        sharded,
        end,
        collector=collector,
        transport=transport,
        loss=_loss(adapter, options, device, parts=sequences),
        sequences=sequences,
        seed=options.seed,
        lanes=timed,
        kept=kept,
    )
    outer = _outer(plan, options, sharded, transport=transport, lanes=lanes, shapes=shapes)
    return Rank(
        plan,
        transport,
        agreement,
        adapter=adapter,
        outline=outline,
        sharded=sharded,
        batches=batches,
        optimizer=own,
        end=end,
        executor=executor,
        outer=outer,
        sequences=sequences,
        shapes=shapes,
        lanes=lanes,
        notes=notes,
        advice=wasteful,
    )


def _advice(outline: Outline, place: Place) -> tuple[str, ...]:
    """Return what wastes time or memory in a plan, and warn of it once."""
    wasteful = advice(outline.plan, outline.sizes)
    for each in wasteful if place.rank == 0 else ():
        warnings.warn(each, CostWarning, stacklevel=4)
    return wasteful


def _kept(
    plan: Plan, options: EngineOptions, lanes: dict[LaneKind, JobLane], *, transport: Transport
) -> KeptActivations | None:
    """Return what keeps activations in host memory, if they leave."""
    if not plan.offloads:
        return None
    kept = KeptActivations(transport.device, lanes, transport)
    if options.away:
        kept.expected = options.away[transport.place.pp]
    return kept


def _batches(
    plan: Plan,
    options: EngineOptions,
    adapter: Adapter,
    *,
    transport: Transport,
    agreement: Agreement,
    of: tuple[Sharded, DividedSequences | None],
) -> Batches:
    sharded, parts = of
    return Batches(
        plan,
        transport.place,
        transport.device,
        agreement=agreement,
        vocabulary=sharded.vocabulary or sharded.chunked,
        labels=options.labels,
        may_copy=options.loss is not None or not _predicts_next(adapter),
        part=None if parts is None else parts.part,
        attends_both_ways=not _predicts_next(adapter),
        is_exact=options.balance != Balance(),
    )


def _loss(adapter: Adapter, options: EngineOptions, device: torch.device, *, parts: DividedSequences | None) -> Loss:
    """Return the loss of the last stage's outputs."""
    loss: Loss = adapter.loss if options.loss is None else _OwnLoss(options.loss, device)
    return loss if parts is None else parts.loss_of(loss)


def _shapes(adapter: Adapter) -> dict[str, list[int]]:
    """Return the shapes of a model's parameters by name, before anything is split."""
    return {
        f"{block.name}.{name}": list(each.shape)
        for block in adapter.blocks()
        for name, each in block.module.named_parameters()
    }


def _outer(
    plan: Plan,
    options: EngineOptions,
    sharded: Sharded,
    *,
    transport: Transport,
    lanes: dict[LaneKind, JobLane],
    shapes: Mapping[str, list[int]],
) -> AnchorSteps[Any] | None:
    """Return the outer steps of a plan, with a lane of their own among islands of one world. shapes: of the model's
    parameters, before it is split."""
    seed = options.seed
    if plan.outer is None:
        return None
    if options.seat is not None:
        return FederatedSteps(
            sharded.units,
            plan.outer,
            transport,
            seat=options.seat,
            count=len(sharded.specs),
            item=ITEM_BYTES[plan.precision.master],
            facts={
                "shapes": sorted(shapes.items()),
                "units": [spec.names for spec in sharded.specs],
                "master": str(plan.precision.master),
            },
            seed=seed,
        )
    lane = lanes["outer"] = lane_of("outer", transport.device, waits_on_host=transport.waits_on_host)
    return OuterSteps(sharded.units, plan.outer, transport, lane=lane, count=len(sharded.specs), seed=seed)


def _lanes(
    plan: Plan, transport: Transport, device: torch.device
) -> tuple[dict[LaneKind, JobLane], tuple[JobLane, ...]]:
    """Return the lanes of a rank by kind, and those whose transfers are recorded."""
    # Alone, a gather has no peer to wait for, but perhaps host memory.
    is_alone = plan.nest(transport.place).ranks == 1 and not (plan.host is not None and plan.host.parameters)
    own = lanes_of(device, alone=is_alone, waits_on_host=transport.waits_on_host)
    hosted = {} if plan.host is None else host_lanes(device, steps_there=plan.host.steps_there)
    return {**own, **hosted}, tuple((hosted if is_alone else {**own, **hosted}).values())


def check_host(rank: Rank, program: Program) -> None:
    """Raise PlanError, on every rank, if a machine has less memory than what its ranks are still to put there: masters
    are there, states, activations and the rest come with the first steps."""
    plan, own = rank.plan, rank.transport.place.rank
    if plan.host is None:
        return
    units, kept = rank.sharded.units, rank.executor.kept
    held = sum(tensor.nbytes for unit in units for segment in unit.segments for tensor in segment.held()["host"])
    away = 0 if kept is None else kept.expected
    said = torch.zeros(3, plan.mesh.world, dtype=torch.float64)
    said[:, own] = torch.tensor([shared_memory.host(), program.shape.footprint().host - held, away])
    machines, states, activations = rank.transport.total(said)  # also a barrier: each rank has what it has by now
    ranks = [at for at, each in enumerate(machines.tolist()) if each == float(machines[own])]
    needed, left = int((states + activations)[ranks].sum()), free_memory()
    problem = None
    if needed > left:
        most = max(ranks, key=lambda at: float(states[at] + activations[at]))
        problem = PlanError(
            f"parallel.host: the machine of rank {ranks[0]}, or the limit of its control group, has "
            f"{format_bytes(left)} of memory left, and its ranks ({len(ranks)}, rank {most} the most) still need "
            f"{format_bytes(needed)} of it, {format_bytes(int(activations[ranks].sum()))} for activations; use a "
            "smaller fraction or share of activations, a finer layout of what rests there, or more nodes"
        )
    rank.agreement.agree(problem)


def _adapt(model: nn.Module, options: EngineOptions) -> tuple[Adapter, Weights | None, tuple[str, ...]]:
    """Return the adapter of a model, its initial weights if they are not those of a checkpoint, and notes on them."""
    weights = options.weights
    untied = [] if weights is None else untie_as_stored(model, weights)
    adapter = adapter_for(model)
    stored = None if weights is None or is_complete(weights) else weights_for(adapter, weights)
    if options.labels == "unshifted" and not _predicts_next(adapter):
        raise PlanError(
            'labels = "unshifted" applies to models that predict the next token; labels of '
            f'{type(model).__name__} are at the positions that predict them: leave it out, or use "shifted"'
        )
    return adapter, stored, (*untied, *(() if stored is None else stored.notes))


def _predicts_next(adapter: Adapter) -> bool:
    return bool(getattr(adapter, "predicts_next", True))


def _end(
    sharded: Sharded, plan: Plan, options: EngineOptions, *, transport: Transport, routers: Routers
) -> tuple[ShardedOptimizer, StepEnd]:
    """Return the optimizer of a rank, and what ends its steps."""
    own = ShardedOptimizer(
        sharded.units,
        options.optimizer,
        named_shapes=sharded.trainable,
        options=options.groups,
        matrices=sharded.matrices,
    )
    end = StepEnd(
        sharded.units,
        sharded.specs,
        own,
        transport=transport,
        routers=routers,
        clip=options.clip,
        scaler=LossScaler() if plan.precision.compute == "float16" else None,
        is_post_validated=plan.post_validation,
    )
    return own, end


def _executor(
    outline: Outline,
    sharded: Sharded,
    end: StepEnd,
    *,
    transport: Transport,
    sequences: DividedSequences | None,
    **options: Any,
) -> Executor:
    ranks, placement = transport.place.peers("pp"), outline.schedule.placement
    codecs, far = outline.plan.codecs, far_ranks(outline.plan, transport)
    mail = Mail(transport, lambda stage: ranks[placement.rank_of(stage)], codecs=codecs, far=far)
    slices, part = sharded.vocabulary, None if sequences is None else sequences.part
    split = None if slices is None else SplitVocabulary(slices, mail, placement, ranks=ranks, part=part)
    return Executor(
        outline,
        sharded.stages,
        sharded.units,
        end=end,
        transport=transport,
        mail=mail,
        extensions=[each for each in (split, sharded.chunked) if each is not None],
        sequences=sequences,
        **options,
    )


def _open_links(outline: Outline, transport: Transport) -> None:
    """Open the links that a step needs besides those of its activations; every rank opens them in this order."""
    plan = outline.plan
    if outline.vocabulary is not None:
        for kind, ways in ways_of(outline.rank_of_stage, plan.mesh.pipeline):
            transport.open_links(kind, ways)
    if plan.post_validation:
        transport.open_links(Channel.VERDICT, [(at + 1, at) for at in range(plan.mesh.pipeline - 1)])
    transport.open_links(None, outline.sharing)
    if plan.mesh.sequence > 1:
        transport.open_swaps("sequence")
    if plan.whole is not None:
        for view in View if plan.divides_experts else (View.DENSE,):
            sharding = plan.sharding(transport.place, view)
            moved = [axis for axis in swapped_along(sharding.layout.optimizer) if sharding.nest.size(axis) > 1]
            axes = tuple(sharding.along[axis] for axis in moved)
            transport.open_swaps(*axes)
            transport.open_swaps(*axes, "tp")


def lower_programs(rank: Rank) -> tuple[Program, bool]:
    """Lower the programs of a rank, equal on all ranks that share its parameters, and reserve the memory they lend.

    Return the program of a training step, and whether the ranks of a group read each other's memory. The lent memory
    depends on a program in which they do; whether they do is known afterwards.
    """
    plan, transport, agreement = rank.plan, rank.transport, rank.agreement
    place, mesh = transport.place, plan.mesh
    program = rank.executor.lower(rank.sharded.rank(place, reads_in_place=True))
    transport.memory.share(needed_in_a_step(program.shape, program.peaks).lent)
    reads_in_place = agreement.total(float(transport.memory.sees(Peers.along("intra", place)))) == mesh.world
    if not reads_in_place:
        program = rank.executor.lower(rank.sharded.rank(place, reads_in_place=False))
    digests = [-1] * (mesh.pipeline * mesh.tensor)
    digests[place.pp * mesh.tensor + place.tp] = program.digest
    problem = PlanError(
        "ranks that share parameters would execute different programs; build the same model with the same plan on "
        "every rank"
    )
    agreement.agree_on(digests, problem)
    return program, reads_in_place


class _OwnLoss:
    """A user's loss, which does not support outputs that are split over a tensor-parallel group.

    The first microbatches show whether it returns a sum.
    """

    def __init__(self, loss: Loss, device: torch.device) -> None:
        self._loss, self._device = loss, device
        self._is_known = False

    def __call__(self, outputs: Any, batch: Batch) -> Tensor | tuple[Tensor, Tensor | float]:
        whole = whole_output(outputs)
        found = self._loss(whole, batch)
        if not self._is_known:
            with keeping_random_state(self._device):
                self._is_known = check_sum(self._loss, whole, batch, found=found)
        return found
