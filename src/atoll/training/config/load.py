"""Loading of a TOML file and `--set` overrides as a Config. All problems are reported in one ConfigError."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from atoll.base.documents import LARGEST_TOML, parse_toml, read_text
from atoll.base.errors import ConfigError
from atoll.training.config.deepspeed import translate
from atoll.training.config.foreign import answer
from atoll.training.config.schema import Config, tables

Keys = tuple[str, ...]

REMOVED: dict[Keys, tuple[Any, str]] = {
    ("model", "attention"): (None, "write attn_implementation in [model.config], as transformers has it"),
    ("model", "dropout"): (0.0, "write it in [model.config]"),
    ("model", "tie_embeddings"): (True, "write it in [model.config]"),
    ("model", "rope_theta"): (10000.0, "write it in [model.config]"),
    ("model", "norm_eps"): (1e-5, "write it in [model.config]"),
    ("data", "shard"): (64 << 20, "data.streaming encodes 64 MiB at a time"),
    ("data", "seed"): (None, "samples are drawn by train.seed"),
    ("data", "weights"): (None, "write data.source as a table of sources with their shares: { web = 0.6, code = 0.4 }"),
    ("train", "betas"): (None, "write it in train.optimizer_options"),
    ("train", "eps"): (None, "write it in train.optimizer_options"),
    ("train", "optimizer_states"): (None, "write `states` in train.optimizer_options"),
    ("train", "decay"): (None, 'write the steps in train.lr_schedule, as in "wsd 100"'),
    ("train", "mask_ratio"): (0.15, 'write the share in train.objective, as in "masked 0.3"'),
    ("train", "sample_tokens"): (64, "64 tokens are generated at the end if train.prompt is set, and none otherwise"),
    ("parallel", "resident"): (None, "residency `run` keeps the parameters of a rank's largest stage"),
    ("parallel", "codecs", "block"): (128, "128 elements share a scale; atoll.plans.layouts.Codec takes other blocks"),
    ("parallel", "outer", "block"): (128, "128 elements share a scale; atoll.plans.layouts.Codec takes other blocks"),
    ("parallel", "outer", "rounding"): ("nearest", "outer gradients are rounded by parallel.codecs.rounding"),
    ("parallel", "outer", "feedback"): (True, "outer gradients have the feedback of parallel.codecs.feedback"),
    ("parallel", "outer", "lr"): (None, 'write parallel.outer.optimizer = { name = "nesterov", lr = 0.8 }'),
    ("parallel", "outer", "momentum"): (None, 'write parallel.outer.optimizer = { name = "nesterov", momentum = 0.8 }'),
    ("parallel", "outer", "mix"): (None, "it is 0.5 with a delay and 0 without; atoll.plans.outer.Outer takes others"),
    ("run", "tensorboard"): (True, 'name "tensorboard" in run.loggers, or leave it out there'),
    ("run", "port"): (0, "local ranks meet at a free port; torchrun's --master-port chooses one"),
    ("run", "measure"): (True, "this machine is measured without run.cluster, unless ATOLL_MEASURE=0 is set"),
    ("checkpoint", "keep_hours"): (None, "checkpoint.keep and checkpoint.keep_best choose what is kept"),
}
"""Keys of older versions, with the value that every run has now, and what happens instead. That value is accepted: run
folders and checkpoints of older versions have all keys."""

RETIRED = {("run", "overwrite"): "only --overwrite on the command line deletes a run"}
"""Keys of older versions, in configs and checkpoints, and their replacements. They have no effect."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the TOML file `path`, apply `overrides` ("train.steps=5") in order and validate the result.

    An override's value is TOML, or a plain string where it is not TOML. An override of `parallel.layout` replaces the
    file's `zero_optimization` and the reverse. Raises ConfigError with all problems.
    """
    text = _read(Path(path))
    try:
        raw = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return from_dict(raw, overrides=overrides, source=str(path), text=text)


def from_dict(
    values: Mapping[str, Any], *, overrides: Sequence[str] = (), source: str = "config", text: str = ""
) -> Config:
    """Validate `values` (sections of keys, as in TOML) after `overrides`. `source` and `text` locate problems."""
    raw = _copy(values)
    if raw.get("parallel") == "auto":
        raw["parallel"] = {"auto": True}
    changed = _override(raw, overrides)
    retired = _drop_retired(raw)
    notes, problems = _resolve_layout(raw)
    problems += _drop_removed(raw)
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        problems = [*_describe(error, text=text, changed=changed), *problems]
    if problems:
        raise ConfigError(_together(problems, source))
    return config.with_notes([*notes, *retired])


def _together(problems: Sequence[str], source: str) -> str:
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    return "\n  ".join([f"{source}: {len(problems)} problems", *problems])


def _read(path: Path) -> str:
    try:
        return read_text(path, limit=LARGEST_TOML)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, sorted(item.name for item in _siblings(path)), n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise ConfigError(f"no config at {path}{hint}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the config {path}: {error}") from error


def _siblings(path: Path) -> list[Path]:
    return list(path.parent.glob("*.toml")) if path.parent.is_dir() else []


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _override(raw: dict[str, Any], overrides: Sequence[str]) -> frozenset[Keys]:
    """Write `overrides` into `raw`. Return the keys that they set."""
    changed = []
    for text in overrides:
        name, equals, value = text.partition("=")
        keys = tuple(part.strip() for part in name.split("."))
        if not equals or len(keys) < 2 or not all(keys):
            known_elsewhere = answer(keys[-1])
            here = "" if known_elsewhere is None else f"; {keys[-1]} is, here: {known_elsewhere}"
            raise ConfigError(f"--set {text}: write section.key=value, as in --set train.steps=5{here}")
        table = raw
        for depth, key in enumerate(keys[:-1]):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {text}: {'.'.join(keys[: depth + 1])} is a value, not a table")
        table[keys[-1]] = _value(value.strip())
        changed.append(keys)
    _drop_replaced(raw, changed)
    return frozenset(changed)


def _drop_replaced(raw: dict[str, Any], changed: Sequence[Keys]) -> None:
    """Remove the file's spelling of the layout if an override sets the other one."""
    heads = {keys[:2] for keys in changed}
    layout, words = ("parallel", "layout"), ("parallel", "zero_optimization")
    if layout in heads and words not in heads:
        raw["parallel"].pop("zero_optimization", None)
    if words in heads and layout not in heads:
        raw["parallel"].pop("layout", None)


def _value(text: str) -> Any:
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    value = parsed["value"]
    # No key takes a date: a folder called 2026-11-20 is a name.
    if len(parsed) > 1 or isinstance(value, (datetime.date, datetime.time)):
        return text
    return value


def _drop_retired(raw: dict[str, Any]) -> list[str]:
    """Remove the keys of RETIRED from `raw`. Return a note for each one that sets something."""
    notes = []
    for (section, key), instead in RETIRED.items():
        table = raw.get(section)
        if isinstance(table, dict) and table.pop(key, False):
            notes.append(f"{section}.{key} has no effect: {instead}")
    return notes


def _drop_removed(raw: dict[str, Any]) -> list[str]:
    """Remove the keys of REMOVED from `raw`. Return a problem for each that asks for something else than happens."""
    problems = []
    for keys, (now, instead) in REMOVED.items():
        table: Any = raw
        for key in keys[:-1]:
            table = table.get(key) if isinstance(table, dict) else None
        if not isinstance(table, dict) or keys[-1] not in table:
            continue
        value = table.pop(keys[-1])
        if value != now or type(value) is not type(now):
            problems.append(f"{'.'.join(keys)} = {value!r}: this key is gone; {instead}")
    return problems


def _resolve_layout(raw: dict[str, Any]) -> tuple[tuple[str, ...], list[str]]:
    """Replace `zero_optimization` in `raw` by its layout and group size. Return notes and problems."""
    parallel = raw.get("parallel")
    if not isinstance(parallel, dict) or "zero_optimization" not in parallel:
        return (), []
    found = translate(parallel.pop("zero_optimization"))
    problems = list(found.problems)
    if "layout" in parallel:
        problems.append(
            f"parallel.layout = {parallel['layout']!r} and parallel.zero_optimization both choose the layout; keep one"
        )
    elif found.layout is not None:
        parallel["layout"] = found.layout
    if found.intra is not None and parallel.setdefault("intra", found.intra) != found.intra:
        problems.append(
            f"parallel.intra = {parallel['intra']} disagrees with parallel.zero_optimization, whose group has "
            f"{found.intra} ranks; remove intra or make it {found.intra}"
        )
    if found.host and parallel.setdefault("host", dict(found.host)) != found.host:
        problems.append(
            "parallel.host and parallel.zero_optimization both choose what rests in host memory; remove the table, or "
            "offload_optimizer from the block"
        )
    if found.codecs and parallel.setdefault("codecs", dict(found.codecs)) != found.codecs:
        problems.append(
            "parallel.codecs and parallel.zero_optimization both choose codecs; remove the table, or the words with "
            "`quantized` and `zeropp`"
        )
    return found.notes, problems


def _describe(error: ValidationError, *, text: str, changed: frozenset[Keys]) -> list[str]:
    problems = []
    for detail in error.errors(include_url=False):
        keys = tuple(str(part) for part in detail["loc"])
        if detail["type"] == "value_error" and len(keys) < 2:
            # A section's own checks have messages that name the keys.
            problems.extend(str(detail["ctx"]["error"]).split("\n"))
            continue
        problems.append(f"{'.'.join(keys)}{_message(detail, keys)}{_place(keys, text=text, changed=changed)}")
    return problems


def _message(detail: ErrorDetails, keys: Keys) -> str:
    if detail["type"] == "extra_forbidden":
        known_elsewhere = answer(keys[-1])
        hint = _nearest(keys) if known_elsewhere is None else f"here: {known_elsewhere}"
        return f": unknown {'section' if len(keys) == 1 else 'key'}; {hint}"
    if detail["type"] == "model_type":
        return f" = {detail['input']!r}: must be a table, [{'.'.join(keys)}]"
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f" = {detail['input']!r}: {message}"


def _nearest(keys: Keys) -> str:
    """Return the likely intended key of an unknown one: a similar key of its section, or the same key of another."""
    known = known_keys()
    if len(keys) == 1:
        homes = [f"{section}.{keys[0]}" for section, names in known.items() if keys[0] in names]
        near = homes or [f"[{name}]" for name in difflib.get_close_matches(keys[0], known, n=1)]
        return f"did you mean {near[0]}?" if near else f"the sections are {', '.join(known)}"
    section, name = ".".join(keys[:-1]), keys[-1]
    homes = [f"{other}.{name}" for other, names in known.items() if name in names]
    near = homes or [f"{section}.{key}" for key in difflib.get_close_matches(name, known[section], n=1)]
    return f"did you mean {near[0]}?" if near else f"[{section}] has {', '.join(known[section])}"


def known_keys() -> dict[str, tuple[str, ...]]:
    """Return the keys of each section, in order."""
    known = {name: tuple(section.model_fields) for name, section in tables().items()}
    known["parallel"] = (*known["parallel"], "zero_optimization")
    return known


def _place(keys: Keys, *, text: str, changed: frozenset[Keys]) -> str:
    if any(keys[: len(other)] == other for other in changed):
        return " (from --set)"
    line = line_of(text, keys)
    return "" if line is None else f" (line {line})"


def line_of(text: str, keys: Keys) -> int | None:
    """Return the line of a TOML `text`, from 1, that sets `keys` or opens their table; None if no single line does."""
    table: Keys = ()
    opened = None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = _parts(header[1])
            if keys[: len(table)] == table and len(keys) == len(table):
                opened = number
        elif assignment := re.match(r"\s*([\w.\-\"' ]+?)\s*=", line):
            full = table + _parts(assignment[1])
            if keys[: len(full)] == full:
                return number
    return opened


def _parts(dotted: str) -> Keys:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
