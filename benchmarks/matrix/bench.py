"""The matrix of features: each combination of `tests.matrix` against one process, in float64."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.islands.tables import measured_in
from benchmarks.matrix.cases import Matrix, problems_of, table
from tests.matrix import FACTORS, MODELS, OTHERS, Choice, whole


def _names(choice: Choice) -> dict[str, str]:
    """Return the keys that the tables group by: each factor, and recompute with tensor parallelism."""
    split = f"{choice['recompute']}, tp {choice['tensor']}"
    return {name: str(choice[name]) for name in FACTORS} | {"recompute, tp": split}


MATRIX = Matrix(
    Path(__file__).parent, whole, _names, tables=(("schedule", "layout"), ("model", "recompute, tp")), each=601
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run what has not been run yet of this source's matrix."""
    return MATRIX.run(arguments)


def confirm(arguments: argparse.Namespace, result: Mapping[str, Any]) -> dict[str, Any]:
    """Run a twentieth of this source's matrix."""
    return MATRIX.confirm(arguments, result)


def report(result: Mapping[str, Any]) -> str:
    """The tables, and what they were made of."""
    page = _PAGE.format(
        tables="\n".join(table(counts) for counts in result["tables"]),
        problems=problems_of(result),
        gone=_gone(result),
        models=", ".join(MODELS),
        others=", ".join(f"{name} ({' / '.join(map(str, values))})" for name, values in OTHERS.items()),
        minutes=result["seconds"] / 60,
        **{key: result[key] for key in ("cases", "right", "worst")},
    )
    return f"{page}\n{measured_in(result['environment'])}\n" if "environment" in result else page


def _gone(result: Mapping[str, Any]) -> str:
    gone = [f"`{name}`" for name in result["tables"][0] if name not in FACTORS["schedule"]]
    return f" No longer in the catalogue: {', '.join(gone)}." if gone else ""


_PAGE = """\
# The matrix of features

Every schedule × every effective layout × tensor parallelism 1 and 2 × recompute none, block and selective × kinds of \
model ({models}), two pipeline ranks by two data-parallel ranks, each with random values of {others}. Two steps of \
AdamW with clipping in float64, compared with plain PyTorch in one process: loss, gradient norm and every parameter, \
max|a-b| ≤ 1e-10 · max(1e-2, max|b|).

`make matrix` runs it. `make test` runs a sample in which any two settings meet (`tests/runtime/test_matrix.py`).

## Result

{right} of {cases} are right; the largest difference is {worst:.1e}. They took {minutes:.0f} minutes. Each cell \
has the number of right cases, in bold if not all are right.{gone}

{tables}{problems}"""
