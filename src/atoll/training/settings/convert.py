"""Conversion of another system's config to one of Atoll, with the settings that could not be converted.

    DeepSpeed     its JSON (0.19.2)
    Accelerate    its YAML (1.12), as written by `accelerate config`
    torchtitan    its TOML (0.2.2)

Each system is a table: the path of a setting -> a rule for its value. For settings in no table, `config/foreign.py`
gives the answer, or they are reported to have no counterpart.

A setting that a file leaves out has the default of its own system, never one of Atoll's: `System.defaults` has them,
and the same rules convert them. What no file of the system says, because a program passes it, stays at Atoll's default,
and is named (`OPEN`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from atoll.base.errors import ConfigError
from atoll.base.toml import value_to_toml
from atoll.training.config import Config
from atoll.training.config.foreign import answer
from atoll.training.settings import from_accelerate, from_deepspeed, from_torchtitan
from atoll.training.settings.rules import Conversion, Rule, System, needless

FILLED_IN = "is filled in by transformers; write its value"

OPEN = (
    *(
        "train.optimizer",
        "train.lr",
        "train.optimizer_options.betas",
        "train.optimizer_options.eps",
        "train.weight_decay",
        "train.clip",
    ),
    *("train.lr_schedule", "train.warmup", "train.steps", "train.global_batch", "train.microbatch"),
    *("data.source", "data.tokenizer", "data.sequence"),
)
"""Keys that decide what is trained: each is in a converted config, or named."""

SYSTEM_RULES: Mapping[str, System] = {
    "deepspeed": from_deepspeed.DEEPSPEED,
    "accelerate": from_accelerate.ACCELERATE,
    "torchtitan": from_torchtitan.TORCHTITAN,
}
"""By name. A document with marks of several is one of the last of them."""


def system_of(document: Mapping[str, Any]) -> str:
    """Return the system of a document. Raises ConfigError for an unknown one."""
    for name, system in [*SYSTEM_RULES.items()][::-1]:
        if document.keys() & set(system.marks.split()):
            return name
    known = ", ".join(SYSTEM_RULES)
    raise ConfigError(f"this is no config of {known}: it has {', '.join(sorted(document)[:8]) or 'nothing'}")


def convert(document: Mapping[str, Any], system: str | None = None) -> Conversion:
    """Convert another system's config to one of Atoll. system: of `SYSTEM_RULES`; detected from the document's keys by
    default.

    What the document leaves out has the system's own default; `Conversion.filled` has a sentence for each.

    Raises ConfigError for a document of an unknown system.
    """
    name = system_of(document) if system is None else system
    source = SYSTEM_RULES[name]
    into, rules = Conversion(name, source.version), source.rules
    given = {path: value for path, value in _settings(document, rules) if value is not None}
    absent = {path: value for path, value in source.defaults(given).items() if path not in given}
    every = {**given, **absent}
    for path in [*(path for path in rules if path in every), *(path for path in given if path not in rules)]:
        into.default_of = path if path in absent else None
        _convert(into, path, every[path], _rule(path, rules))
    into.default_of = None
    source.ends(into, given)
    for key in [key for key in OPEN if into.get(key, None) is None and key not in into.open]:
        into.open[key] = f"the file does not decide it; Atoll's default is {_default(key)}"
    return into


def _convert(into: Conversion, path: str, value: Any, rule: Rule | None) -> None:
    if value == "auto":
        if rule is not needless:
            into.leave(path, value, FILLED_IN)
    elif rule is None:
        into.leave(path, value, answer(path.rpartition(".")[2]) or "it has no counterpart")
    else:
        try:
            rule(into, path, value)
        except TypeError:  # a value of another type than the system's own
            into.leave(path, value, "not a value that the system takes")


def _default(key: str) -> str:
    """Return the default of a key, as TOML."""
    values = {**Config().model_dump()[key.split(".")[0]], **Config().train.options}
    value = values[key.split(".")[-1]]
    return "not set" if value is None else value_to_toml(value)


def _rule(path: str, rules: Mapping[str, Rule]) -> Rule | None:
    """Return the rule of a path, or of the nearest enclosing table."""
    while path:
        if path in rules:
            return rules[path]
        path = path.rpartition(".")[0]
    return None


def _settings(table: Mapping[str, Any], rules: Mapping[str, Rule], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield paths and values, down to the level at which a rule takes a whole table."""
    for name, value in table.items():
        path = f"{above}{name}"
        whole = path in rules and not any(other.startswith(f"{path}.") for other in rules)
        if isinstance(value, Mapping) and not whole:
            yield from _settings(value, rules, f"{path}.")
        else:
            yield path, value
