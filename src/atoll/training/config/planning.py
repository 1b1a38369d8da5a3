"""Conversion of a Config to a Plan, and validation of its sections against each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from atoll.base.documents import LARGEST_JSON, read_text
from atoll.base.errors import ConfigError, PlanError, UserError
from atoll.base.faults import BadStepPolicy
from atoll.plans import schedules
from atoll.plans.ir import Op, Schedule
from atoll.plans.ir.text import from_csv, from_text
from atoll.plans.layouts import Layout, Precision
from atoll.plans.outer import Outer
from atoll.plans.plan import MeshShape, Plan
from atoll.plans.stages import BlockWeight, split_blocks
from atoll.prediction.cost.layer import head_problem
from atoll.training.config.train import RouterSection

if TYPE_CHECKING:
    from atoll.training.config.parallel import Parallel
    from atoll.training.config.schema import Config


MOST_FORWARDS = 100_000
"""Maximum number of forward actions in a step, over all ranks. Larger schedules take too long to build and validate."""


def plan_of(config: Config, world: int | None = None) -> Plan:
    """Return the plan of `config` on `world` ranks, by default parallel.ranks. Raises ConfigError with all problems."""
    parallel, train = config.parallel, config.train
    if parallel.auto:
        raise ConfigError("parallel.auto: the plan is not chosen yet; `atoll plan` chooses one for a cluster")
    ranks = parallel.ranks if world is None else world
    problems = _world_problems(config, ranks, launched=world is not None)
    data = 0 if problems else ranks // (parallel.pipeline * parallel.tensor)
    shares = data // parallel.sequence if parallel.intra % parallel.sequence == 0 else data
    if data:
        problems += _batch_problems(config, shares)
        problems += _outer_problems(config, data // parallel.intra)
    # If the batch does not factor, check the schedule's name and stages on a batch that does.
    fits = bool(data) and not problems
    microbatches = train.global_batch // (train.microbatch * shares) if fits else parallel.pipeline

    try:
        schedule = _schedule(parallel, microbatches, fits=fits)
    except UserError as error:
        problems.append(f"parallel.schedule: {error}")
    else:
        if config.model.is_builtin:
            problems += _stage_problems(config, schedule)
    if config.model.is_builtin:
        uneven = head_problem(parallel.tensor, config.model.heads, config.model.kv_heads)
        problems += [] if uneven is None else [f"parallel.{uneven}"]
    if parallel.intra % parallel.expert:
        problems.append(
            f"parallel.expert = {parallel.expert} does not divide parallel.intra = {parallel.intra}: the ranks of a "
            f"group divide the experts; use a divisor of it"
        )
    problems += _sequence_problems(config)
    problems += _length_problems(config)
    problems += _compile_problems(config)
    problems += _rollback_problems(config)
    problems += _objective_problems(config)
    problems += _adapter_problems(config)
    problems += _router_problems(config)
    if problems:
        raise ConfigError("\n  ".join(problems if len(problems) == 1 else [f"{len(problems)} problems", *problems]))
    return Plan(
        mesh=MeshShape(
            pipeline=parallel.pipeline,
            inter=data // parallel.intra,
            intra=parallel.intra,
            tensor=parallel.tensor,
            order=parallel.order,
            expert=parallel.expert,
            sequence=parallel.sequence,
        ),
        layout=Layout(parallel.layout),
        schedule=schedule,
        microbatch=train.microbatch,
        precision=Precision.preset(train.precision),
        recompute=parallel.recompute,
        post_validation=parallel.post_validation,
        compile=parallel.compile,
        prefetch=parallel.prefetch,
        residency=parallel.residency,
        reduction=parallel.reduction,
        unit=parallel.unit,
        sequence_parallel=parallel.sequence_parallel,
        vocabulary_parallel=parallel.vocabulary,
        layers_per_stage=parallel.layers_per_stage,
        codecs=parallel.codecs.value,
        outer=outer_of(config),
        expert_layout=None if parallel.expert_layout is None else Layout(parallel.expert_layout),
        imbalance=parallel.imbalance,
        host=None if parallel.host is None else parallel.host.value,
        slice_work=parallel.slice_work,
        loss_chunks=parallel.loss_chunks,
    )


def _schedule(parallel: Parallel, microbatches: int, *, fits: bool) -> Schedule:
    """Return the named or given schedule. fits: whether the number of microbatches is valid."""
    given = parallel.schedule
    if not _is_given(given):
        forwards = parallel.pipeline * (parallel.chunks or 1) * microbatches * parallel.slices
        if forwards > MOST_FORWARDS:
            raise ConfigError(
                f"{given!r} on parallel.pipeline = {parallel.pipeline} with {microbatches} microbatches has "
                f"{forwards:,} forwards a step; schedules of up to {MOST_FORWARDS:,} are planned: use a larger "
                "microbatch, or more data-parallel ranks"
            )
        options: dict[str, Any] = {"chunks": parallel.chunks, "slices": parallel.slices}
        return schedules.build(given, ranks=parallel.pipeline, microbatches=microbatches, **options)
    schedule = from_text(given) if "\n" in given else _read(given, parallel.slices)
    problems = [
        f"is for {own} {what}, {key} makes {asked}"
        for what, key, own, asked in (
            ("pipeline ranks", "parallel.pipeline", schedule.ranks, parallel.pipeline),
            ("stages a rank", "parallel.chunks", schedule.chunks, parallel.chunks or schedule.chunks),
            ("microbatches", "train.global_batch", schedule.whole_microbatches, microbatches if fits else None),
            ("slices of each sequence", "parallel.slices", schedule.slices, parallel.slices),
        )
        if asked not in (own, None)
    ]
    if schedule.name in schedules.CATALOGUE:
        problems.append("has the name of a schedule that Atoll builds; give it another")
    if problems:
        raise ConfigError(f"the order {schedule.name!r} {', and '.join(problems)}")
    return schedule


def _is_given(schedule: str) -> bool:
    """Return True if the text is an order, or the file of one, rather than a name."""
    return "\n" in schedule or schedule.endswith(".csv")


def _read(path: str, slices: int) -> Schedule:
    """Read an order from torch's CSV, without send, receive and sharding actions, which a plan adds itself. slices: of
    each sequence, which its actions number."""
    try:
        text = read_text(path, limit=LARGEST_JSON)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the schedule {path}: {error}") from error
    return from_csv(text, name=path, slices=slices).only((Op.F, Op.I, Op.W, Op.B))


def _world_problems(config: Config, ranks: int, *, launched: bool) -> list[str]:
    parallel = config.parallel
    part = parallel.pipeline * parallel.tensor * parallel.intra
    if ranks >= 1 and ranks % part == 0:
        return []
    name = "the launched world" if launched else "parallel.ranks"
    below = ranks // part * part
    sizes = [str(size) for size in (below, below + part) if size > 0]
    hint = f"use {' or '.join(sizes)} ranks"
    others = parallel.tensor * parallel.intra
    if ranks >= 1 and ranks % others == 0:
        pipelines = [str(size) for size in divisors(ranks // others)]
        hint += f", or a pipeline of {' or '.join(pipelines)}"
    return [
        f"{name} = {ranks} is not a multiple of pipeline * tensor * intra = "
        f"{parallel.pipeline} * {parallel.tensor} * {parallel.intra} = {part}; {hint}"
    ]


def _batch_problems(config: Config, shares: int) -> list[str]:
    batch, microbatch = config.train.global_batch, config.train.microbatch
    part = microbatch * shares
    if batch % part == 0:
        return []
    below = batch // part * part
    sizes = [str(size) for size in (below, below + part) if size]
    hint = f"use a global_batch of {' or '.join(sizes)}"
    if batch % shares == 0:
        fitting = sorted(divisors(batch // shares), key=lambda size: (abs(size - microbatch), size))[:2]
        hint += f", or a microbatch of {' or '.join(str(size) for size in sorted(fitting))}"
    return [
        f"train.global_batch = {batch} is not a multiple of train.microbatch * data-parallel ranks"
        f"{' / parallel.sequence' if config.parallel.sequence > 1 else ''} = {microbatch} * {shares} = {part}; {hint}"
    ]


def outer_of(config: Config) -> Outer | None:
    """Return the outer steps of a config's plan."""
    parallel, islands = config.parallel, None if config.federation is None else len(config.federation.islands)
    return None if parallel.outer is None else parallel.outer.to_outer(parallel.codecs, islands)


def _outer_problems(config: Config, groups: int) -> list[str]:
    """Return what cannot be combined with outer steps."""
    if config.parallel.outer is None:
        if config.federation is None:
            return []
        return ["federation: islands exchange outer gradients, and parallel.outer is missing; set parallel.outer.every"]
    problems = []
    outer, federation = config.parallel.outer, config.federation
    if federation is None:
        alone = {key: getattr(outer, key) for key in ("quorum", "grace", "weights") if key in outer.model_fields_set}
        if alone:
            found = ", ".join(f"parallel.outer.{key} = {value!r}" for key, value in alone.items())
            problems.append(f"{found}: of islands that come and go, which [federation] names; leave them out")
    elif outer.quorum > len(federation.islands):
        problems.append(
            f"parallel.outer.quorum = {outer.quorum}, and federation.islands has {len(federation.islands)}; use at "
            "most as many"
        )
    if groups < 2 and federation is None:
        problems.append(
            f"parallel.outer: outer steps are between groups, and with parallel.intra = {config.parallel.intra} there "
            "is one; use more ranks or a smaller intra, name islands in [federation], or leave outer out"
        )
    if BadStepPolicy.parse(config.train.bad_steps).steps:
        problems.append(
            f"train.bad_steps = {config.train.bad_steps!r} would bring one group back to an earlier step than the "
            'others of parallel.outer; use "stop" or "skip"'
        )
    return problems


def _rollback_problems(config: Config) -> list[str]:
    """Return a problem if no checkpoint would be old enough, and still kept, when a rollback needs it."""
    steps, kept = BadStepPolicy.parse(config.train.bad_steps).steps, config.checkpoint
    if steps <= kept.every * (kept.keep - 1):
        return []
    return [
        f"train.bad_steps = {config.train.bad_steps!r} needs a checkpoint that is {steps} steps old, and those that "
        f"are kept (checkpoint.every = {kept.every}, checkpoint.keep = {kept.keep}) are only sure to reach "
        f"{kept.every * (kept.keep - 1)} steps back; raise one of them, or roll back less far"
    ]


def _sequence_problems(config: Config) -> list[str]:
    """Return why ranks cannot divide sequences."""
    parallel, model = config.parallel, config.model
    ranks, tensor = parallel.sequence, parallel.tensor
    if parallel.intra % ranks:
        return [
            f"parallel.sequence = {ranks} does not divide parallel.intra = {parallel.intra}: ranks of a group divide "
            "each sequence; use a divisor of it"
        ]
    if parallel.slice_work and parallel.slices == 1:
        return [
            f"parallel.slice_work = {parallel.slice_work:g} makes later slices of a sequence shorter, and with "
            "parallel.slices = 1 there is one; set slices, or leave it out"
        ]
    if model.is_builtin and model.heads % (ranks * tensor):
        return [
            f"parallel.sequence = {ranks} with parallel.tensor = {tensor} does not divide model.heads = "
            f"{model.heads}: each rank computes some of the heads over the whole sequence; use a divisor"
        ]
    return []


def _length_problems(config: Config) -> list[str]:
    tensor, sequence = config.parallel.tensor, config.data.sequence
    if not config.parallel.sequence_parallel or sequence % tensor == 0:
        return []
    return [
        f"data.sequence = {sequence} is not a multiple of parallel.tensor = {tensor}, whose ranks take a part each "
        f"with parallel.sequence_parallel; use {sequence // tensor * tensor or tensor}, or turn it off"
    ]


def _router_problems(config: Config) -> list[str]:
    """Return what train.router balances in vain."""
    router, model, problems = config.train.router, config.model, []
    if model.is_builtin and router != RouterSection() and not model.options.experts:
        problems.append(
            "train.router balances experts, and the model has none; set model.config.experts, or leave it out"
        )
    elif model.is_builtin and router.bias_rate and not model.options.selection_bias:
        problems.append(
            f"train.router.bias_rate = {router.bias_rate} steps selection biases, and the model has none; set "
            "model.config.selection_bias = true, or use train.router.sequence_loss"
        )
    if router.bias_rate and config.parallel.outer is not None:
        problems.append(
            f"train.router.bias_rate = {router.bias_rate}: groups of parallel.outer have tokens of their own, and "
            "their selection biases would drift apart; use train.router.sequence_loss"
        )
    return problems


def _objective_problems(config: Config) -> list[str]:
    """Return problems between the objective and other settings."""
    problems = []
    if config.train.is_masked and config.data.how != "blocks":
        problems.append(
            f"train.objective = {config.train.objective!r} masks tokens of joined text; it is not compatible with "
            f'data.packing = "{config.data.how}"'
        )
    if config.data.streaming and config.train.epochs is not None:
        problems.append(
            f"train.epochs = {config.train.epochs:g} with data.streaming: the number of samples in an epoch is "
            "unknown until it ends; set train.steps instead"
        )
    if config.train.patience and config.data.validation == 0:
        problems.append(
            f"train.patience = {config.train.patience} needs a validation loss, and data.validation = 0 holds nothing "
            "back"
        )
    return problems


def _adapter_problems(config: Config) -> list[str]:
    """Return a problem if the model cannot have low-rank adapters."""
    if not (config.lora.rank and config.model.is_builtin):
        return []
    return [
        f'lora.rank = {config.lora.rank} is for models of transformers, and model.source is "builtin"; set '
        "model.source, or leave [lora] out"
    ]


def _compile_problems(config: Config) -> list[str]:
    """Return problems of compilation: torch's DTensor cannot trace the decoder's backward if each rank has whole
    sequences."""
    parallel = config.parallel
    is_split = config.model.is_builtin and parallel.tensor > 1 and not parallel.sequence_parallel
    if not is_split or parallel.compile == "none":
        return []
    return [
        f"parallel.compile = {parallel.compile!r} with parallel.tensor = {parallel.tensor}: torch cannot compile the "
        'split layers of the built-in decoder so; set parallel.sequence_parallel = true, or compile = "none"'
    ]


def _stage_problems(config: Config, schedule: Schedule) -> list[str]:
    """Return the engine's problems with the split of the decoder's blocks, which do not depend on their weights."""
    parallel, layers = config.parallel, config.model.layers
    names = ["embed", *(f"layers.{at}" for at in range(layers)), "head"]
    blocks = [BlockWeight(name, name.split(".")[0], cost=1, memory=1) for name in names]
    try:
        split_blocks(blocks, schedule.placement, layers_per_stage=parallel.layers_per_stage)
    except PlanError as error:
        if parallel.layers_per_stage is not None:
            return [f"parallel.{error}"]
        given = f"parallel.pipeline = {parallel.pipeline} with schedule {parallel.schedule!r}"
        return [f"{given} and model.layers = {layers} makes {error}"]
    return []


def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
