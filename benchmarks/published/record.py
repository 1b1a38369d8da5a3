"""A published measurement in the terms of `atoll.prediction.cost`, and what the rows of all sources have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import gcd
from typing import Any, Literal

from atoll.base.errors import LayoutError
from atoll.plans.ir.residency import Residency
from atoll.plans.layouts import Layout
from atoll.plans.plan import MeshShape
from atoll.prediction.cost import Cluster, Transformer, Use
from atoll.prediction.cost.work import AttentionKind, LossKind
from benchmarks.published.sizes import Network, UnclearError, cluster, padded

Row = Mapping[str, Any]

GIB = 2**30
MIB = 2**20

COMPUTE: Mapping[str, str] = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "amp_bf16": "bfloat16",
    "fp16/bf16": "float16",
}
"""Maps the name of a precision in a row to the torch dtype. Precisions such as fp8 are not supported."""

CHUNKS: Mapping[str, int] = {"1f1b": 1, "zb-1p": 1, "zb-2p": 1, "zb-v": 2, "v-half": 2}
"""Schedules of the catalogue that rows name, and their stages a rank."""


UNCONFIGURED = frozenset(
    {
        "id",
        "assumed",
        "cluster",
        "step_seconds",
        "tokens_per_second_per_gpu",
        "peak_bytes",
        "peak_bytes_by_rank",
        "rest_bytes",
        "fits",
        "bytes_of",
        "bytes_on",
    }
)
"""Fields of a row that its plan does not depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published run: its configuration, its hardware and its measurements.

    system: the program that ran.  microbatches: of a rank, in a step.  layers_per_stage, residency: as in `Plan`.
    vocabulary: how the ends are split over the pipeline: 0 not at all, 1 or 2 by that algorithm of arXiv 2411.05288.
    compiled: with torch.compile.  gradient_bytes, reduce_bytes: of an element that accumulates, and of one on the wire.
    fuses_gradients: products of weights' gradients add to the accumulated ones themselves.
    loss_in_place: the gradient of the logits is written over them.
    assumed: what the row does not say and its reader filled in. Without any, the row says all.

    step_seconds and tokens_per_second_per_gpu follow from each other.  peak_bytes: see `bytes_of` and `bytes_on`.
    peak_bytes_by_rank: of the world's ranks in order.  rest_bytes: between steps.
    fits: False where it ran out of memory.
    bytes_of: tensors that the allocator has given out, what it has reserved, or all that the driver shows.
    bytes_on: the rank that was measured, the fullest or the last of the pipeline.

    What is None was not published.
    """

    id: str
    source: str
    system: str
    model: Transformer
    use: Use
    mesh: MeshShape
    layout: Layout
    schedule: str
    chunks: int
    microbatches: int
    cluster: Cluster
    layers_per_stage: tuple[int, ...] | None = None
    residency: Residency = "action"
    vocabulary: Literal[0, 1, 2] = 0
    compiled: bool | None = None
    gradient_bytes: int | None = None
    reduce_bytes: int | None = None
    fuses_gradients: bool = False
    loss_in_place: bool = False
    assumed: tuple[str, ...] = ()

    step_seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    peak_bytes: int | None = None
    peak_bytes_by_rank: tuple[int, ...] | None = None
    rest_bytes: int | None = None
    fits: bool = True
    bytes_of: Literal["allocated", "reserved", "device"] = "allocated"
    bytes_on: Literal["fullest", "last"] = "fullest"

    @property
    def samples(self) -> int:
        """Number of samples in a step over all ranks."""
        return self.use.samples * self.microbatches * self.mesh.data

    @property
    def configuration(self) -> tuple[object, ...]:
        """What a prediction depends on, but for the cluster: equal for rows that differ in names and results alone."""
        return tuple(getattr(self, each.name) for each in fields(self) if each.name not in UNCONFIGURED)

    def timed(self, *, seconds: float | None = None, tokens: float | None = None) -> Published:
        """With what a step takes, from its seconds or from the tokens a second of one device."""
        share = self.samples * self.use.sequence / self.mesh.world
        if seconds is None and tokens is not None:
            seconds = share / tokens
        if tokens is None and seconds is not None:
            tokens = share / seconds
        return replace(self, step_seconds=seconds, tokens_per_second_per_gpu=tokens)


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a row, which says what it lacks."""

    name: str
    values: Row

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, or `default` if it is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 up."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnclearError(f"{self.name}.{key} is {value!r}, not a count")
        return value

    def number(self, key: str) -> float | None:
        """A number, if it is there."""
        value = self.get(key)
        return None if value is None else float(value)

    def text(self, key: str) -> str:
        """Words."""
        value = self.get(key)
        if not isinstance(value, str):
            raise UnclearError(f"{self.name}.{key} is {value!r}, not words")
        return value


@dataclass(frozen=True, slots=True)
class Fields:
    """A row, by the names that all sources use."""

    row: Row

    def changed(self, table: str, **values: Any) -> Fields:
        """With other values in one of its tables."""
        return Fields({**self.row, table: {**self.row.get(table, {}), **values}})

    @property
    def model(self) -> Table:
        """The model of the row."""
        return Table("model", self.row.get("model", {}))

    @property
    def cluster(self) -> Table:
        """The cluster of the row."""
        return Table("cluster", self.row.get("cluster", {}))

    @property
    def plan(self) -> Table:
        """The plan of the row."""
        return Table("plan", self.row.get("plan", {}))

    @property
    def result(self) -> Table:
        """The measurements of the row."""
        return Table("result", self.row.get("result", {}))

    # ---- parts of a plan

    @property
    def pipeline(self) -> int:
        """Pipeline ranks."""
        return self.plan.count("pp")

    @property
    def tensor(self) -> int:
        """Ranks of a tensor-parallel group."""
        return self.plan.count("tp")

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.plan.count("dp")

    @property
    def expert(self) -> int:
        """Data-parallel ranks that divide the experts of a mixture."""
        return self.plan.count("ep", 1)

    @property
    def sequence(self) -> int:
        """Tokens of a sample."""
        return self.model.count("seq")

    @property
    def vocabulary(self) -> int:
        """Rows of Megatron's embedding."""
        return padded(self.model.count("vocab"), self.tensor)

    @property
    def microbatches(self) -> int:
        """Microbatches of a rank in a step, from their number or the global batch, which must agree."""
        stated, batch = self.plan.get("microbatches"), self.plan.get("global_batch")
        if batch is None:
            return self.plan.count("microbatches")
        found, rest = divmod(self.plan.count("global_batch"), self.plan.count("microbatch") * self.data)
        if rest or not found or stated not in (None, found):
            raise UnclearError(
                f"a global batch of {batch} is not {stated or 'a number of'} microbatches of "
                f"{self.plan.count('microbatch')} on {self.data} data-parallel ranks"
            )
        return found

    @property
    def precision(self) -> tuple[str, int | None]:
        """Torch's name of the compute dtype, and bytes of an accumulated gradient if they are said."""
        text = self.plan.text("precision")
        name, _, gradients = text.partition(", ")
        if name not in COMPUTE or gradients not in ("", "fp32 gradients"):
            raise UnclearError(f"precision {text!r} has no dtype of torch")
        return COMPUTE[name], 4 if gradients else None

    @property
    def layout(self) -> Layout:
        """Where the state rests. Without data parallelism all layouts are one."""
        name = self.plan.get("layout", "NNN" if self.data == 1 else None)
        try:
            return Layout(str(name))
        except LayoutError:
            raise UnclearError(f"layout {name!r} is not three letters") from None

    @property
    def schedule(self) -> tuple[str, int]:
        """The catalogue's name, and stages a rank."""
        if self.pipeline == 1:
            return "1f1b", 1
        name, _, detail = self.plan.text("schedule").partition(", ")
        if name == "interleaved":
            number = detail.removesuffix(" chunks")
            chunks = int(number) if number.isdecimal() else self.plan.count("vpp")
            return ("interleaved", chunks) if chunks > 1 else ("1f1b", 1)
        if name not in CHUNKS or detail:
            raise UnclearError(f"no schedule is known for {self.plan.text('schedule')!r}")
        return name, CHUNKS[name]

    def mesh(self, devices: int) -> MeshShape:
        """Tensor-parallel ranks are innermost, then the data-parallel ones, in groups that nodes of `devices` have."""
        intra, expert = gcd(self.data, max(1, devices // self.tensor)), self.expert
        if intra % expert:
            # Experts over several nodes: groups are as large.
            intra = expert
        if self.data % intra:
            raise UnclearError(f"ep = {expert} ranks divide experts, of {self.data} data-parallel ones")
        return MeshShape(self.pipeline, self.data // intra, intra, self.tensor, expert=expert)

    # ---- wholes

    def gpt(self, *, layers: int | None = None, heads: int | None = None, positions: int | None = None,
            dropout: bool = True) -> Transformer:  # fmt: skip
        """A GPT of the row's sizes, with learned positions for each token of a sequence if nothing else is said."""
        return Transformer.gpt(
            layers=self.model.count("layers") if layers is None else layers,
            hidden=self.model.count("hidden"),
            heads=self.model.count("heads") if heads is None else heads,
            ffn=self.model.get("ffn"),
            vocabulary=self.vocabulary,
            positions=self.sequence if positions is None else positions,
            dropout=dropout,
        )

    def llama(self) -> Transformer:
        """A Llama of the row's sizes, untied."""
        return Transformer.llama(
            layers=self.model.count("layers"),
            hidden=self.model.count("hidden"),
            heads=self.model.count("heads"),
            kv_heads=self.model.count("kv_heads", self.model.count("heads")),
            ffn=self.model.count("ffn"),
            vocabulary=self.model.count("vocab"),
        )

    def use(self, *, attention: AttentionKind, loss: LossKind = "eager", recompute: str | None = None) -> Use:
        """Options of the model. recompute: what the row's words mean, where they are not the plan's."""
        return Use(
            samples=self.plan.count("microbatch"),
            sequence=self.sequence,
            tensor=self.tensor,
            expert=self.expert,
            sequence_parallel=self.tensor > 1 and bool(self.plan.get("sequence_parallel")),
            compute=self.precision[0],
            recompute=self._recompute() if recompute is None else recompute,
            attention=attention,
            loss=loss,
        )

    def _recompute(self) -> str:
        found = self.plan.text("recompute")
        if found not in ("none", "block", "selective"):
            raise UnclearError(f"recompute {found!r} is not one of the plan's")
        return found

    def published(self, system: str, model: Transformer, use: Use, *, network: Network | None = None,
                  layers_per_stage: tuple[int, ...] | None = None) -> Published:  # fmt: skip
        """The record without results. network: None where one node is enough.  layers_per_stage: even if not given."""
        if self.plan.count("cp", 1) > 1:
            raise UnclearError(f"cp = {self.plan.get('cp')} has no plan")
        gpus, devices = self.cluster.count("gpus"), self.cluster.count("per_node")
        mesh = self.mesh(devices)
        if mesh.world != gpus:
            raise UnclearError(f"tp x pp x dp is {mesh.world}, not {gpus} devices")
        schedule, chunks = self.schedule
        return Published(
            id=str(self.row["id"]),
            source=str(self.row["source"]),
            system=system,
            model=model,
            use=use,
            mesh=mesh,
            layout=self.layout,
            schedule=schedule,
            chunks=chunks,
            microbatches=self.microbatches,
            cluster=cluster(self.cluster.text("gpu"), devices=devices, gpus=gpus, network=network),
            layers_per_stage=layers_per_stage or even(model.layers, mesh.pipeline * chunks),
            gradient_bytes=self.precision[1],
        )


# ---- layers of stages


def even(layers: int, stages: int) -> tuple[int, ...] | None:
    """As many layers on each stage; None for one stage."""
    each, rest = divmod(layers, stages)
    if rest:
        raise UnclearError(f"{layers} layers are not even over {stages} stages")
    return None if stages == 1 else (each,) * stages


def filled(layers: int, stages: int) -> tuple[int, ...]:
    """As DeepSpeed cuts layers of equal weight: stages are filled up one by one, and the last ones get what is left."""
    most = -(-layers // stages)
    counts = tuple(min(most, max(0, layers - most * stage)) for stage in range(stages))
    if not counts[-1]:
        raise UnclearError(f"{layers} layers leave the last of {stages} stages none")
    return counts


def shorter_ends(layers: int, stages: int) -> tuple[int, ...]:
    """As many on each stage, with embedding and head counted as one each."""
    each, rest = divmod(layers + 2, stages)
    if rest or stages < 2:
        raise UnclearError(f"{layers} layers and both ends are not even over {stages} stages")
    return (each - 1, *(each,) * (stages - 2), each - 1)
