"""The matrix of features: every schedule × layout × tensor parallelism × recompute × kind of model.

`whole()` returns every combination, `sample()` some of them, in which any two values of any two factors occur together
at least once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from atoll.plans.layouts import EFFECTIVE
from atoll.plans.plan import ORDERS
from atoll.plans.schedules import CATALOGUE
from atoll.testing.parity import Case
from atoll.testing.tiny import TinyConfig

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

COMPILED = 1 / 32
"""Share of the whole matrix with compiled blocks, which take half a minute each. The sample has none."""

COSTLY: frozenset[tuple[str, Any]] = frozenset({("tensor", 2)})
"""Values that take ten times as long as others: the sample uses them once with each schedule."""

Pair = tuple[str, Any, str, Any]

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


def sample() -> list[Choice]:
    """Return a row for each schedule and layout, whose other values give the most new pairs."""
    factors = {**FACTORS, **OTHERS}
    seen: set[Pair] = set()
    rows: list[Choice] = []
    layouts = FACTORS["layout"]
    for (at, schedule), (to, layout) in itertools.product(enumerate(FACTORS["schedule"]), enumerate(layouts)):
        row: Choice = {"schedule": schedule, "layout": layout}
        for name, values in list(factors.items())[2:]:
            costly = [value for value in values if (name, value) in COSTLY]
            if costly:  # on the diagonal each is with another schedule and another layout
                values = costly if to == at % len(layouts) else [value for value in values if value not in costly]
            row[name] = max(values, key=lambda value: _worth(seen, rows, row, name, value))
        seen.update(_pairs(row))
        rows.append(row)
    return rows


def case_of(choice: Choice) -> Case:
    """Return the case that `assert_parity` runs for a combination: two pipeline ranks with four microbatches each."""
    inter, intra = choice["data"]
    options = {name: choice[name] for name in ("schedule", "layout", "tensor", "recompute")}
    others = {name: choice[name] for name in (*OTHERS, "compile") if name in choice and name != "data"}
    model = MODELS[choice["model"]]
    return Case(pipeline=2, inter=inter, intra=intra, microbatches=8, steps=2, model=model, **options, **others)


def name_of(choice: Choice) -> str:
    """Return a readable name."""
    return "-".join(str(value).replace(" ", "_") for value in choice.values())


def missing_pairs(rows: Sequence[Choice]) -> set[Pair]:
    """Return pairs of values that occur together in no row."""
    factors = {**FACTORS, **OTHERS}
    every = {
        (one, a, other, b)
        for one, other in itertools.combinations(factors, 2)
        for a in factors[one]
        for b in factors[other]
    }
    return every - {pair for row in rows for pair in _pairs(row)}


def _pairs(row: Choice) -> Iterator[Pair]:
    for (one, a), (other, b) in itertools.combinations(row.items(), 2):
        yield one, a, other, b


def _worth(seen: set[Pair], rows: Sequence[Choice], row: Choice, name: str, value: Any) -> tuple[int, int]:
    """Return a sort key for values of a row: by new pairs, then by how rarely rows have them."""
    new = sum((other, given, name, value) not in seen for other, given in row.items())
    return new, -sum(each[name] == value for each in rows)
