"""[model] and [lora]: the network, and its adapters."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field, model_validator

from atoll.base.errors import PlanError
from atoll.prediction.cost.mixture import MixtureConfig, Scoring
from atoll.training.config.planning import divisors
from atoll.training.config.section import Names, Natural, Positive, Probability, Section, join_or, raise_all


class DecoderOptions(Section):
    """[model.config] of the built-in decoder."""

    dropout: Probability = 0.0
    """dropout probability, on the attention weights and on both branches of a layer"""
    tie_embeddings: bool = True
    """share one weight between embedding and head"""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """base of the rotary position embedding"""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """epsilon of the RMSNorms"""
    experts: Annotated[int, Field(ge=0, le=1000)] = 0
    """experts of a layer, each a SwiGLU feed-forward, of which every token takes some; 0: a dense decoder"""
    experts_per_token: Positive = 2
    """experts that a token takes"""
    expert_ffn: Positive | None = None
    """inner width of an expert"""
    shared_experts: Annotated[int, Field(ge=0, le=1000)] = 0
    """experts that every token takes in addition"""
    dense_layers: Annotated[int, Field(ge=0, le=1000)] = 0
    """first layers that stay dense"""
    scoring: Scoring = "softmax"
    """score of an expert for a token: a softmax over the experts, or a sigmoid of each alone"""
    normalise_weights: bool = True
    """divide the weights of a token's experts by their sum"""
    route_scale: Annotated[float, Field(gt=0)] = 1.0
    """factor of the weights"""
    groups: Positive = 1
    """groups of experts, a divisor of `experts`"""
    groups_per_token: Positive = 1
    """groups, those with the best sums of two scores, among whose experts a token chooses"""
    selection_bias: bool = False
    """add a bias, zero at first, to the scores that choose the experts, but not to the weights"""

    @property
    def mixture(self) -> MixtureConfig | None:
        """The experts of a layer; None if the decoder is dense. Raises PlanError for sizes that do not fit together."""
        if not self.experts:
            return None
        return MixtureConfig(**{field.name: getattr(self, field.name) for field in fields(MixtureConfig)})

    def problems(self, layers: int) -> list[str]:
        """Return problems of these options together, in a decoder of so many layers."""
        try:
            mixture = self.mixture
        except PlanError as error:
            return [f"model.config.{line.strip()}" for line in str(error).splitlines()[1:]]
        if mixture is not None:
            problem = mixture.layer_problem(layers)
            return [] if problem is None else [f"model.config.{problem}"]
        useless = sorted(
            self.model_fields_set.intersection(field.name for field in fields(MixtureConfig)) - {"experts"}
        )
        given = ", ".join(f"model.config.{key}" for key in useless)
        return [f"{given}: of a mixture of experts; set model.config.experts too"] if useless else []


class Model(Section):
    """[model]: the network."""

    source: str = "builtin"
    """"builtin", the decoder of `atoll.runtime.models`; "transformers:llama" or another family, from scratch; or the
    folder of a Hugging Face model: docs/models.md"""
    config: dict[str, Any] = Field(default_factory=dict)
    """further options of the model. Of the builtin one `dropout` (0.0), `tie_embeddings` (true), `rope_theta`
    (10000.0), `norm_eps` (1e-5) and those of a mixture of experts: docs/models.md#mixture-of-experts; of others, values
    that override the `transformers` configuration, where `attn_implementation` chooses the attention"""
    weights: str | None = None
    """a folder of safetensors or a checkpoint to start from, or "initial" for random weights; by default the weights in
    the source's folder if it has any"""
    layers: Annotated[int, Field(ge=1, le=1000)] = 8
    """number of transformer layers; with embedding and head, at least as many blocks as stages"""
    hidden: Positive = 128
    """width of the hidden state; `hidden` / `heads` must be an even whole number"""
    heads: Positive = 4
    """attention heads"""
    kv_heads: Positive = 4
    """key and value heads (grouped-query attention), a divisor of `heads`"""
    ffn: Positive = 344
    """inner width of the SwiGLU feed-forward"""
    vocabulary: Positive | None = None
    """vocabulary size, at least the tokenizer's"""

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

    @property
    def options(self) -> DecoderOptions:
        """`config` of the built-in decoder, with defaults."""
        return DecoderOptions(**self.config)

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
        else:
            wrong = DecoderOptions.problems_of(self.config, "model.config")
            problems += wrong or self.options.problems(self.layers)
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


class Lora(Section):
    """[lora]: low-rank adapters of the `peft` package on a frozen model."""

    rank: Natural = 0
    """rank of low-rank adapters on a frozen model; 0: no adapters. Needs `peft`"""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """the adapters' output is multiplied by alpha / rank"""
    dropout: Probability = 0.0
    """dropout probability on the adapters' input"""
    targets: Names = ("all-linear",)
    """name suffixes of the layers that get adapters, or "all-linear\""""
    target_parameters: Names = ()
    """name suffixes of parameters that get adapters, such as the stacked weights of experts,
    "mlp.experts.gate_up_proj": peft's `target_parameters`, which take no dropout"""
    modules_to_save: Names = ()
    """name suffixes of modules that are trained whole and exported with the adapters"""

    @model_validator(mode="after")
    def _check(self) -> Lora:
        if self.target_parameters and not self.rank:
            raise ValueError(f"target_parameters = {list(self.target_parameters)} without adapters: set lora.rank")
        if self.modules_to_save and not self.rank:
            raise ValueError(
                f"modules_to_save = {list(self.modules_to_save)} without adapters: set lora.rank, or train these "
                "modules alone with train.trainable"
            )
        return self


def _neighbours(value: int, multiple: int) -> str:
    """Return the nearest multiples of `multiple` below and above `value`."""
    below = value // multiple * multiple
    return join_or([size for size in (below, below + multiple) if size])
