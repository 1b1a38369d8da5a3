"""A config that is being converted, and the rules for the values of another system's settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.base.toml import value_to_toml
from atoll.plans.host import TRAINED_TOO
from atoll.training.config.deepspeed import ON_HOST
from atoll.training.config.foreign import WORDS


@dataclass
class Conversion:
    """A config under construction. system, version: what is converted.  tables: of TOML.

    left: sentences about settings without a counterpart.
    filled: sentences about keys that have a default of the system, by key.  open: the same of keys that have Atoll's
    default, because the file does not say them.
    counts: of machines, replicas and so on, which determine other values.
    """

    system: str
    version: str
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    filled: dict[str, str] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    default_of: str | None = None
    """The path whose default is being converted; None while it is a value of the file."""

    def put(self, key: str, value: Any) -> None:
        """Set a key such as `train.lr`."""
        *tables, name = key.split(".")
        table: dict[str, Any] = self.tables
        for each in tables:
            table = table.setdefault(each, {})
        table[name] = value
        self.filled.pop(key, None)
        if self.default_of is not None:
            self.filled[key] = f"{key} = {value_to_toml(value)}: {self.default_of} is absent"

    def get(self, key: str, default: Any) -> Any:
        """Return the value of a key."""
        found: Any = self.tables
        for each in key.split("."):
            if each not in found:
                return default
            found = found[each]
        return found

    def leave(self, path: str, value: Any, why: str) -> None:
        """Note a setting that is not carried over."""
        absent = "" if self.default_of is None else f" (absent, and {self.version} has it)"
        self.left.append(f"{path} = {value!r}{absent}: {why}")


Rule = Callable[[Conversion, str, Any], None]
"""Converts a value; it also gets the value's path."""


def to(key: str, **values: Any) -> Rule:
    """Return a rule that sets a key to the value, or to its translation in `values`."""

    def rule(into: Conversion, path: str, value: Any) -> None:
        if not values:
            into.put(key, value)
        elif str(value).lower() in values:
            into.put(key, values[str(value).lower()])
        else:
            into.leave(path, value, f"{key} takes {', '.join(map(repr, dict.fromkeys(values.values())))}")

    return rule


def to_or(nearest: Any, key: str, **values: Any) -> Rule:
    """Return a rule like `to`, which sets the key to `nearest` where a value has no translation."""
    translate_or_leave = to(key, **values)

    def rule(into: Conversion, path: str, value: Any) -> None:
        into.put(key, nearest)
        translate_or_leave(into, path, value)

    return rule


def counts(what: str) -> Rule:
    """Return a rule for a number of machines, replicas and so on."""

    def rule(into: Conversion, path: str, value: Any) -> None:
        if type(value) is int and value > 0:
            into.counts[what] = value
        else:
            into.leave(path, value, f"no number of {what}")

    return rule


def needless(into: Conversion, path: str, value: Any) -> None:
    """Ignore a setting that does not affect training."""


def says(why: str) -> Rule:
    """Return a rule for a setting that is not converted."""
    return lambda into, path, value: into.leave(path, value, why)


def if_set(why: str) -> Rule:
    """Return a rule for a setting that is not converted if it is on."""

    def rule(into: Conversion, path: str, value: Any) -> None:
        if value is True or (value and value not in ("none", "None", "no", 1)):
            into.leave(path, value, why)

    return rule


def unless(usual: Any, why: str) -> Rule:
    """Return a rule for a setting that is not converted if it differs from Atoll's behaviour."""
    return lambda into, path, value: None if value == usual else into.leave(path, value, why)


def positive(rule: Rule) -> Rule:
    """Return a rule for systems that write -1 for a value that they choose themselves."""
    return lambda into, path, value: rule(into, path, value) if type(value) is int and value > 0 else None


def enabled(key: str, value_here: Any) -> Rule:
    """Return a rule that sets a key if the setting is on."""
    return lambda into, path, value: into.put(key, value_here) if value is True else None


def logs(name: str) -> Rule:
    """Return a rule for a logger that is on or off."""

    def rule(into: Conversion, path: str, value: Any) -> None:
        others = [each for each in into.get("run.loggers", []) if each != name]
        into.put("run.loggers", [*others, name] if value is True else others)

    return rule


def over_replicas(into: Conversion, ranks: int) -> None:
    """Give sharded parameters of several replicas their groups: the ranks of one replica."""
    replicas = into.counts.get("replicas", 1)
    layout = into.get("parallel.layout", "NNN")
    if replicas == 1 or layout == "NNN" or into.get("parallel.intra", 1) > 1:
        return
    into.put("parallel.layout", layout.replace("G", "I"))
    others = into.get("parallel.pipeline", 1) * into.get("parallel.tensor", 1) * replicas
    if ranks and ranks % others == 0:
        into.put("parallel.intra", ranks // others)
    elif into.get("parallel.intra", None) is None:
        into.open["parallel.intra"] = (
            f"parameters are sharded in {replicas} groups: the data-parallel ranks / {replicas}"
        )


def over_experts(into: Conversion, path: str, cut: str | None = None) -> None:
    """Divide the experts of a mixture among the ranks of a group. It comes after what decides the groups.

    path: the setting for `into.counts["expert ranks"]`, ranks that divide the experts, tensor-parallel ones included.
    cut: the one for `into.counts["expert slices"]`, ranks over which each of these experts is cut. Here the ranks of
    both have whole experts, as many as there: expert x tensor = expert ranks x slices.

    Where the file has no groups, they are the smallest ones, which any number of ranks has.
    """
    ranks, slices = into.counts.get("expert ranks", 1), into.counts.get("expert slices", 1)
    if slices > 1 and cut is not None:
        into.leave(cut, slices, WORDS["expert_tensor_parallel_size"])
    if ranks == 1:
        return
    tensor = into.get("parallel.tensor", 1)
    expert, rest = divmod(ranks * slices, tensor)
    group = _group(into) or expert
    if rest:
        into.leave(path, ranks, f"parallel.tensor = {tensor} divides the experts too; use a multiple of {tensor}")
    elif "parallel.intra" in into.open:
        into.leave(path, ranks, f"parallel.expert = {expert}, once parallel.intra is set, to a multiple of it")
    elif group % expert:
        into.leave(
            path,
            ranks,
            f"parallel.expert would be {expert} with parallel.tensor = {tensor}, and does not divide the {group} ranks "
            f"of a group; use a divisor of {group}, or a parallel.intra that is a multiple of {expert}",
        )
    else:
        into.put("parallel.expert", expert)
        _divide_among(into, expert)


def over_sequences(into: Conversion, path: str, way: str | None = None) -> None:
    """Divide sequences among the ranks of a group. It comes after what decides the groups.

    path: the setting for `into.counts["sequence ranks"]`.
    way: how these ranks compute attention in the other system, where it is another way than here. The result is the
    same, so the size is carried over, and a sentence says what differs.

    Where the file has no groups, they are the smallest ones, as in `over_experts`.
    """
    ranks = into.counts.get("sequence ranks", 1)
    if ranks == 1:
        return
    tensor, heads = into.get("parallel.tensor", 1), into.get("model.heads", 0)
    group = _group(into) or ranks
    if "parallel.intra" in into.open:
        into.leave(path, ranks, f"parallel.sequence = {ranks}, once parallel.intra is set, to a multiple of it")
    elif group % ranks:
        into.leave(
            path,
            ranks,
            f"parallel.sequence = {ranks} does not divide the {group} ranks of a group; use a divisor of {group}, or a "
            f"parallel.intra that is a multiple of {ranks}",
        )
    elif heads % (ranks * tensor):
        into.leave(
            path,
            ranks,
            f"parallel.sequence = {ranks} with parallel.tensor = {tensor} does not divide the {heads} heads of "
            f"attention, of which each rank computes some; use a divisor of {heads // math.gcd(heads, tensor)}",
        )
    else:
        into.put("parallel.sequence", ranks)
        _divide_among(into, ranks)
        if way is not None:
            into.leave(path, ranks, f"the size is carried over, and the way is another: {way}; {WORDS['cp_comm_type']}")


def sample_ranks(into: Conversion) -> str:
    """Return what has samples of its own: a data-parallel rank, or those that divide their sequences."""
    ranks = into.counts.get("sequence ranks", 1)
    return f"groups of {ranks} data-parallel ranks that divide sequences" if ranks > 1 else "data-parallel ranks"


def _group(into: Conversion) -> int:
    """Return the ranks of a group as a file decides them, 0 if it does not."""
    decided = 0 if "least group" in into.counts else into.get("parallel.intra", 0)
    return decided or into.counts.get("shard", 0) or _data_ranks(into)


def _divide_among(into: Conversion, ranks: int) -> None:
    """Make the groups of a file that has none large enough for `ranks` ranks of a group that divide something."""
    least = into.counts.get("least group", 1)
    if ranks > 1 and into.get("parallel.intra", None) in (None, least):
        into.counts["least group"] = math.lcm(least, ranks)
        into.put("parallel.intra", into.counts["least group"])


def _data_ranks(into: Conversion) -> int:
    """Return the number of data-parallel ranks, 0 if it is unknown."""
    return into.get("parallel.ranks", 0) // (into.get("parallel.pipeline", 1) * into.get("parallel.tensor", 1))


def state_to_host(*, everything: bool = False) -> Rule:
    """Return a rule for state that rests in host memory and is stepped there. everything: parameters and gradients rest
    there too."""

    def rule(into: Conversion, path: str, value: Any) -> None:
        if value in (None, False, "none"):
            return
        if value not in (True, "cpu"):
            into.leave(path, value, "state rests in host memory at most")
            return
        into.put("parallel.host.optimizer", ON_HOST)
        if everything:
            into.put("parallel.host.parameters", TRAINED_TOO)
            into.put("parallel.host.gradients", True)

    return rule


Given = Mapping[str, Any]
"""Settings of a file, by path."""


@dataclass(frozen=True, slots=True)
class System:
    """A system whose configs are converted.

    version: whose settings and defaults these are.  marks: top-level keys by which a document is recognized, as words.
    rules: by path; a value that depends on another one comes after it.
    defaults: the settings in a file -> the defaults of relevant settings that it leaves out.
    ends: converts what follows from several settings.
    """

    version: str
    marks: str
    rules: Mapping[str, Rule]
    defaults: Callable[[Given], dict[str, Any]]
    ends: Callable[[Conversion, Given], None]
