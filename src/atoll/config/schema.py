"""What a config may say: one frozen model a section, with its defaults.

Every section checks its own sizes against each other; `atoll.config.planning` checks the sections against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from atoll.errors import LayoutError, PlanError
from atoll.faults import Policy
from atoll.layouts import Layout
from atoll.plans import AXES, ORDERS, Plan
from atoll.toml import to_toml

Positive = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]
Natural = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_layout(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return Layout.parse(value).name
    except LayoutError as error:
        raise ValueError(str(error)) from error


def _as_policy(value: str) -> str:
    try:
        return str(Policy.parse(value))
    except PlanError as error:
        raise ValueError(str(error)) from error


def _known_order(value: tuple[str, ...]) -> tuple[str, ...]:
    if value not in ORDERS:
        raise ValueError(f"the axes can lie as {join_or([list(order) for order in ORDERS])}")
    return value


class Section(BaseModel):
    """A table of the config: immutable, no unknown keys, no conversions except int to float."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Model(Section):
    """[model]: the network.

    source: "builtin", the decoder of `atoll.models`, whose sizes are the keys from `layers` on; "transformers:NAME", a
    family of the `transformers` package such as "transformers:llama"; or the folder of a Hugging Face model.
    config: values of the `transformers` configuration, for sources that have one.
    weights: None takes those of the source's folder if it has any; "initial" draws them; else a folder of safetensors
    or a checkpoint.
    `kv_heads` defaults to `heads`, `ffn` to 8/3 `hidden` rounded up to a multiple of 8.
    """

    source: str = "builtin"
    config: dict[str, Any] = Field(default_factory=dict)
    weights: str | None = None
    layers: Annotated[int, Field(ge=1, le=1000)] = 8
    hidden: Positive = 128
    heads: Positive = 4
    kv_heads: Positive = 4
    ffn: Positive = 344
    dropout: Probability = 0.0
    tie_embeddings: bool = True
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    vocabulary: Positive | None = None
    """None: the tokenizer's size."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        derived: dict[str, Any] = {}
        if data.get("source", "builtin") != "builtin":
            return data
        if type(data.get("heads")) is int:
            derived["kv_heads"] = data["heads"]
        if type(data.get("hidden")) is int:
            derived["ffn"] = -(-data["hidden"] * 8 // 24) * 8
        return {**derived, **data}

    @property
    def is_builtin(self) -> bool:
        """Whether the model is the decoder of `atoll.models`."""
        return self.source == "builtin"

    @model_validator(mode="after")
    def _check(self) -> Model:
        problems = []
        if not self.is_builtin:
            others = {"source", "config", "weights", "vocabulary"}
            fields = type(self).model_fields.items()
            useless = sorted(key for key, field in fields if key not in others and getattr(self, key) != field.default)
            if useless:
                problems.append(
                    f"model.{', model.'.join(useless)}: sizes of the built-in decoder; those of {self.source!r} are "
                    "written as [model.config], in transformers' words"
                )
        elif self.config:
            problems.append('model.config: for sources of transformers; model.source is "builtin"')
        if self.hidden % self.heads:
            problems.append(
                f"model.hidden = {self.hidden} is not a multiple of model.heads = {self.heads}; use hidden = "
                f"{_neighbours(self.hidden, self.heads)}"
            )
        elif self.hidden // self.heads % 2:
            problems.append(
                f"model.hidden / model.heads = {self.hidden} / {self.heads} = {self.hidden // self.heads} is odd; "
                f"rotary positions need an even head size; use hidden = {_neighbours(self.hidden, 2 * self.heads)}"
            )
        if self.heads % self.kv_heads:
            fitting = [size for size in range(1, self.heads + 1) if self.heads % size == 0]
            problems.append(
                f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}; use kv_heads = "
                f"{join_or(fitting)}"
            )
        raise_all(problems)
        return self


class Data(Section):
    """[data]: the corpus and how it becomes tokens. `sequence` is in tokens, `validation` a share of the corpus."""

    source: str = "stdlib"
    tokenizer: str = "auto"
    """"auto": that of the model's folder if it has one, else bpe-4096."""
    sequence: Positive = 256
    validation: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    text_field: str = "text"
    cache: str | None = None
    """Folder for tokenizers and token arrays; None: the user's cache folder."""
    seed: Natural | None = None
    """Of the sample order; None: train.seed."""


class Train(Section):
    """[train]: steps, batch and optimizer. Batches are in sequences, `warmup` and the `eval_` keys in steps.

    clip: largest global gradient norm, 0 for none.  eval_every: 0 for the start and the end only.
    sample_tokens: length of the text generated at the end, 0 for none.
    trainable, frozen: name patterns with * and ?; with `trainable` nothing else is trained, what is `frozen` is not.
    objective: "causal" predicts the next token, "masked" those that were hidden, `mask_ratio` of them.
    bad_steps: what is done about steps whose loss or gradients are not finite: "stop", "skip" or "rollback N".
    check_replicas: steps between comparisons of what ranks hold alike; 0 for none.
    """

    steps: Positive = 300
    global_batch: Positive = 16
    microbatch: Positive = 4
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    seed: Natural = 0
    lr: Annotated[float, Field(ge=0)] = 3e-3
    min_lr_ratio: Fraction = 0.1
    warmup: Natural = 20
    lr_schedule: Literal["cosine", "constant", "linear"] = "cosine"
    betas: Annotated[tuple[Probability, Probability], BeforeValidator(_as_tuple)] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip: Annotated[float, Field(ge=0)] = 1.0
    eval_every: Natural = 100
    eval_batches: Positive = 8
    sample_tokens: Natural = 64
    prompt: str = "def "
    trainable: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    frozen: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    objective: Literal["causal", "masked"] = "causal"
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.15
    bad_steps: Annotated[str, AfterValidator(_as_policy)] = "stop"
    check_replicas: Natural = 0


class Lora(Section):
    """[lora]: low-rank adapters of the `peft` package on a frozen model. rank: 0 for none.

    alpha: their results are multiplied by alpha / rank.  targets: ends of module names, or "all-linear".
    """

    rank: Natural = 0
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Probability = 0.0
    targets: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ("all-linear",)


class Parallel(Section):
    """[parallel]: how the ranks share the work.

    auto: a planner chooses for run.cluster what is not written here, and train.microbatch if it is not written;
    `parallel = "auto"` leaves everything to it.
    ranks: local processes; under torchrun the world decides.  intra: ranks of a group along data parallel; groups
    follow as ranks / (pipeline * tensor * intra).  schedule: a name of the catalogue, a CSV file in torch's format, or
    the text of an order (`atoll.ir.text.to_text`), for as many ranks and microbatches as the plan has.
    chunks: stages of each rank, for schedules that take them.
    post_validation: take the optimizer step before the global norm is known, and check afterwards.
    prefetch: bytes of parameters that may be gathered before they are used; 0 takes the least memory, and the backward
    then waits for each reduction too.
    residency, reduction, resident, unit: how long gathered parameters stay whole, how often gradients are reduced, and
    how many blocks at once; see atoll.plans.Plan.
    order: the axes of the mesh over the ranks, outermost first; see atoll.plans.MeshShape.
    vocabulary: the rows of embedding and head are split over the pipeline's ranks.
    sequence_parallel: what lies between the parts split by `tensor` works on a part of the sequence.
    layers_per_stage: how many layers each stage gets; as even as can be if not given.
    timeout: seconds that a rank may be silent, or keep another one waiting, before all ranks end and it is named.
    A file may give `zero_optimization`, DeepSpeed's words, instead of `layout`.
    """

    auto: bool = False
    ranks: Positive = 1
    pipeline: Positive = 1
    schedule: str = "1f1b"
    chunks: Positive | None = None
    layers_per_stage: Annotated[tuple[Natural, ...] | None, BeforeValidator(_as_tuple)] = None
    post_validation: bool = False
    compile: Literal["none", "block", "block-eager"] = "none"
    prefetch: Annotated[int, Field(ge=0)] | None = None
    residency: Literal["unit", "run", "step"] = "unit"
    reduction: Literal["microbatch", "run", "step"] = "microbatch"
    resident: Annotated[int, Field(ge=0)] | None = None
    unit: Positive = 1
    tensor: Positive = 1
    sequence_parallel: bool = False
    vocabulary: bool = False
    intra: Positive = 1
    order: Annotated[tuple[str, ...], BeforeValidator(_as_tuple), AfterValidator(_known_order)] = AXES
    layout: Annotated[str, BeforeValidator(_as_layout)] = "NNN"
    recompute: Literal["none", "block", "selective"] = "none"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: Annotated[float, Field(gt=0)] = 600.0


class Run(Section):
    """[run]: where results go.

    port: of the rendezvous, 0 for any free one.
    cluster: a TOML file of what the run is on; its predicted seconds are then recorded beside the measured ones.
    restarts: how often local ranks are started again after a failure, counted anew after each checkpoint.
    """

    folder: str = "runs/default"
    restarts: Natural = 3
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    tensorboard: bool = True
    cluster: str | None = None


class Checkpoint(Section):
    """[checkpoint]: every `every` steps (0: none but the last), the newest `keep` are kept.

    keep_hours: one of every so many hours is kept too.  keep_best: so many of the lowest validation loss are kept too.
    background: training goes on while they are written, from a copy in host memory.
    """

    every: Natural = 100
    keep: Positive = 2
    keep_hours: Annotated[float, Field(gt=0)] | None = None
    keep_best: Natural = 0
    background: bool = True


class Config(Section):
    """A whole config. `load` reads one; `to_plan` turns it into what the engine runs."""

    model: Model = Field(default_factory=Model)
    data: Data = Field(default_factory=Data)
    train: Train = Field(default_factory=Train)
    lora: Lora = Field(default_factory=Lora)
    parallel: Parallel = Field(default_factory=Parallel)
    run: Run = Field(default_factory=Run)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader of the config should know: settings without effect, translations, better layouts."""
        layout = Layout(self.parallel.layout)
        better = layout.dominated_by
        if better is None:
            return self._notes
        return (
            *self._notes,
            f"parallel.layout = {layout.name!r} is dominated by {better.name!r}, which holds less and sends no more",
        )

    @property
    def data_seed(self) -> int:
        """Seed of the sample order."""
        return self.train.seed if self.data.seed is None else self.data.seed

    @property
    def tokenizer(self) -> str:
        """What makes the tokens: data.tokenizer, where that is "auto" the one of the model's folder, or a new one."""
        if self.data.tokenizer != "auto":
            return self.data.tokenizer
        own = Path(self.model.source) / "tokenizer.json"
        return str(own) if not self.model.is_builtin and own.is_file() else "bpe-4096"

    def with_notes(self, notes: Sequence[str]) -> Config:
        """The same config that also says `notes`."""
        noted = self.model_copy()
        noted._notes = (*self._notes, *notes)
        return noted

    def to_plan(self, world: int | None = None) -> Plan:
        """The plan for `world` ranks (parallel.ranks unless a launcher decides); ConfigError if sizes do not fit."""
        from atoll.config.planning import plan_of

        return plan_of(self, world)

    def dump(self) -> str:
        """The effective config as TOML text, every key written out; `load` reads it back to an equal config."""
        return to_toml(self.model_dump())


def raise_all(problems: Sequence[str]) -> None:
    """Raise all `problems` at once, one a line, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))


def join_or(values: Sequence[object]) -> str:
    """ "1, 2 or 4"."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _neighbours(value: int, multiple: int) -> str:
    """The multiples next to `value`, from `multiple` on."""
    below = value // multiple * multiple
    return join_or([size for size in (below, below + multiple) if size])
