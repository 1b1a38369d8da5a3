"""[train]: steps, batch, optimizer and objective."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from atoll.base.errors import PlanError
from atoll.base.faults import BadStepPolicy
from atoll.plans.layouts import Precision
from atoll.training.config.section import (
    NAMED,
    Fraction,
    Names,
    Natural,
    NotNegative,
    Pair,
    Positive,
    Section,
    raise_all,
)

RATES = ("cosine", "constant", "linear", "wsd")
"""Learning-rate schedules by name."""

WSD = re.compile(r"wsd ([0-9]{1,10})")
MASKED = re.compile(r"masked (0?\.[0-9]+)")
MASKS = 0.15
"""Share of tokens that "masked" predicts, as BERT."""

WEIGHT_DECAY = 0.1
"""Weight decay of AdamW, if not given. Other optimizers keep their own."""

ADAMW: Mapping[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
"""Other options of AdamW. Other optimizers keep their own."""


class AdamOptions(Section):
    """Options of AdamW, validated before torch is imported."""

    betas: Pair = ADAMW["betas"]
    eps: Annotated[float, Field(gt=0)] = ADAMW["eps"]


def _as_policy(value: str) -> str:
    try:
        return str(BadStepPolicy.parse(value))
    except PlanError as error:
        raise ValueError(str(error)) from error


def _as_optimizer(value: str) -> str:
    if NAMED.fullmatch(value) or value.isidentifier():
        return value
    raise ValueError('must be the name of an optimizer of torch.optim, or "module:factory"')


def _as_rates(value: str) -> str:
    if value in RATES or WSD.fullmatch(value) or NAMED.fullmatch(value):
        return value
    raise ValueError(f'must be {", ".join(map(repr, RATES))}, "wsd N" with N steps, or "module:function"')


def _as_objective(value: str) -> str:
    if value in ("causal", "masked") or (MASKED.fullmatch(value) and float(value.split()[1]) > 0):
        return value
    raise ValueError('must be "causal" or "masked", or the latter with a share of tokens, as in "masked 0.3"')


def _as_precision(value: object) -> object:
    if isinstance(value, str) and (why := Precision.reason_against(value)):
        raise ValueError(f"{value!r} is not to be had: {why}; use fp8-rowwise, or bf16")
    return value


class RouterSection(Section):
    """[train.router]: balance of a mixture's experts; see `atoll.runtime.pipeline.routing.Balance`."""

    bias_rate: NotNegative = 0.0
    """what a step adds to the selection biases of experts with fewer tokens than the mean, and takes from those of the
    others; DeepSeek-V3 has 0.001. 0: biases stay as they are. docs/experts.md#balance"""
    sequence_loss: NotNegative = 0.0
    """coefficient of each router's balance loss, a mean over sequences; DeepSeek-V3 has 0.0001. 0: none"""
    z_loss: NotNegative = 0.0
    """coefficient of each router's z-loss, a mean over tokens; ST-MoE has 0.001. 0: none"""


class Train(Section):
    """[train]: steps, batch, optimizer and objective."""

    steps: Positive = 300
    """number of optimizer steps, counted from the start of the run"""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """passes over the corpus, instead of train.steps: docs/data.md#epochs"""
    global_batch: Positive = 16
    """sequences per step, over all ranks"""
    microbatch: Positive = 4
    """sequences per microbatch, on one data-parallel rank"""
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64", "fp8-rowwise", "fp8-rowwise_with_gw_hp"], BeforeValidator(_as_precision)
    ] = "fp32"
    """bf16 and fp16 keep master weights, optimizer state, gradients and reductions in fp32; fp16 scales the loss and
    skips steps that overflow; "fp8-…" is bf16 with large linear layers in FP8, by torchao: docs/training.md#fp8"""
    seed: Natural = 0
    """seed of initial weights, dropout and sample order"""
    lr: NotNegative = 3e-3
    """peak learning rate"""
    min_lr_ratio: Fraction = 0.1
    """learning rate of the last step, as a share of `lr`; ignored by "constant" and by functions"""
    warmup: Natural = 20
    """steps over which the learning rate rises linearly from 0 to `lr`"""
    lr_schedule: Annotated[str, AfterValidator(_as_rates)] = "cosine"
    """schedule after the warm-up: "cosine", "constant", "linear", "wsd N" (constant, then a linear decay over the last
    N steps; a tenth of `steps` without N), or "module:function", which is called with the steps done and train.steps:
    docs/training.md#learning-rates"""
    optimizer: Annotated[str, AfterValidator(_as_optimizer)] = "AdamW"
    """name of an optimizer of torch.optim, or "module:factory", which is called like a class of torch; "Muon" is for
    hidden matrices, with AdamW for everything else: docs/training.md#optimizers"""
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    """further arguments of the optimizer, as `{ momentum = 0.9 }`. AdamW has betas of `[0.9, 0.95]` and eps of 1e-8 if
    not given, others their own defaults. `states` of a "module:factory" is for predictions, which do not call it: the
    number of tensors that it keeps of each parameter"""
    weight_decay: NotNegative | None = None
    """weight decay of matrices; vectors (norms, biases) are not decayed. If not given, the optimizer's own default
    applies to both"""
    clip: NotNegative = 1.0
    """maximum global gradient norm; 0: no clipping"""
    eval_every: Natural = 100
    """steps between validations; 0: at the start and the end only"""
    eval_batches: Positive = 8
    """maximum number of validation batches, each of `global_batch` sequences"""
    patience: Natural = 0
    """early stopping: end the run after so many consecutive validations without a lower loss; 0: off:
    docs/training.md#best-checkpoint"""
    prompt: str | None = None
    """a text that the model continues with 64 tokens at the end of the run; the masked objective generates none"""
    trainable: Names = ()
    """name patterns (`*`, `?`) of the only parameters to train, as in `*.mlp.*`"""
    frozen: Names = ()
    """name patterns (`*`, `?`) of parameters not to train, as in `embed.*`"""
    objective: Annotated[str, AfterValidator(_as_objective)] = "causal"
    """"causal" predicts the next token; "masked" predicts masked tokens, as BERT does: 0.15 of all, or another share as
    in "masked 0.3". Of these 80 % are masked, 10 % are replaced by a random token, 10 % are kept"""
    bad_steps: Annotated[str, AfterValidator(_as_policy)] = "stop"
    """action after a step whose loss or gradients are not finite: "stop", "skip", or "rollback N" to a checkpoint at
    least N steps older: docs/training.md#numbers-gone-bad"""
    check_replicas: Natural = 0
    """steps between bitwise comparisons of replicated state across ranks; 0: none"""

    router: RouterSection = Field(default_factory=RouterSection)

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        is_adamw = isinstance(data, dict) and data.get("optimizer", "AdamW") == "AdamW"
        return {**data, "weight_decay": WEIGHT_DECAY} if is_adamw and data.get("weight_decay") is None else data

    @model_validator(mode="after")
    def _check(self) -> Train:
        problems = []
        if self.epochs is not None and "steps" in self.model_fields_set:
            problems.append(
                f"train.steps = {self.steps} and train.epochs = {self.epochs:g} both set the length of the run; "
                "keep one"
            )
        if self.optimizer == "AdamW":
            own = {key: value for key, value in self.optimizer_options.items() if key in ADAMW}
            problems += AdamOptions.problems_of(own, "train.optimizer_options")
        if "states" in self.optimizer_options:
            states = self.optimizer_options["states"]
            if ":" not in self.optimizer:
                problems.append(
                    f"train.optimizer_options.states = {states!r} applies to a module:factory optimizer only; the "
                    f"states of torch's {self.optimizer} are counted"
                )
            elif type(states) is not int or states < 0:
                problems.append(f"train.optimizer_options.states = {states!r}: must be a whole number from 0")
        raise_all(problems)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the optimizer besides `lr` and `weight_decay`."""
        own = ADAMW if self.optimizer == "AdamW" else {}
        return {**own, **{key: value for key, value in self.optimizer_options.items() if key != "states"}}

    @property
    def decay(self) -> int:
        """Number of last steps over which "wsd" decays; 0 of other schedules."""
        if found := WSD.fullmatch(self.lr_schedule):
            return int(found[1])
        return -(-self.steps // 10) if self.lr_schedule == "wsd" else 0

    @property
    def is_masked(self) -> bool:
        """True if the objective is to predict masked tokens."""
        return self.objective != "causal"

    @property
    def mask_ratio(self) -> float:
        """Share of tokens that the masked objective predicts."""
        found = MASKED.fullmatch(self.objective)
        return MASKS if found is None else float(found[1])
