"""[parallel], [parallel.codecs], [parallel.outer] and [parallel.host]: mesh, layout, schedule, what is sent, and what
rests in host memory."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from atoll.base.errors import LayoutError, PlanError
from atoll.plans.host import HostState
from atoll.plans.ir.residency import current
from atoll.plans.layouts import ROUNDINGS, Codec, Codecs, Layout
from atoll.plans.outer import Apart, Outer
from atoll.plans.plan import AXES, ORDERS
from atoll.training.config.section import Natural, Positive, Section, as_tuple, join_or, raise_all

HopCodecName = Literal["none", "bf16", "fp8", "int8", "int4"]
CodecName = Literal["none", "bf16", "fp8", "int8", "int4", "int2"]


def _as_residency(value: Any) -> Any:
    return current(value) if isinstance(value, str) else value


def _as_layout(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return Layout.parse(value).name
    except LayoutError as error:
        raise ValueError(str(error)) from error


def _as_named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _known_order(value: tuple[str, ...]) -> tuple[str, ...]:
    if value not in ORDERS:
        raise ValueError(f"must be {join_or([list(order) for order in ORDERS])}")
    return value


def _as_host(value: Any) -> Any:
    if value is False:
        return None
    return {"optimizer": value} if isinstance(value, str) else value


def _as_shares(value: Any) -> Any:
    shares = value if isinstance(value, list | tuple) else [value]
    if not shares or not all(type(share) in (int, float) and 0 <= share <= 1 for share in shares):
        raise ValueError("must be a share from 0 to 1, or a list with a share for each stage")
    return as_tuple(value)


class CodecSection(Section):
    """[parallel.codecs]: encoding of messages between groups of data-parallel ranks, and between stages; see
    docs/codecs.md."""

    gradient: CodecName = "none"
    """codec of gradients: docs/codecs.md"""
    parameter: CodecName = "none"
    """codec of parameters, or of their differences to the copy that a rank keeps"""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """rounding of gradients and outer gradients; parameters are rounded to nearest"""
    feedback: bool = True
    """add the error of a rank's last encoding of gradients, and of outer gradients, to its next one"""
    hop: HopCodecName = "none"
    """codec of activations and their gradients between pipeline stages on different nodes: docs/codecs.md"""
    near: bool = False
    """`hop` also between stages on one node"""

    @property
    def value(self) -> Codecs:
        """The codecs of the plan."""
        nearest = ROUNDINGS[0]
        gradient, parameter, hop = (
            None if name == "none" else Codec(name, rounding=rounding)
            for name, rounding in ((self.gradient, self.rounding), (self.parameter, nearest), (self.hop, nearest))
        )
        return Codecs(gradient, parameter, self.feedback, hop, self.near)


class HostSection(Section):
    """[parallel.host]: what is in host memory instead of the device's; see docs/host.md."""

    optimizer: Literal["update-on-device", "update-on-host"] | None = None
    """where masters and states that rest in host memory are stepped: "update-on-device" copies them to the device and
    back, unit by unit; "update-on-host" copies gradients to host memory, and updated parameters back"""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """share of a rank's trained units whose masters and states rest there"""
    budget: Annotated[int, Field(ge=0)] | None = None
    """bytes of that state which may be on the device at once; if not given, what the three largest units need"""
    parameters: Literal["frozen", "all"] | None = None
    """parameters that rest there, so that every gather begins with their copy to the device: "frozen" ones, such as the
    base of adapters, or "all", which needs `optimizer`"""
    gradients: bool = False
    """gradients rest there too, from the microbatch that adds to them to the next one, and to the step; it needs
    `optimizer`"""
    activations: Annotated[float | tuple[float, ...], BeforeValidator(_as_shares)] = 0.0
    """share of activations that is copied to host memory after a block's forward and back before its backward, or a
    share for each stage, as in `[1.0, 0.5, 0.0, 0.0]`; those with the longest time in between come first, and those
    needed again soon stay on the device"""

    @property
    def value(self) -> HostState:
        """The host memory of the plan."""
        return HostState(self.optimizer, self.fraction, self.budget, self.parameters, self.activations, self.gradients)


class OuterOptimizer(Section):
    """`parallel.outer.optimizer` as a table. What is not given has the defaults of `atoll.plans.outer.Outer`."""

    name: str = "nesterov"
    lr: float | None = None
    momentum: float | None = None


class OuterSection(Section):
    """[parallel.outer]: outer steps of groups that train independently; see `atoll.plans.outer.Outer`."""

    every: Positive
    """steps between two outer gradients of a block"""
    optimizer: Annotated[dict[str, Any], BeforeValidator(_as_named)] = Field(
        default_factory=lambda: {"name": "nesterov"}
    )
    """outer optimizer: "nesterov", with a learning rate of 0.7 and a momentum of 0.9, or "sgd", with 1 and 0; a table
    changes these, as `{ name = "nesterov", lr = 0.8, momentum = 0.4 }`"""
    fragments: Natural = 1
    """number of parts of the model, sent after different steps; 0: each block is one"""
    delay: Natural = 0
    """steps between sending a fragment and applying its mean, less than `every`; with a delay a group keeps half of its
    own parameters when the mean is applied"""
    codec: CodecName = "none"
    """codec of outer gradients, with rounding and feedback of `[parallel.codecs]`: docs/outer.md#codecs"""
    quorum: Positive = 1
    """with `[federation]`: contributions that a round needs at least"""
    grace: Annotated[float, Field(ge=0)] = 30.0
    """with `[federation]`: seconds that a round waits for other islands once it has its quorum, and that an island
    waits for a round before it trains on"""
    weights: Literal["tokens", "equal"] = "tokens"
    """with `[federation]`: weights of islands in the mean, by the tokens that each has learned from, or all alike"""

    @model_validator(mode="after")
    def _check(self) -> OuterSection:
        problems = OuterOptimizer.problems_of(self.optimizer, "parallel.outer.optimizer")
        if not problems:
            try:
                self.to_outer(CodecSection())
            except PlanError as error:
                problems.append(str(error))
        raise_all(problems)
        return self

    def to_outer(self, codecs: CodecSection, islands: int | None = None) -> Outer:
        """Return the value that a plan has. codecs: their rounding and feedback.  islands: that are worlds of their
        own, with `[federation]`."""
        codec = None if self.codec == "none" else Codec(self.codec, rounding=codecs.rounding)
        by = OuterOptimizer(**self.optimizer)
        given = self.model_dump(include={"every", "fragments", "delay"})
        apart = None if islands is None else Apart(islands, self.quorum, self.grace, self.weights)
        return Outer(
            **given,
            optimizer=by.name,
            lr=by.lr,
            momentum=by.momentum,
            codec=codec,
            feedback=codecs.feedback,
            apart=apart,
        )


class Parallel(Section):
    """[parallel]: mesh, layout, schedule and other settings of parallelism.

    A file may give DeepSpeed's `zero_optimization` instead of `layout`.
    """

    auto: bool = False
    """let the planner choose the keys that are not written, and train.microbatch, for `run.cluster` or this machine as
    measured; `parallel = "auto"` lets it choose all of them: docs/plan.md"""
    ranks: Positive = 1
    """number of local processes; under a launcher, its world size applies instead"""
    min_ranks: Positive | None = None
    """smallest world size the run may continue with, on a new plan: docs/training.md#fewer-ranks"""
    pipeline: Positive = 1
    """number of pipeline ranks"""
    schedule: str = "1f1b"
    """name of a schedule in the catalogue, a CSV file in torch's format, or an order as text, for the plan's number of
    ranks and microbatches: docs/schedules.md"""
    chunks: Positive | None = None
    """stages per rank, for schedules with several"""
    layers_per_stage: Annotated[tuple[Natural, ...] | None, BeforeValidator(as_tuple)] = None
    """number of layers of each stage, as in `[3, 5, 5, 3]`; split evenly if not given"""
    post_validation: bool = False
    """take the optimizer step without waiting for the global norm, and check it afterwards"""
    compile: Literal["none", "block", "block-eager"] = "none"
    """"block" compiles each block with torch.compile; "block-eager" only traces it and needs no compiler"""
    prefetch: Annotated[int, Field(ge=0)] | None = None
    """bytes of parameters that may be prefetched; if not given, the bytes of one block for each link that a gather
    crosses. 0 uses the least memory: no prefetch, and each block's gradients are reduced before the next block's
    backward"""
    residency: Annotated[Literal["action", "run", "step"] | None, BeforeValidator(_as_residency)] = None
    """how long gathered parameters are kept: `action` for one action, `run` while the stage fits in the bytes of a
    rank's largest one, `step` for the whole step"""
    reduction: Literal["microbatch", "run", "step"] = "microbatch"
    """how often gradients are reduced to their shards: after each microbatch, before another stage's backward, or once
    a step"""
    unit: Positive = 1
    """number of blocks that are gathered and reduced together: more means fewer, larger messages and more memory"""
    tensor: Positive = 1
    """number of tensor-parallel ranks, which split each layer and the vocabulary: docs/models.md"""
    sequence: Positive = 1
    """ranks of a group that divide each sequence, a divisor of `intra` and, with `tensor`, of the heads of attention:
    docs/long-sequences.md"""
    slices: Positive = 1
    """slices of each sequence, which the pipeline computes one after the other as if they were microbatches:
    docs/long-sequences.md#slices"""
    slice_work: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """work of a token for each token that it attends to, relative to its own: later slices become shorter, so that all
    take equally long. 0: equal lengths"""
    loss_chunks: Positive = 1
    """chunks of a microbatch's tokens in which the loss is computed, so that only the logits of one exist:
    docs/models.md#the-loss-in-chunks"""
    sequence_parallel: bool = False
    """shard activations along the sequence between the tensor-parallel parts of a layer"""
    vocabulary: bool = False
    """split the rows of embedding and head over the pipeline ranks: docs/models.md#vocabulary-parallelism"""
    intra: Positive = 1
    """data-parallel ranks of a group; there are ranks / (pipeline · tensor · intra) groups"""
    expert: Positive = 1
    """ranks of a group that divide the experts of a mixture, a divisor of `intra` and, times `tensor`, of the number of
    experts: docs/experts.md"""
    expert_layout: Annotated[str | None, BeforeValidator(_as_layout)] = None
    """layout of the experts, over the ranks that share them; `layout` if not given"""
    imbalance: Annotated[float, Field(ge=1)] = 1.0
    """the most rows that a rank's experts are sent, as a multiple of an even share, for predictions"""
    order: Annotated[tuple[str, ...], BeforeValidator(as_tuple), AfterValidator(_known_order)] = AXES
    """axes of the mesh, outermost first: `pp` first sends pipeline messages between nodes,
    `["inter", "intra", "pp", "tp"]` keeps them inside"""
    layout: Annotated[str, BeforeValidator(_as_layout)] = "NNN"
    """three levels, or an alias such as `zero-2`: docs/layouts.md"""
    recompute: Literal["none", "block", "selective"] = "none"
    """activations to recompute in the backward: "block" all of a block's, "selective" all but the outputs of matrix
    products"""
    codecs: CodecSection = Field(default_factory=CodecSection)
    """encoding of messages between groups, and between stages: docs/codecs.md"""
    outer: OuterSection | None = None
    """outer steps of groups that train independently: docs/outer.md, keys below"""
    host: Annotated[HostSection | None, BeforeValidator(_as_host)] = None
    """what rests in host memory, a table or the value of its `optimizer`; false: nothing. docs/host.md, keys below"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" uses one GPU per local rank if there are enough, else the CPU"""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """seconds that a rank may be silent, or keep another waiting, before all ranks end and the error names it; derived
    from measured step times if not given: docs/training.md#timeout"""
