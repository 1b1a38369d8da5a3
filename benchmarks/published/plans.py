"""Predictions of published runs: a row's plan and cluster, and what the program that ran it does unlike Atoll."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

from atoll.plans import schedules
from atoll.plans.layouts import Precision
from atoll.plans.plan import Plan
from atoll.prediction.cost import Cluster, Efficiency, Prediction, Workload
from atoll.prediction.cost.calibration import Step, changed
from atoll.prediction.cost.kernels import Exchange
from atoll.prediction.cost.ranks import Ranks
from atoll.prediction.cost.slices import VocabularySlices
from atoll.prediction.cost.vocabulary import LookedUp, Scored
from atoll.prediction.cost.work import Work
from atoll.program import Do, Instruction, Program, Programs
from benchmarks.published.record import Published

REDUCES_LAST = ("megatron", "megatron-deepspeed")
"""Programs that reduce gradients after the last backward, and not while it runs."""

SCATTERS = ("megatron", "megatron-deepspeed")
"""Programs whose tensor-parallel ranks each send their part of a message between stages, which the ranks of the next
stage gather inside the node: Megatron by default (arXiv 2104.04473, section 4.1), DeepSpeed's pipeline always."""

GATHERS_LATE = ("deepspeed",)
"""Programs that gather parameters when they are needed and not before."""

FULL = 2
"""With so many microbatches for each rank a pipeline is full, and what a step takes grows evenly from there on."""


def plan_of(row: Published, microbatches: int | None = None) -> Plan:
    """The plan; with another number of microbatches, if that is given."""
    options = {"chunks": row.chunks} if row.schedule == "interleaved" else {}
    count = row.microbatches if microbatches is None else microbatches
    schedule = schedules.build(row.schedule, ranks=row.mesh.pipeline, microbatches=count, **options)
    return Plan(
        row.mesh,
        row.layout,
        schedule,
        row.use.samples,
        precision=precision_of(row),
        residency=row.residency,
        recompute=row.use.recompute,
        sequence_parallel=row.use.sequence_parallel,
        vocabulary_parallel=row.vocabulary > 0,
        layers_per_stage=row.layers_per_stage,
        prefetch=0 if row.system in GATHERS_LATE else None,
    )


def precision_of(row: Published) -> Precision:
    """Compute in a half, masters in fp32; fp32 gradients but where the row says otherwise. What is fully sharded rests
    in fp32."""
    compute = row.use.compute
    by_bytes = {2: compute, 4: "float32", None: "float32"}
    gradient, reduce = by_bytes[row.gradient_bytes], by_bytes[row.reduce_bytes]
    rest = "float32" if row.system in ("fsdp", "torchtitan") else compute
    return Precision(row.system, compute, compute, rest, gradient, reduce, "float32")


def kind_of(row: Published) -> str:
    """What constants are fitted for: a source, a device and whether a network is used."""
    nodes = "one node" if row.mesh.world <= row.cluster.node.devices else "several nodes"
    device = row.cluster.device
    speed = device.rate(row.use.compute) / 1e12
    return f"{row.source}, {device.memory / 2**30:.0f} GiB and {speed:.0f} TFLOP/s, {nodes}"


@cache
def fitted() -> Mapping[str, Mapping[str, float]]:
    """Constants by kind, as `fit.py` wrote them."""
    path = Path(__file__).with_name("constants.json")
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {kind: each["constants"] for kind, each in found.items()}


def cluster_of(row: Published, constants: Mapping[str, float] | None = None) -> Cluster:
    """The row's cluster with the constants of its kind, which are its preset's if they are not known, or with others if
    they are given."""
    own = fitted().get(kind_of(row)) if constants is None else constants
    return row.cluster if own is None else changed(unfitted(row.cluster), own)


def unfitted(cluster: Cluster) -> Cluster:
    """The cluster without constants that have been fitted to published rows: where fits to them begin."""
    device = cluster.device.model_copy(update={"efficiency": Efficiency()})
    return cluster.model_copy(update={"device": device})


def prediction_of(row: Published, cluster: Cluster | None = None, microbatches: int | None = None) -> Prediction:
    """What Atoll says of a row; on another cluster, if that is given."""
    plan = plan_of(row, microbatches)
    found = Prediction(workload_of(row), plan, cluster_of(row) if cluster is None else cluster, row.use)
    if isinstance(found.ranks.slices, VocabularySlices):
        found.ranks.__dict__["slices"] = Collectives(plan, row.use, found.ranks.slices.vocabulary)
    if row.system in SCATTERS and row.use.tensor > row.use.parts:
        found.ranks.__dict__["works"] = scattered(found.ranks)
    if row.system in REDUCES_LAST and row.mesh.data > 1:
        programs = found.ranks.programs
        ranks = tuple(reduced_last(program) for program in programs.ranks)
        found.ranks.__dict__["programs"] = Programs(programs.placement, ranks)
    return found


class Collectives(VocabularySlices):
    """Slices to which NCCL broadcasts, so that each rank sends what it is given once."""

    @property
    def copies(self) -> int:
        """Messages by which an end gives all slices the same."""
        return 1


def workload_of(row: Published) -> Workload:
    """The model. NCCL adds up what slices of a split vocabulary give, and not the ranks of the two ends."""

    def split(ranks: int) -> Workload:
        found = row.model.split(ranks)
        first, *layers, last = found.blocks
        return replace(found, blocks=(LookedUp(first.name, row.model, 1), *layers, Scored(last.name, row.model, 1)))

    return replace(row.model.workload, split=split)


def scattered(ranks: Ranks) -> tuple[Work, ...]:
    """Of each block where tensor-parallel ranks send parts of messages: what is received is gathered first."""
    tensor, runs = ranks.use.tensor, ranks.runs
    found = [replace(work, wire=work.wire // tensor) for work in ranks.works]
    for before, after in pairwise(runs):
        sent, received = before.stop - 1, after.start
        gather = Exchange("all-gather", ranks.works[sent].wire)
        found[sent] = replace(found[sent], backward=(gather, *found[sent].backward))
        found[received] = replace(found[received], forward=(gather, *found[received].forward))
    return tuple(found)


def reduced_last(program: Program) -> Program:
    """The program with what begins to reduce gradients behind all that computes them."""
    begun = [each for each in program.instructions if each.do is Do.SYNC]
    found: list[Instruction] = []
    for each in program.instructions:
        if each.do is Do.SYNC:
            continue
        if each.do in (Do.SYNCED, Do.DRAIN) and begun:
            found, begun = list(chain(found, begun)), []
        found.append(each)
    return replace(program, instructions=tuple(found))


def step_of(row: Published, cluster: Cluster | None = None) -> Step:
    """A row's step. Of many microbatches two shorter ones are played, which differ by what one more microbatch of each
    rank takes."""
    most = row.microbatches
    short = FULL * row.mesh.pipeline * row.chunks
    seconds = row.step_seconds or 0.0
    more = row.mesh.pipeline
    if most <= short + more:
        return Step(((1.0, prediction_of(row, cluster)),), seconds, row.id)
    short += (most - short) % more
    slope = (most - short) / more
    two = (1.0 - slope, prediction_of(row, cluster, short)), (slope, prediction_of(row, cluster, short + more))
    return Step(two, seconds, row.id)
