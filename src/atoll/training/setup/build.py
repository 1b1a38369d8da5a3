"""Construction of model, optimizer and learning rates from a config."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from atoll.base.documents import LARGEST_JSON, read_text
from atoll.base.errors import ConfigError, PlanError, UserError
from atoll.plans.plan import Plan
from atoll.runtime.assemble.ties import untie_as_stored
from atoll.runtime.engine import Engine
from atoll.runtime.federation.http import own_secret
from atoll.runtime.federation.seat import IslandAddress, IslandSeat
from atoll.runtime.models import Decoder, DecoderConfig, check_documents
from atoll.runtime.pipeline.routing import Balance
from atoll.runtime.sharding.optimizer import decay_matrices, spare_vectors
from atoll.training.config import Config, Model, Train
from atoll.training.models.pretrained import check_exported, first_weights, hugging_face_model
from atoll.training.setup.optimizers import named_optimizer
from atoll.training.setup.prediction import predict_plan
from atoll.training.setup.rates import learning_rates


def build_model(config: Config, vocabulary: int) -> nn.Module:
    """Return the configured model on `meta`, with parameters that are not trained marked."""
    model = config.model
    with torch.device("meta"):
        built = _decoder(model, vocabulary) if model.is_builtin else hugging_face_model(config, vocabulary)
    choose_trained(built, config.train.trainable, config.train.frozen)
    if config.lora.rank:
        check_exported(built)
    if config.data.how == "documents":
        try:
            check_documents(built, config.train.microbatch)
        except PlanError as error:
            raise ConfigError(f'data.packing = "documents": {error}; use data.packing = "pad"') from error
    return built


def build_as_stored(config: Config, vocabulary: int) -> tuple[nn.Module, list[str]]:
    """Return the configured model on `meta` as an engine trains it: parameters of which the initial weights have
    different values are not tied, whatever the model's config says. With a sentence for each of them."""
    model = build_model(config, vocabulary)
    weights = first_weights(config)
    return model, [] if weights is None else untie_as_stored(model, weights)


def _decoder(model: Model, vocabulary: int) -> Decoder:
    options = model.options
    return Decoder(
        DecoderConfig(
            vocabulary=vocabulary,
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=model.kv_heads,
            ffn=model.ffn,
            dropout=options.dropout,
            tie_embeddings=options.tie_embeddings,
            rope_theta=options.rope_theta,
            norm_eps=options.norm_eps,
            mixture=options.mixture,
        )
    )


def choose_trained(model: nn.Module, trainable: Sequence[str], frozen: Sequence[str]) -> None:
    """Train the parameters whose names match `trainable` (all that are trained now, if empty) and not `frozen`.

    Patterns are fnmatch's; a shared parameter is matched by any of its names. Raises ConfigError for a pattern without
    a match, and if no parameter is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    problems = []
    chosen: dict[str, set[str]] = {"trainable": set(), "frozen": set()}
    for key, patterns in (("trainable", trainable), ("frozen", frozen)):
        for pattern in patterns:
            found = [name for name in named if fnmatchcase(name, pattern)]
            chosen[key].update(found)
            if not found:
                near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.3) or list(named)[:3]
                problems.append(f"train.{key}: {pattern!r} matches no parameter; there are {', '.join(near)}, ...")
    if trainable:
        kept = {id(named[name]) for name in chosen["trainable"]}
        for parameter in named.values():
            parameter.requires_grad_(id(parameter) in kept)
    for name in chosen["frozen"]:
        named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        given = {"trainable": list(trainable), "frozen": list(frozen)}
        said = ", ".join(f"train.{key} = {patterns}" for key, patterns in given.items() if patterns)
        problems.append(f"{said}: every parameter is frozen, so there is nothing to train")
    if problems:
        raise ConfigError("\n  ".join(problems))


def seat_of(config: Config, *, run: str) -> IslandSeat | None:
    """Return the island's part in its federation, if it has one. run: what all islands have in common besides their
    model. Raises ConfigError for a secret that cannot be read."""
    own, outer, train = config.federation, config.parallel.outer, config.train
    if own is None or outer is None:
        return None
    try:
        secret = own_secret(read_text(own.secret, limit=LARGEST_JSON))
    except (OSError, ValueError) as error:
        raise ConfigError(f"federation.secret = {own.secret!r}: {error}") from error
    return IslandSeat(
        own.island,
        {name: IslandAddress.parse(address) for name, address in own.islands.items()},
        secret,
        Path(config.run.folder) / "federation",
        founders=own.founders,
        listen=None if own.listen is None else IslandAddress.parse(own.listen),
        run=run,
        # What it reads until the round after the next one.
        stock=train.global_batch * (2 * outer.every + outer.delay + 2),
        silent=own.silent,
        away=own.away,
        pace=own.pace,
    )


def build_engine(
    model: nn.Module,
    plan: Plan,
    config: Config,
    device: torch.device,
    *,
    vocabulary: int | None = None,
    seat: IslandSeat | None = None,
) -> Engine:
    """Return the engine, with an optimizer that applies weight decay to matrices only. vocabulary: the model's, to
    predict its activations in host memory.  seat: the island's part in a federation."""
    train, away = config.train, list[int]()
    if plan.offloads:
        with suppress(UserError):  # of unknown costs: the engine finds them in the first step
            found = predict_plan(config, plan, None, vocabulary=vocabulary, device=device.type)
            away += map(found.away, range(plan.mesh.pipeline))
    optimizer = named_optimizer(train)
    groups = None if train.weight_decay is None else decay_matrices(train.weight_decay)
    return Engine(
        model,
        plan,
        optimizer=optimizer.factory,
        groups=spare_vectors if optimizer.whole is not None else groups,
        clip=train.clip or None,
        seed=train.seed,
        device=device,
        weights=first_weights(config),
        bad_steps=train.bad_steps,
        balance=Balance(**train.router.model_dump()),
        away=away,
        seat=seat,
    )


class RateSchedule:
    """Learning rates of an optimizer, through torch's LambdaLR.

    After a resume the config's values apply: a checkpoint only restores the number of steps, not rates, betas or
    decays.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, train: Train) -> None:
        self._optimizer = optimizer
        self._factor = learning_rates(train)
        self._inner = LambdaLR(optimizer, self._factor)
        self._options = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """Advance by one step."""
        self._inner.step()

    def go_to(self, step: int) -> None:
        """Advance to the rates after `step`, if that is later."""
        while self._inner.last_epoch < step:
            self.advance()

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON."""
        return {key: value for key, value in self._inner.state_dict().items() if key != "lr_lambdas"}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with this config's options."""
        bases = self._inner.base_lrs
        self._inner.load_state_dict({**state, "base_lrs": bases, "lr_lambdas": [None] * len(bases)})
        rates = [base * self._factor(self._inner.last_epoch) for base in bases]
        for group, options, rate in zip(self._optimizer.param_groups, self._options, rates, strict=True):
            group.update(options)
            group["lr"] = rate
