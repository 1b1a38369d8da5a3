"""The optimizer that a config names: one of torch.optim, or what a factory of a module makes.

[Note: elementwise] A rank's optimizer has ranges of flattened parameters, so the update of an element must not depend
on other elements. That is tried, not looked up: a few steps of a small parameter and of its two halves have to agree.
What the optimizer then keeps of the parameter is what bytes are predicted by, and what a checkpoint must have to go on.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from atoll.base.errors import ConfigError, PlanError
from atoll.plans.layouts import Whole
from atoll.plans.plan import Plan
from atoll.training.config import Config, Train
from atoll.training.config.train import ADAMW, WEIGHT_DECAY
from atoll.training.named import load_named

if TYPE_CHECKING:
    import torch

    from atoll.runtime.sharding.optimizer import OptimizerFactory

OWN_KEYS = ("lr", "weight_decay")
"""Options that have keys of their own in [train]."""

FUSED = ("AdamW", "Adam")
"""Optimizers that have a fused kernel for GPUs."""

MUON = "Muon"
"""The optimizer of whole matrices: `atoll.Muon`, with AdamW for everything else."""

REASONS = {
    "Adafactor": "it keeps sums of the rows and columns of whole matrices",
    "LBFGS": "it searches along a line for all parameters at once, and calls the model to do so",
    "SparseAdam": "it takes sparse gradients, and the sums over ranks are dense",
}
"""Optimizers of torch that cannot step ranges of flattened parameters."""

ADVICE = "use an elementwise one such as AdamW, SGD, RMSprop or Adagrad, or Muon"
ELEMENTS, HALF, TRIALS = 8, 3, 3


@dataclass(frozen=True, slots=True)
class Named:
    """An optimizer and its options.

    keys: names of what it keeps of a parameter.  states: how many of them are tensors as large as the parameter.
    whole: the matrices that it transforms whole; `states` and `keys` are those of all other parameters.
    whole_keys: what it keeps of these.
    """

    factory: OptimizerFactory
    keys: frozenset[str]
    states: int
    whole: Whole | None = None
    whole_keys: frozenset[str] = frozenset()


def named_optimizer(train: Train) -> Named:
    """The optimizer of `train.optimizer` and its options.

    Raises ConfigError for an optimizer that does not exist or is not elementwise, and for options that it does not
    take.
    """
    if train.optimizer == MUON:
        return _muon(train)
    make = _make(train)
    options = _options(train, make)

    def factory(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from atoll.runtime.sharding.optimizer import fused_by_default

        kernel = fused_by_default(train.optimizer_options, groups) if train.optimizer in FUSED else {}
        made: torch.optim.Optimizer = make(groups, **kernel, **options)
        return made

    kept = _try(train, make, {**options, "lr": 0.01})
    sizes = [getattr(value, "shape", ()) for value in kept.values()]
    return Named(factory, frozenset(kept), sum(tuple(size) == (ELEMENTS,) for size in sizes))


def states_of(train: Train) -> int:
    """Tensors that the optimizer keeps of each parameter, without running code that the config names.

    Raises ConfigError where only that code knows.
    """
    if _is_plain(train):
        return 2
    if ":" not in train.optimizer:
        return named_optimizer(train).states
    if "states" not in train.optimizer_options:
        raise ConfigError(
            f"train.optimizer = {train.optimizer!r}: predictions do not run it, so they do not know its bytes; say how "
            "many tensors it keeps of each parameter, as in train.optimizer_options.states = 2"
        )
    states: int = train.optimizer_options["states"]
    return states


def whole_matrices_of(train: Train) -> Whole | None:
    """The matrices that the optimizer transforms whole. Raises ConfigError as `named_optimizer` does."""
    return named_optimizer(train).whole if train.optimizer == MUON else None


def planned(config: Config, world: int | None = None) -> Plan:
    """`config.to_plan`, with the states of its optimizer, see `states_of` and `whole_matrices_of`."""
    return replace(config.to_plan(world), states=states_of(config.train), whole=whole_matrices_of(config.train))


def checked(config: Config, world: int | None = None) -> Plan:
    """The same, with an optimizer of a module tried too, see `check_optimizer`."""
    return replace(config.to_plan(world), states=check_optimizer(config.train), whole=whole_matrices_of(config.train))


def check_optimizer(train: Train) -> int:
    """Try the optimizer, and count its states. Raises ConfigError as `named_optimizer` does."""
    if _is_plain(train):
        return 2
    found = named_optimizer(train).states
    if (said := train.optimizer_options.get("states", found)) != found:
        raise ConfigError(
            f"train.optimizer_options.states = {said}: {train.optimizer} keeps {found} tensors of each parameter"
        )
    return found


def _is_plain(train: Train) -> bool:
    """Return True for AdamW without options that change what it keeps; the schema checks the others."""
    return train.optimizer == "AdamW" and train.optimizer_options.keys() <= ADAMW.keys()


def _muon(train: Train) -> Named:
    """Muon with AdamW for everything else, whose options are in `adamw`."""
    from atoll.runtime.sharding.muon import Muon

    problems = []
    betas = train.optimizer_options.get("betas")
    if betas is not None:
        problems.append(
            f"train.optimizer_options.betas = {_shown(betas)}: Muon does not take them; those of AdamW, which steps "
            "everything but matrices, are train.optimizer_options.adamw.betas"
        )
    adamw = {"lr": train.lr, **ADAMW, "weight_decay": WEIGHT_DECAY}
    given = train.optimizer_options.get("adamw", {})
    if isinstance(given, dict):
        adamw |= {name: _plain(value) for name, value in given.items()}
    else:
        problems.append(f"train.optimizer_options.adamw = {given!r}; give a table of AdamW's options")
    others = {key: value for key, value in train.optimizer_options.items() if key not in ("adamw", "betas")}
    try:
        options = _options(train.model_copy(update={"optimizer_options": others}), Muon)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n  ".join(problems))
    try:
        made = Muon(**options, adamw=adamw)
    except (PlanError, TypeError, ValueError) as error:
        raise ConfigError(f"train.optimizer = 'Muon': {error}") from error
    kept = frozenset({"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if adamw.get("amsgrad") else set()))
    return Named(made, kept, len(kept) - 1, made.whole, frozenset({"momentum_buffer"}))


def _make(train: Train) -> Callable[..., Any]:
    """Return the factory of the optimizer."""
    name = train.optimizer
    if ":" in name:
        return load_named("train.optimizer", name)
    import torch

    known = {
        each: kind
        for each, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if name in REASONS:
        raise ConfigError(f"train.optimizer = {name!r}: {REASONS[name]}, and a rank has ranges of them; {ADVICE}")
    if name not in known:
        possible = {each.lower(): each for each in known if each not in REASONS}
        near = difflib.get_close_matches(name.lower(), possible, n=1)
        hint = f"did you mean {possible[near[0]]!r}? " if near else ""
        raise ConfigError(
            f"train.optimizer = {name!r}: torch.optim has none of that name; {hint}There are "
            f'{", ".join(sorted(possible.values()))}; or name your own as "module:factory"'
        )
    return known[name]


def _options(train: Train, make: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of the optimizer besides its parameters."""
    taken = inspect.signature(make).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    first = next(iter(taken), None)
    known = [name for name in taken if name not in (first, *OWN_KEYS)]
    problems = []
    for name in train.options:
        if name in OWN_KEYS:
            problems.append(f"train.optimizer_options: {name} has a key of its own, train.{name}")
        elif not takes_all and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            problems.append(
                f"train.optimizer_options: {train.optimizer} has no option {name!r}; {hint}It takes {', '.join(known)}"
            )
    decay = {} if train.weight_decay is None else {"weight_decay": train.weight_decay}
    if decay and not takes_all and "weight_decay" not in taken:
        problems.append(f"train.weight_decay = {train.weight_decay}: {train.optimizer} does not take it; leave it out")
    if problems:
        raise ConfigError("\n  ".join(problems))
    return {"lr": train.lr, **decay, **{name: _plain(value) for name, value in train.options.items()}}


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _plain(value: Any) -> Any:
    """TOML has lists where torch has tuples."""
    return tuple(value) if isinstance(value, list) else value


def _try(train: Train, make: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Step a small parameter and its two halves; what the optimizer keeps of the whole one.

    Raises ConfigError where they differ, and where the optimizer refuses its options. See [Note: elementwise].
    """
    import torch

    name = f"train.optimizer = {train.optimizer!r}"
    # Graphs of CUDA are captured on CUDA alone, and this is on the CPU.
    tried = {key: value for key, value in options.items() if key != "capturable"}
    source = torch.Generator().manual_seed(0)
    begin = torch.randn(ELEMENTS, dtype=torch.float64, generator=source)
    gradients = [torch.randn(ELEMENTS, dtype=torch.float64, generator=source) for _ in range(TRIALS)]

    def stepped(held: slice) -> tuple[torch.Tensor, dict[str, Any]]:
        parameter = torch.nn.Parameter(begin[held].clone())
        optimizer = make([{"params": [parameter]}], **tried)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"it made a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        for gradient in gradients:
            parameter.grad = gradient[held].clone()
            optimizer.step()
        return parameter.detach(), dict(optimizer.state[parameter])

    try:
        whole, kept = stepped(slice(None))
        halves = torch.cat([stepped(held)[0] for held in (slice(HALF), slice(HALF, None))])
    except Exception as error:
        words = ", ".join(f"{key} = {_shown(value)}" for key, value in options.items() if key != "lr")
        raise ConfigError(
            f"{name} with {words or 'no options'}: a step of a one-dimensional parameter raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if not torch.allclose(whole, halves, rtol=1e-9, atol=1e-9):
        raise ConfigError(
            f"{name}: its update of one element depends on the others, and a rank has ranges of flattened parameters; "
            f"{ADVICE}"
        )
    return kept
