"""The matrix of features: every schedule × layout × tensor parallelism × recompute × kind of model.

`whole()` returns every combination, `mixtures()` those of mixtures of experts, `sample()` some, in which any two values
of any two factors occur together at least once, but for those that a plan refuses.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from atoll.plans.host import HostState
from atoll.plans.layouts import EFFECTIVE, NO_CODECS, Codec, Codecs
from atoll.plans.outer import Outer
from atoll.plans.plan import ORDERS
from atoll.plans.schedules import CATALOGUE
from atoll.testing.parity import Case
from atoll.testing.reference import Recipe
from atoll.testing.tiny import TinyConfig
from tests.mixtures import MIXTURES

LAYERS = 5
"""Number of layers; with embedding and head there are 7 blocks, which no pipeline size divides."""

MODELS: Mapping[str, TinyConfig] = MappingProxyType(
    {
        "uneven": TinyConfig(layers=LAYERS, dropout=0.2),
        "tied": TinyConfig(layers=LAYERS, tied=True, vocabulary=17, small=True),
        "frozen": TinyConfig(layers=LAYERS, frozen=True, unused=True),
        "one stage trained": TinyConfig(layers=LAYERS, trained=(1,)),
    }
)

FACTORS: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "schedule": tuple(CATALOGUE),
        "layout": tuple(layout.name for layout in EFFECTIVE),
        "tensor": (1, 2),
        "recompute": ("none", "block", "selective"),
        "model": tuple(MODELS),
    }
)
"""Factors of which all combinations are in the matrix."""

OTHERS: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "data": ((2, 1), (1, 2)),
        "residency": ("action", "run", "step"),
        "reduction": ("microbatch", "run", "step"),
        "unit": (1, 2),
        "reads_in_place": (True, False),
        "vocabulary_parallel": (False, True),
        "order": ORDERS,
    }
)
"""Factors that the sample also covers, drawn at random in the full matrix. data: groups, and ranks of a group."""

HOSTS = (
    HostState("update-on-device"),
    HostState("update-on-device", fraction=0.5, budget=0),
    HostState("update-on-host"),
    HostState("update-on-host", fraction=0.5),
    HostState(parameters="frozen"),
    HostState("update-on-device", parameters="frozen"),
    HostState(activations=1.0),
    HostState("update-on-host", activations=0.5),
    HostState("update-on-device", parameters="all", gradients=True),
    HostState("update-on-host", parameters="all"),
    HostState("update-on-host", gradients=True),
)
"""What is in host memory."""

EXPERTS = "mixture"
"""The kind of model with experts. It has a mixture with groups, a shared expert and a dense first layer."""

SAMPLED: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "schedule": FACTORS["schedule"],
        "layout": FACTORS["layout"],
        "model": (*MODELS, EXPERTS),
        "data": (*OTHERS["data"], (1, 2, 2), (2, 2, 2), (1, 4, 2), (1, 4, 4), (1, 2, 1, 2), (1, 4, 2, 2)),
        "expert_layout": (None, "NNG", "III", "GGG"),
        **{name: values for name, values in (FACTORS | OTHERS).items() if name not in ("data", "model")},
        "post_validation": (False, True),
        "codecs": (NO_CODECS, Codecs(Codec("int8", 8), Codec("int4", 8))),
        "outer": (None, Outer(2)),
        "optimizer": ("AdamW", "Muon"),
        "host": (None, *HOSTS),
        "slices": (1, 3),
        "loss_chunks": (1, 3),
    }
)
"""Factors of the sample, in the order in which values are chosen for a row. data: also the ranks of a group that divide
the experts, where they do, and those that divide sequences."""

SLICED = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
"""Schedules of slices of sequences."""

MIXED: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "mixture": tuple(MIXTURES),
        "schedule": ("1f1b", "zb-v", "breadth-first"),
        "layout": FACTORS["layout"],
        "tensor": (1, 2),
        "expert": (2, 4),
        "recompute": ("none", "block"),
    }
)
"""Factors of which all combinations are in the matrix of mixtures. expert: ranks of a group that divide the experts."""


@dataclass(frozen=True)
class Refusal:
    """Pairs of values that a plan refuses: those of `one` for which `values` is true, with those of `other`.

    words: of the error.
    """

    one: str
    values: Callable[[Any], bool]
    other: str
    others: Callable[[Any], bool]
    words: str


REFUSALS = (
    Refusal("data", lambda data: len(data) == 3, "model", lambda model: model != EXPERTS, "the model has none"),
    Refusal("data", lambda data: len(data) == 4, "model", lambda model: model != EXPERTS, "computes a part of each"),
    Refusal("slices", lambda slices: slices > 1, "model", lambda model: model != EXPERTS, "computes a part of each"),
    Refusal(
        *("slices", lambda slices: slices > 1),
        *("schedule", lambda name: name not in SLICED, "runs whole sequences, not slices"),
    ),
    Refusal(
        *("loss_chunks", lambda chunks: chunks > 1),
        *("vocabulary_parallel", lambda is_split: is_split, "leave one of them out"),
    ),
    Refusal("expert_layout", lambda layout: layout is not None, "model", lambda model: model != EXPERTS, "has none"),
    Refusal(
        *("host", lambda host: host is not None and host.optimizer),
        *("optimizer", lambda name: name == "Muon", "host memory with Muon"),
    ),
    Refusal(
        *("host", lambda host: host is not None and host.parameters == "frozen"),
        *(
            "model",
            lambda model: model not in ("frozen", "one stage trained"),
            "all parameters of the model are trained",
        ),
    ),
    Refusal("outer", lambda outer: outer is not None, "data", lambda data: data[0] == 1, "inter = 1 has one"),
)
"""What cannot be together, with the reason."""

COMPILED = 1 / 32
"""Share of the whole matrix with compiled blocks, which take half a minute each. The sample has none."""

COSTLY: Mapping[tuple[str, Any], int] = MappingProxyType(
    {
        ("tensor", 2): 0,
        ("data", (1, 2, 2)): 3,
        ("data", (2, 2, 2)): 6,
        ("data", (1, 4, 2)): 9,
        ("data", (1, 4, 4)): 12,
        ("data", (1, 2, 1, 2)): 2,
        ("data", (1, 4, 2, 2)): 5,
    }
)
"""Values that need more ranks, so take several times as long as others. They are used on a diagonal of schedules and
layouts that begins at this layout, and no two of them together: once with each schedule, but for large meshes."""

LARGE = ((2, 2, 2), (1, 4, 2), (1, 4, 4), (1, 4, 2, 2))
"""Meshes of eight ranks that divide experts, or experts and sequences. In the sample each schedule has one of them, in
turn, and a division of four ranks; `large_meshes` has all with all."""

FEW = 4
"""A large mesh meets every value of a factor with at most so many."""

Pair = frozenset[tuple[str, Any]]
"""Two factors with a value of each."""

Choice = dict[str, Any]


def whole() -> Iterator[Choice]:
    """Return every combination of `FACTORS`, with values of `OTHERS` drawn for each."""
    draw = random.Random(0)
    for values in itertools.product(*FACTORS.values()):
        row: Choice = dict(zip(FACTORS, values, strict=True))
        for name, choices in OTHERS.items():
            row[name] = draw.choice(choices)
        row["compile"] = "block-eager" if draw.random() < COMPILED else "none"
        yield row


def mixtures() -> Iterator[Choice]:
    """Return every combination of `MIXED`, with values of the other settings drawn for each."""
    draw = random.Random(0)
    for values in itertools.product(*MIXED.values()):
        row: Choice = dict(zip(MIXED, values, strict=True)) | {"model": EXPERTS}
        row["sequence_parallel"] = row["tensor"] > 1 and draw.choice((False, True))
        if row["sequence_parallel"]:
            row["codecs"] = NO_CODECS  # the reference of codecs does not add up parts of a sequence
        row["data"] = draw.choice([data for data in SAMPLED["data"] if data[2:] == (row["expert"],)])
        for name, choices in SAMPLED.items():
            if name not in row:
                row[name] = draw.choice([value for value in choices if not is_refused(row, name, value)])
        yield row


def sample() -> list[Choice]:
    """Return a row for each schedule and layout, whose other values give the most new pairs; then, as long as a pair is
    missing, a row with it."""
    rows: list[Choice] = []
    missing = missing_pairs(rows)
    layouts = SAMPLED["layout"]
    for (at, schedule), (to, layout) in itertools.product(enumerate(SAMPLED["schedule"]), enumerate(layouts)):
        turn = LARGE[at % len(LARGE)]
        costly = {
            name: value
            for (name, value), begin in COSTLY.items()
            if (to - at) % len(layouts) == begin and (value not in LARGE or value == turn)
        }
        _add({"schedule": schedule, "layout": layout, **costly}, rows, missing)
    while missing:
        _add(dict(min(missing, key=_text)), rows, missing)
    return rows


def large_meshes() -> list[Choice]:
    """Return a row for each large mesh and schedule, in which each mesh has every layout, too."""
    rows: list[Choice] = []
    missing, layouts = missing_pairs(rows), SAMPLED["layout"]
    for (at, schedule), mesh in itertools.product(enumerate(SAMPLED["schedule"]), LARGE):
        layout = layouts[(at + COSTLY["data", mesh]) % len(layouts)]
        _add({"schedule": schedule, "layout": layout, "data": mesh}, rows, missing)
    return rows


def _add(given: Choice, rows: list[Choice], missing: set[Pair]) -> None:
    """Add a row with given values, and others that go with these."""
    row = dict(given)
    # What has the most values beside schedules and layouts is chosen while most is open: a sixth fewer rows.
    for name in [name for name in dict.fromkeys(("model", "host", *SAMPLED)) if name not in given]:
        cheap = (value for value in SAMPLED[name] if (name, value) not in COSTLY)
        allowed = [value for value in cheap if not is_refused(row, name, value)]
        row[name] = max(allowed, key=lambda value: _worth(missing, rows, row, name, value))
    rows.append({name: row[name] for name in SAMPLED})
    missing -= set(_pairs(row))


def is_refused(row: Choice, name: str, value: Any) -> bool:
    """Return True if a plan refuses a value together with one of a row."""
    return any(refuses(other, given, name, value) is not None for other, given in row.items())


def refuses(one: str, a: Any, other: str, b: Any) -> Refusal | None:
    """Return why a plan refuses two values; None if it takes them."""
    for each in REFUSALS:
        if (one, other) == (each.other, each.one):
            one, a, other, b = other, b, one, a
        if (one, other) == (each.one, each.other) and each.values(a) and each.others(b):
            return each
    return None


def case_of(choice: Choice) -> Case:
    """Return the case that `assert_parity` runs for a combination: two pipeline ranks with four microbatches each."""
    inter, intra, expert, sequence = (*choice["data"], 1, 1)[:4]
    options = {name: value for name, value in choice.items() if name not in ("data", "model", "mixture", "expert")}
    model: Recipe = MIXTURES[choice.get("mixture", "groups")] if choice["model"] == EXPERTS else MODELS[choice["model"]]
    mesh = {"pipeline": 2, "inter": inter, "intra": intra, "expert": expert, "sequence": sequence}
    return Case(**mesh, microbatches=4 * inter * intra // sequence, steps=2, model=model, **options)


def name_of(choice: Choice) -> str:
    """Return a readable name."""
    return "-".join(str(value).replace(" ", "_") for value in choice.values())


def missing_pairs(rows: Sequence[Choice]) -> set[Pair]:
    """Return pairs of values that can be together and are in no row."""
    every = {
        frozenset({(one, a), (other, b)})
        for one, other in itertools.combinations(SAMPLED, 2)
        for a in SAMPLED[one]
        for b in SAMPLED[other]
        if _can_meet(one, a, other, b)
    }
    return every - {pair for row in rows for pair in _pairs(row)}


def _can_meet(one: str, a: Any, other: str, b: Any) -> bool:
    """Return True if each other factor has a value that goes with both. Costly values do not meet, and large meshes
    meet a few values of long factors."""
    given = {one: a, other: b}
    if given.get("data") in LARGE and any(len(SAMPLED[name]) > FEW for name in given if name != "data"):
        return False

    def fits(name: str, value: Any) -> bool:
        others = {key: own for key, own in given.items() if key != name}
        is_costly = (name, value) in COSTLY and any(pair in COSTLY for pair in others.items())
        return not is_costly and not is_refused(others, name, value)

    return fits(one, a) and all(
        any(fits(name, each) for each in SAMPLED[name]) for name in SAMPLED if name not in given
    )


def _pairs(row: Choice) -> Iterator[Pair]:
    return map(frozenset, itertools.combinations(row.items(), 2))


def _text(pair: Pair) -> str:
    """Return a sort key."""
    return str(sorted(map(str, pair)))


def _worth(missing: set[Pair], rows: Sequence[Choice], row: Choice, name: str, value: Any) -> tuple[int, int]:
    """Return a sort key for values of a row: by new pairs, then by how rarely rows have them."""
    new = sum(frozenset({given, (name, value)}) in missing for given in row.items())
    return new, -sum(each[name] == value for each in rows)
