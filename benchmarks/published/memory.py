"""Bytes of published runs, by the rules of the program that ran.

What layers and ends keep is from `atoll.prediction.cost`; what state, workspaces and placeholders take is from the
tables below. Systems that shard parameters are left to `Prediction.held`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

from atoll.plans.ir import Op
from atoll.plans.layouts import ITEM_BYTES, Level
from atoll.prediction.cost import Prediction
from atoll.prediction.cost.work import Work
from atoll.program.memory import Held
from benchmarks.published.plans import FULL, plan_of
from benchmarks.published.record import MIB, Published

WHOLE = ("megatron", "megatron-deepspeed")
"""Systems whose parameters and gradients are whole on each data-parallel rank."""

OPTIMIZER = 12
"""Bytes of a parameter's master and of both moments of Adam, in fp32."""

WORKSPACE = 32 * MIB
"""A workspace of cuBLAS. One each for the threads of the forward and of the backward: torch takes 32 MiB from compute
capability 9.0 on, and anywhere under CUBLAS_WORKSPACE_CONFIG=:4096:8, which Megatron's tests set. Transformer Engine
has another one of this size from 9.0 on, and of 4 MiB before: Megatron's tests hold 28 MiB less at rest on A100."""

SMALL_WORKSPACES = (8 * MIB + MIB // 8, 4 * MIB)
"""Workspaces of torch and of Transformer Engine before compute capability 9.0."""

IN_FLIGHT = {"zb-1p": 1, "zb-2p": 2}
"""Microbatches that Sea AI Lab's scheduler lets each rank hold, in pipeline lengths: the limits p M_B and 2 p M_B of
arXiv 2401.10241. Measured peaks are those of limits that all ranks reach."""

MORE_IN_FLIGHT = {1: 2, 2: 1}
"""Microbatches that a split vocabulary adds on each rank, by algorithm (arXiv 2411.05288, figure 10, for 1F1B)."""

ZERO = ("bigscience",)
"""Sources whose optimizer is DeepSpeed's. vTrain's runs have Megatron's, or they would not fit the A100 they ran on."""

STEP = 8
"""Bytes of a sharded parameter that DeepSpeed's step takes besides: gradients flat in half, twice, and in fp32. The
allocator has no room for them where activations were. BigScience's lines 669 and 670, which differ in the shards of the
optimizer alone, differ by 35 GB, and 20 bytes a parameter are 33."""

RESERVED = 0.32
"""Bytes that the allocator reserves for a byte that comes and goes, and cannot use: the median of SimuMax's rows, which
print both. Twelve of those sixteen have 0.2 to 0.36, the others 0.12 to 0.62."""

DRIVER = 9_250 * MIB
"""Bytes that the driver shows besides on BLOOM's 384 A100: context, communicators, DeepSpeed's buckets, and what the
allocator cannot use. The median of the visible rows; half of them are within 2.3 GiB, nine in ten within 4.8."""

CONTEXT = 1024 * MIB
"""The same where nobody measured it: a context of CUDA and communicators."""


class Bytes(NamedTuple):
    """What each pipeline rank holds, between steps and at its peak."""

    rest: tuple[Held, ...]
    peak: tuple[Held, ...]


def rest_bytes(row: Published, rank: int) -> int:
    """Bytes that the allocator has given out on a pipeline rank between steps."""
    return bytes_of(row).rest[rank].allocated


def peak_bytes(row: Published, rank: int) -> int:
    """Bytes of a pipeline rank at its peak, as the row counts them."""
    peak = bytes_of(row).peak[rank]
    if row.bytes_of == "device":
        return peak.total
    unused = RESERVED * (peak.allocated - peak.parameters - peak.gradients - peak.optimizer)
    return peak.allocated + (round(unused) if row.bytes_of == "reserved" else 0)


def fits(row: Published) -> bool:
    """Whether each pipeline rank's peak is at most the device's memory, with the driver's part. Before it gives up, the
    allocator gives back what it has reserved in vain."""
    return max(held.total for held in bytes_of(row).peak) <= row.cluster.device.memory


def bytes_of(row: Published) -> Bytes:
    """Of all pipeline ranks. Rows that differ in results alone, or in microbatches that a full pipeline does not hold,
    share it.

    Raises PlanError or ConfigError where the plan does not fit.
    """
    full = FULL * row.mesh.pipeline * row.chunks
    count = min(row.microbatches, full + (row.microbatches - full) % row.mesh.pipeline)
    row = replace(row, microbatches=count)
    return _bytes_of(_Case((*row.configuration, _is_new(row)), row))


@dataclass(frozen=True)
class _Case:
    """A row. said: all that its bytes depend on; cases with the same are equal."""

    said: tuple[object, ...]
    row: Published = field(compare=False)


@cache
def _bytes_of(case: _Case) -> Bytes:
    row = case.row
    prediction = Prediction(row.model.workload, plan_of(row), None, row.use)
    ranks = range(row.mesh.pipeline)
    if row.system in WHOLE:
        each = [_Rank(row, prediction, rank) for rank in ranks]
        rest, peak = [rank.rest for rank in each], [rank.peak for rank in each]
    else:
        rest, peak = list(map(prediction.rest, ranks)), list(map(prediction.peak, ranks))
    context = DRIVER if row.source in ZERO else CONTEXT
    with_context = ([held._replace(context=context) for held in each] for each in (rest, peak))
    return Bytes(*map(tuple, with_context))


def _is_new(row: Published) -> bool:
    """Whether the device has compute capability 9.0 or more: those have rates for eight bits."""
    return "float8" in row.cluster.device.rates


@dataclass(frozen=True)
class _Rank:
    """A pipeline rank of a system whose parameters and gradients are whole."""

    row: Published
    prediction: Prediction
    rank: int

    # ---- state

    @cached_property
    def elements(self) -> int:
        """Parameters."""
        return sum(segment.map.numel for segment in self.prediction.ranks.of(self.rank).segments)

    @cached_property
    def shard(self) -> int:
        """Parameters whose optimizer state is on this rank."""
        ranks, mesh, level = self.prediction.ranks, self.row.mesh, self.row.layout.optimizer
        apart = sum(ranks.works[at].experts.parameters for at in self.blocks)
        each = {Level.N: 1, Level.I: mesh.intra, Level.G: mesh.data}[level]
        return (self.elements - apart) // each + apart // max(1, each // mesh.expert)

    @property
    def state(self) -> Held:
        """During a step. DeepSpeed has fp32 gradients in its BF16_Optimizer alone, beside those that autograd makes."""
        row, numel = self.row, self.elements
        item, is_deepspeed = ITEM_BYTES[row.use.compute], row.source in ZERO
        gradients = row.gradient_bytes or (item if row.system == "megatron-deepspeed" else 4)
        if is_deepspeed and gradients > item:
            gradients += item
        each = OPTIMIZER + (STEP if is_deepspeed else 0)
        return Held(item * numel, gradients * numel, each * self.shard, buffers=self.workspaces)

    @property
    def workspaces(self) -> int:
        """Of products. DeepSpeed runs before Transformer Engine have torch's alone."""
        if _is_new(self.row):
            return 3 * WORKSPACE
        plain, engine = SMALL_WORKSPACES
        return 2 * WORKSPACE + engine if self.row.source == "megatron-ci" else 2 * plain

    @property
    def rest(self) -> Held:
        """Between steps. The fp32 gradients that Megatron's optimizer makes of fp16 ones stay until the next step."""
        row, state = self.row, self.state
        precise = 4 * self.shard if (row.use.compute, row.gradient_bytes) == ("float16", 2) else 0
        return state._replace(gradients=state.gradients + precise, optimizer=OPTIMIZER * self.shard)

    # ---- activations

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """Of each block."""
        return self.prediction.ranks.works

    @cached_property
    def blocks(self) -> list[int]:
        """Of this rank."""
        return self.prediction.ranks.shape.blocks_of(self.rank)

    @property
    def last(self) -> int:
        """The head's block."""
        return len(self.works) - 1

    @property
    def peak(self) -> Held:
        """When most is held."""
        state, row = self.state, self.row
        found = max(self._moving, key=lambda held: held.total)
        each, microbatches = self._kept, self.prediction.plan.schedule.microbatches
        within = max(self._within(at) - self.works[at].kept for at in self.blocks)
        limit = IN_FLIGHT.get(row.schedule)
        if limit is not None:
            full = Held(activations=min(limit * row.mesh.pipeline, microbatches) * each, passing=within)
            found = max(found, full, key=lambda held: held.total)
        if row.vocabulary:
            found = found._replace(
                activations=found.activations + min(MORE_IN_FLIGHT[row.vocabulary], microbatches) * each,
                passing=found.passing + self._slice,
            )
        return Held(*(one + other for one, other in zip(state, found, strict=True)))

    @property
    def _kept(self) -> int:
        """Bytes that a microbatch keeps on this rank."""
        return sum(self.works[at].kept for at in self.blocks)

    @property
    def _slice(self) -> int:
        """A slice of the logits in fp32, and its gradient in the compute dtype."""
        row = self.row
        logits = row.use.tokens * -(-row.model.vocabulary // (row.mesh.pipeline * row.use.tensor))
        return (4 + row.use.item) * logits

    @cached_property
    def _moving(self) -> list[Held]:
        return list(self._moves())

    def _moves(self) -> Iterator[Held]:
        """What comes and goes, block by block.

        A backward in one piece leaves nothing for W; of a split one, the head's does not.
        """
        works = self.works
        is_split = self.row.schedule not in ("1f1b", "interleaved")
        kept = pending = 0
        for action in self.prediction.plan.schedule.actions[self.rank]:
            blocks = self.prediction.ranks.runs[action.stage]
            if action.op is Op.F:
                for at in blocks:
                    kept += works[at].kept
                    yield Held(activations=kept, pending=pending, passing=self._loss if at == self.last else 0)
            if action.op in (Op.I, Op.B):
                for at in reversed(blocks):
                    kept -= works[at].kept
                    passing, buffers = self._within(at), self._placeholders(at)
                    yield Held(activations=kept, pending=pending, passing=passing, buffers=buffers)
                    pending += works[at].kept_for_weights if is_split and at != self.last else 0
            if action.op in (Op.W, Op.B) and is_split:
                pending -= sum(works[at].kept_for_weights for at in blocks if at != self.last)

    @property
    def _loss(self) -> int:
        """Within the head's forward. A fused loss that torch compiles has the logits and their exponentials in fp32."""
        row = self.row
        if row.loss_in_place:
            return 0
        logits = row.use.tokens * -(-row.model.vocabulary // row.use.tensor)
        return 8 * logits if row.use.loss == "fused" else self.works[self.last].peak

    def _within(self, at: int) -> int:
        """Bytes that a block holds within its backward: what it kept and made again, and gradients.

        Sequence parallelism gathers a layer's input and its output's gradient, and has the input's gradient whole.
        """
        work, row = self.works[at], self.row
        whole = row.use.tokens * row.model.hidden * row.use.item
        gathered = whole if row.use.parts > 1 else 0
        made = sum(each.nbytes for each in (*work.again, *work.pending))
        if at == self.last:
            return work.kept + 2 * gathered + (0 if row.loss_in_place else made)
        return work.kept + made + 3 * gathered

    def _placeholders(self, at: int) -> int:
        """Products that add to the accumulated gradient give autograd a tensor of its shape in the compute dtype.

        Transformer Engine keeps one for each shape (`get_dummy_wgrad`), those of one layer. The head's is Megatron's.
        """
        row = self.row
        if not row.fuses_gradients:
            return 0
        layer = max((self.works[each].matrices for each in self.blocks if 0 < each < self.last), default=0)
        head = self.works[self.last].matrices if self.last in self.blocks else 0
        return row.use.item * (layer + head)
