"""Schema of a config: one frozen pydantic model per section, with defaults.

Each section validates its own keys; `atoll.training.config.planning` validates sections against each other.
"""

from __future__ import annotations

import fractions
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from atoll.base.errors import ConfigError, LayoutError, PlanError
from atoll.base.faults import Policy
from atoll.base.toml import to_toml
from atoll.plans.ir.residency import current
from atoll.plans.layouts import ROUNDINGS, Codec, Layout
from atoll.plans.layouts import Codecs as CodecsOfPlan
from atoll.plans.outer import Outer
from atoll.plans.plan import AXES, ORDERS, Plan
from atoll.training.config.planning import divisors

RATES = ("cosine", "constant", "linear", "wsd")
"""Learning-rate schedules by name."""

LOGGERS = ("wandb", "mlflow")
"""Loggers that metrics can be sent to, in addition to TensorBoard."""

NAMED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""Pattern of `module:name`."""

ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""Defaults of AdamW. Other optimizers keep their own."""

Positive = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]
Natural = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_residency(value: Any) -> Any:
    return current(value) if isinstance(value, str) else value


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


def _as_optimizer(value: str) -> str:
    if NAMED.fullmatch(value) or value.isidentifier():
        return value
    raise ValueError('must be the name of an optimizer of torch.optim, or "module:factory"')


def _as_rates(value: str) -> str:
    if value in RATES or NAMED.fullmatch(value):
        return value
    raise ValueError(f'must be {join_or([repr(name) for name in RATES])}, or "module:function"')


def _as_logger(value: str) -> str:
    if value in LOGGERS or NAMED.fullmatch(value):
        return value
    raise ValueError(f'must be {", ".join(repr(name) for name in LOGGERS)} or "module:function"')


def _known_order(value: tuple[str, ...]) -> tuple[str, ...]:
    if value not in ORDERS:
        raise ValueError(f"must be {join_or([list(order) for order in ORDERS])}")
    return value


class Section(BaseModel):
    """A table of the config: immutable, no unknown keys, no conversions except int to float."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Model(Section):
    """[model]: the network.

    source: "builtin", the decoder of `atoll.runtime.models`, sized by the keys from `layers` on; "transformers:NAME", a
    family of the `transformers` package such as "transformers:llama"; or the folder of a Hugging Face model.
    config: values that override the `transformers` configuration; not for the builtin model.
    `attn_implementation` chooses the attention: "eager", "sdpa", "flash_attention_2" or another.
    weights: None loads the weights in the source's folder if it has any; "initial" initializes them at random; else a
    folder of safetensors or a checkpoint.
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
    """None: the size of the tokenizer's vocabulary."""

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
        """True if the model is the decoder of `atoll.runtime.models`."""
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
                    f"model.{', model.'.join(useless)}: sizes of the built-in decoder; write those of {self.source!r} "
                    "under [model.config], by their names in transformers"
                )
        elif self.config:
            problems.append('model.config applies to transformers models only; model.source is "builtin"')
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
            problems.append(
                f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}; use kv_heads = "
                f"{join_or(divisors(self.heads))}"
            )
        raise_all(problems)
        return self


def _as_validation(value: Any) -> Any:
    is_share = type(value) in (int, float) and 0 <= value <= 0.5
    if not is_share and not (isinstance(value, str) and value):
        raise ValueError("must be a share of the corpus from 0 to 0.5, or a file or folder")
    return value


def _as_sources(value: Any) -> Any:
    if isinstance(value, str):
        return value
    given = _as_tuple(value)
    if not isinstance(given, tuple) or not given or not all(isinstance(each, str) and each for each in given):
        raise ValueError('must be "stdlib", a file or a folder, or a list of these')
    twice = sorted({each for each in given if given.count(each) > 1})
    if twice:
        raise ValueError(f"{', '.join(map(repr, twice))} more than once; set its share in data.weights")
    return given


class Data(Section):
    """[data]: the corpus, and how it is cut into samples.

    source: one source or a list of them.  weights: shares of the samples to draw from each source of a list; None: in
    proportion to their samples.
    streaming: encode the sources during the run.
    format: "text", or "chat" for conversations and instructions, which the tokenizer's chat template formats;
    `chat_template` is a file that replaces the template.
    answers_only: compute the loss on the assistant's answers only.
    ignored_keys: keys of conversations and their messages that are not used; any other unknown key is an error.
    bad_records: "stop" at the first broken record, or "skip" and count them.
    sequence: sequence length, the tokens in a sample.
    packing: what a sample contains: a block of joined documents ("blocks"), several whole documents ("documents"), or
    one document with padding ("pad"); "auto" is "documents" for chat and "blocks" for text.
    too_long: "split", "drop" or "truncate" documents longer than a sample; "auto" drops conversations and splits text.
    validation: share of the corpus held out, or a separate file or folder.
    """

    source: Annotated[str | tuple[str, ...], BeforeValidator(_as_sources)] = "stdlib"
    streaming: bool = False
    weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...] | None, BeforeValidator(_as_tuple)] = None
    format: Literal["text", "chat"] = "text"
    tokenizer: str = "auto"
    """"auto": the tokenizer in the model's folder if it has one, else bpe-4096."""
    chat_template: str | None = None
    answers_only: bool = True
    ignored_keys: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    bad_records: Literal["stop", "skip"] = "stop"
    sequence: Positive = 256
    packing: Literal["auto", "blocks", "documents", "pad"] = "auto"
    too_long: Literal["auto", "split", "drop", "truncate"] = "auto"
    validation: Annotated[float | str, BeforeValidator(_as_validation)] = 0.02
    text_field: str = "text"
    cache: str | None = None
    """Folder in which tokenizers and token arrays are cached; None: the user's cache folder."""

    @model_validator(mode="after")
    def _check(self) -> Data:
        problems = []
        is_chat = self.format == "chat"
        if is_chat and self.packing == "blocks":
            problems.append(
                'data.packing = "blocks" joins conversations; with data.format = "chat" use "documents" or "pad"'
            )
        if is_chat and self.text_field != "text":
            problems.append('data.text_field has no effect with data.format = "chat"; leave it out')
        for_chat = {
            "chat_template": self.chat_template is not None,
            "answers_only": not self.answers_only,
            "ignored_keys": bool(self.ignored_keys),
        }
        if not is_chat and any(for_chat.values()):
            key = next(key for key, is_set in for_chat.items() if is_set)
            problems.append(f'data.{key} applies to conversations only; set data.format = "chat", or leave it out')
        if self.how == "blocks" and self.too_long != "auto":
            problems.append(
                'data.too_long has no effect with data.packing = "blocks", which cuts joined documents; set packing to '
                '"documents" or "pad", or leave too_long out'
            )
        if self.weights is not None and (isinstance(self.source, str) or len(self.weights) != len(self.source)):
            problems.append(
                f"data.weights = {list(self.weights)}: one for each source of a list, and data.source = "
                f"{self.source if isinstance(self.source, str) else list(self.source)!r} has {len(self.sources)}"
            )
        raise_all(problems)
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of all sources."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def how(self) -> Literal["blocks", "documents", "pad"]:
        """The packing, with "auto" resolved."""
        if self.packing != "auto":
            return self.packing
        return "documents" if self.format == "chat" else "blocks"

    @property
    def rule(self) -> Literal["split", "drop", "truncate"]:
        """The rule for documents longer than a sample, with "auto" resolved."""
        if self.too_long != "auto":
            return self.too_long
        return "drop" if self.format == "chat" else "split"


class Train(Section):
    """[train]: steps, batch and optimizer. Batches are in sequences; `warmup`, `decay` and the `eval_` keys in steps.

    epochs: passes over the corpus, instead of `steps`. The steps are known once the corpus is prepared; see
    `Config.with_steps_of`.
    lr_schedule: one of `RATES`, or `module:function`, which is called with the steps done and train.steps and returns a
    factor of `lr`.  decay: number of last steps over which "wsd" decays; a tenth of `steps` if not given.
    optimizer: name of an optimizer of torch.optim, or `module:factory`, which is called like a class of torch; "Muon"
    is for hidden matrices, with AdamW for everything else.
    optimizer_options: further arguments besides `lr`, `betas`, `eps` and `weight_decay`.
    optimizer_states: state tensors per parameter of a `module:factory` optimizer, for predictions, which do not call
    it.
    betas, eps, weight_decay: see `ADAMW`; other optimizers keep their own defaults.
    clip: maximum global gradient norm; 0: no clipping.  eval_every: 0: at the start and the end only.
    prompt: of a text that the model continues at the end of the run; none if not given.
    trainable, frozen: name patterns (* and ?) of the only parameters to train, and of parameters not to train.
    objective: "causal" predicts the next token; "masked" predicts masked tokens, a share `mask_ratio` of all.
    bad_steps: action after a step whose loss or gradients are not finite: "stop", "skip" or "rollback N".
    check_replicas: steps between comparisons of replicated state across ranks; 0: none.
    patience: end the run after so many consecutive validations without a lower loss; 0: off.
    """

    steps: Positive = 300
    epochs: Annotated[float, Field(gt=0)] | None = None
    global_batch: Positive = 16
    microbatch: Positive = 4
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    seed: Natural = 0
    lr: Annotated[float, Field(ge=0)] = 3e-3
    min_lr_ratio: Fraction = 0.1
    warmup: Natural = 20
    decay: Natural | None = None
    lr_schedule: Annotated[str, AfterValidator(_as_rates)] = "cosine"
    optimizer: Annotated[str, AfterValidator(_as_optimizer)] = "AdamW"
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    optimizer_states: Natural | None = None
    betas: Annotated[tuple[Probability, Probability] | None, BeforeValidator(_as_tuple)] = None
    eps: Annotated[float, Field(gt=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    clip: Annotated[float, Field(ge=0)] = 1.0
    eval_every: Natural = 100
    eval_batches: Positive = 8
    patience: Natural = 0
    prompt: str | None = None
    trainable: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    frozen: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    objective: Literal["causal", "masked"] = "causal"
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.15
    bad_steps: Annotated[str, AfterValidator(_as_policy)] = "stop"
    check_replicas: Natural = 0

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("optimizer", "AdamW") != "AdamW":
            return data
        return {**ADAMW, **{key: value for key, value in data.items() if key not in ADAMW or value is not None}}

    @model_validator(mode="after")
    def _check(self) -> Train:
        problems = []
        if self.epochs is not None and "steps" in self.model_fields_set:
            problems.append(
                f"train.steps = {self.steps} and train.epochs = {self.epochs:g} both set the length of the run; "
                "keep one"
            )
        if self.decay is not None and self.lr_schedule != "wsd":
            problems.append(
                f'train.decay = {self.decay} applies to lr_schedule = "wsd" only, not to {self.lr_schedule!r}'
            )
        if self.optimizer_states is not None and ":" not in self.optimizer:
            problems.append(
                f"train.optimizer_states = {self.optimizer_states} applies to a module:factory optimizer only; the "
                f"states of torch's {self.optimizer} are counted"
            )
        raise_all(problems)
        return self

    @property
    def decays(self) -> int:
        """Number of last steps over which "wsd" decays."""
        return -(-self.steps // 10) if self.decay is None else self.decay


class Lora(Section):
    """[lora]: low-rank adapters of the `peft` package on a frozen model. rank: 0: no adapters.

    alpha: the adapters' output is multiplied by alpha / rank.  targets: suffixes of module names, or "all-linear".
    modules_to_save: suffixes of names of modules that are trained whole, beside the adapters.
    """

    rank: Natural = 0
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Probability = 0.0
    targets: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ("all-linear",)
    modules_to_save: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()

    @model_validator(mode="after")
    def _check(self) -> Lora:
        if self.modules_to_save and not self.rank:
            raise ValueError(
                f"modules_to_save = {list(self.modules_to_save)} without adapters: set lora.rank, or train these "
                "modules alone with train.trainable"
            )
        return self


class CodecSection(Section):
    """[parallel.codecs]: what is sent between groups of data-parallel ranks instead of elements; see docs/codecs.md.

    gradient: codec of gradients.  parameter: codec of parameters: of their differences to the copy that a rank keeps,
    or of themselves where they are gathered for each use.
    rounding: of gradients; parameters are rounded to nearest.
    feedback: add the error of a rank's last encoding of gradients to its next one.
    Both also hold for outer gradients.
    """

    gradient: Literal["none", "bf16", "fp8", "int8", "int4"] = "none"
    parameter: Literal["none", "bf16", "fp8", "int8", "int4"] = "none"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    feedback: bool = True

    @property
    def value(self) -> CodecsOfPlan:
        """The codecs of the plan."""
        gradient, parameter = (
            None if name == "none" else Codec(name, rounding=rounding)
            for name, rounding in ((self.gradient, self.rounding), (self.parameter, ROUNDINGS[0]))
        )
        return CodecsOfPlan(gradient, parameter, self.feedback)


class OuterSection(Section):
    """[parallel.outer]: outer steps of groups that train independently; see `atoll.plans.outer.Outer` for the keys.

    every: steps between two outer gradients of a block.
    lr, momentum: of the outer optimizer; 0.7 and 0.9 for "nesterov", 1 and 0 for "sgd" if not given.
    fragments: number of parts of the model that are sent after different steps; 0: each block is one.
    delay: steps between sending a fragment and applying its mean.
    mix: weight of a group's own parameters when the mean is applied; 0.5 with a delay and 0 without if not given.
    codec: of outer gradients, with rounding and feedback of [parallel.codecs].
    """

    every: Positive
    optimizer: str = "nesterov"
    lr: float | None = None
    momentum: float | None = None
    fragments: Natural = 1
    delay: Natural = 0
    mix: float | None = None
    codec: Literal["none", "bf16", "fp8", "int8", "int4"] = "none"

    @model_validator(mode="after")
    def _check(self) -> OuterSection:
        try:
            self.to_outer(CodecSection())
        except PlanError as error:
            raise_all([str(error)])
        return self

    def to_outer(self, codecs: CodecSection) -> Outer:
        """Return the value that a plan has. codecs: their rounding and feedback."""
        codec = None if self.codec == "none" else Codec(self.codec, rounding=codecs.rounding)
        return Outer(**self.model_dump(exclude={"codec"}), codec=codec, feedback=codecs.feedback)


class Parallel(Section):
    """[parallel]: mesh, layout, schedule and other settings of parallelism.

    auto: let the planner choose, for run.cluster or this machine as measured, the keys that are not written here, and
    train.microbatch if it is not written; `parallel = "auto"` lets it choose all of them.
    ranks: number of local processes; under torchrun, its world size applies instead.  min_ranks: smallest world size
    the run may continue with, on a new plan (`atoll.training.config.worlds`).
    intra: data-parallel ranks of a group; there are ranks / (pipeline * tensor * intra) groups.
    schedule: name of a schedule in the catalogue, a CSV file in torch's format, or an order as text
    (`atoll.plans.ir.text.to_text`), for the plan's number of ranks and microbatches.
    chunks: stages per rank, for schedules with several.
    post_validation: take the optimizer step without waiting for the global norm, and check it afterwards.
    prefetch: bytes of parameters that may be prefetched; 0 uses the least memory, and the backward then also waits for
    each reduction.
    residency, reduction, unit: how long gathered parameters are kept, how often gradients are reduced, and
    how many blocks at once; see atoll.plans.plan.Plan.
    order: axes of the mesh, outermost first; see atoll.plans.plan.MeshShape.
    vocabulary: split the rows of embedding and head over the pipeline ranks.
    codecs: what is sent between groups: a table, [parallel.codecs].
    sequence_parallel: shard activations along the sequence between the tensor-parallel parts of a layer.
    layers_per_stage: number of layers of each stage; split evenly if not given.
    outer: outer steps of groups that train independently (table); all groups take each step together if not given.
    timeout: seconds that a rank may be silent, or keep another waiting, before all ranks end and the error names it;
    derived from measured step times if not given.
    A file may give DeepSpeed's `zero_optimization` instead of `layout`.
    """

    auto: bool = False
    ranks: Positive = 1
    min_ranks: Positive | None = None
    pipeline: Positive = 1
    schedule: str = "1f1b"
    chunks: Positive | None = None
    layers_per_stage: Annotated[tuple[Natural, ...] | None, BeforeValidator(_as_tuple)] = None
    post_validation: bool = False
    compile: Literal["none", "block", "block-eager"] = "none"
    prefetch: Annotated[int, Field(ge=0)] | None = None
    residency: Annotated[Literal["action", "run", "step"] | None, BeforeValidator(_as_residency)] = None
    reduction: Literal["microbatch", "run", "step"] = "microbatch"
    unit: Positive = 1
    tensor: Positive = 1
    sequence_parallel: bool = False
    vocabulary: bool = False
    intra: Positive = 1
    order: Annotated[tuple[str, ...], BeforeValidator(_as_tuple), AfterValidator(_known_order)] = AXES
    layout: Annotated[str, BeforeValidator(_as_layout)] = "NNN"
    recompute: Literal["none", "block", "selective"] = "none"
    codecs: CodecSection = Field(default_factory=CodecSection)
    outer: OuterSection | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: Annotated[float, Field(gt=0)] | None = None


class Run(Section):
    """[run]: the output folder, loggers, restarts.

    loggers: further loggers of metrics: "wandb", "mlflow", or `module:function`, called with values by name and the
    step.
    cluster: TOML file of the cluster the run is on; predicted step times are recorded with the measured ones.
    Without it, this machine is measured once for local ranks; ATOLL_MEASURE=0 in the environment turns that off.
    restarts: maximum number of restarts of local ranks after a failure; the count resets at each checkpoint.
    """

    folder: str = "runs/default"
    restarts: Natural = 3
    tensorboard: bool = True
    loggers: Annotated[tuple[Annotated[str, AfterValidator(_as_logger)], ...], BeforeValidator(_as_tuple)] = ()
    cluster: str | None = None


class Checkpoint(Section):
    """[checkpoint]: save every `every` steps (0: after the last step only) and keep the newest `keep`.

    keep_best: also keep this many checkpoints with the lowest validation loss, and save after each validation that is
    the best so far.
    background: write in the background while training continues, from a copy in host memory.
    """

    every: Natural = 100
    keep: Positive = 2
    keep_best: Natural = 0
    background: bool = True


class Config(Section):
    """A complete config. `load` reads one; `to_plan` returns the plan that the engine executes."""

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
        """Notes for the user: settings without effect, translated settings, better layouts."""
        layout = Layout(self.parallel.layout)
        better = layout.dominated_by
        if better is None:
            return self._notes
        return (
            *self._notes,
            f"parallel.layout = {layout.name!r} is dominated by {better.name!r}, which uses less memory and no more "
            "traffic",
        )

    @property
    def tokenizer(self) -> str:
        """The tokenizer: data.tokenizer; if that is "auto", the one in the model's folder, else bpe-4096."""
        if self.data.tokenizer != "auto":
            return self.data.tokenizer
        own = Path(self.model.source) / "tokenizer.json"
        return str(own) if not self.model.is_builtin and own.is_file() else "bpe-4096"

    def with_notes(self, notes: Sequence[str]) -> Config:
        """Return a copy of the config with additional `notes`."""
        noted = self.model_copy()
        noted._notes = (*self._notes, *notes)
        return noted

    def to_plan(self, world: int | None = None) -> Plan:
        """Return the plan for `world` ranks, by default `parallel.ranks`. Raises ConfigError if sizes do not fit."""
        from atoll.training.config.planning import plan_of

        return plan_of(self, world)

    def with_steps_of(self, samples: int | None) -> Config:
        """Return the config with the steps of train.epochs over `samples` samples; the same config without
        train.epochs.

        samples: number of samples in an epoch, or None if unknown. Raises ConfigError if it is needed and unknown, and
        if a run cannot have so many steps.
        """
        epochs, batch = self.train.epochs, self.train.global_batch
        if epochs is None:
            return self
        if samples is None:
            raise ConfigError(
                f"train.epochs = {epochs:g}: with data.streaming the samples of an epoch are not known before it is "
                "over; set train.steps instead"
            )
        steps = math.ceil(fractions.Fraction(repr(epochs)) * samples / batch)
        if steps >= 1 << 31:
            raise ConfigError(
                f"train.epochs = {epochs:g} of {samples} samples are {steps} steps; a run has less than {1 << 31}"
            )
        resolved = self.model_copy(update={"train": self.train.model_copy(update={"steps": steps, "epochs": None})})
        resolved._notes = (*self._notes, f"train.epochs = {epochs:g} of {samples} samples: train.steps = {steps}")
        return resolved

    def dump(self) -> str:
        """Return the effective config as TOML text with every key; `load` reads it back to an equal config.

        With train.epochs, train.steps is left out.
        """
        left_out: Any = {"train": {"steps"}} if self.train.epochs is not None else None
        return to_toml(self.model_dump(exclude=left_out))


def raise_all(problems: Sequence[str]) -> None:
    """Raise one ValueError with all `problems`, one per line, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))


def join_or(values: Sequence[object]) -> str:
    """Return `values` as text: "1, 2 or 4"."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _neighbours(value: int, multiple: int) -> str:
    """Return the nearest multiples of `multiple` below and above `value`."""
    below = value // multiple * multiple
    return join_or([size for size in (below, below + multiple) if size])
