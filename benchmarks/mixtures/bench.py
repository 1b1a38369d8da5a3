"""The matrix of mixtures: experts divided over 2 and 4 ranks under every layout, against one process, in float64."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.islands.tables import measured_in
from benchmarks.matrix.cases import Matrix, problems_of, table
from tests.matrix import EXPERTS, MIXED, SAMPLED, Choice, is_refused, mixtures
from tests.mixtures import MIXTURES


def _names(choice: Choice) -> dict[str, str]:
    """Return the keys that the tables group by: each factor, and some pairs of factors."""
    return {name: str(choice[name]) for name in MIXED} | {
        "schedule, tp": f"{choice['schedule']}, tp {choice['tensor']}",
        "mixture, recompute": f"{choice['mixture']}; {choice['recompute']}",
        "experts": f"{choice['data'][0]}×{choice['data'][1]} ranks, expert {choice['expert']}",
    }


MATRIX = Matrix(
    Path(__file__).parent,
    mixtures,
    _names,
    tables=(("schedule, tp", "layout"), ("mixture, recompute", "experts")),
    each=101,
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run what has not been run yet of this source's matrix."""
    return MATRIX.run(arguments) | {"drawn": _drawn()}


def confirm(arguments: argparse.Namespace, result: Mapping[str, Any]) -> dict[str, Any]:
    """Run a twentieth of this source's matrix."""
    return MATRIX.confirm(arguments, result)


def report(result: Mapping[str, Any]) -> str:
    """The tables, and what they were made of."""
    page = _PAGE.format(
        tables="\n".join(table(counts) for counts in result["tables"]),
        problems=problems_of(result),
        mixtures="\n".join(f"- *{name}*: {_described(name)}" for name in MIXTURES),
        others=", ".join(f"{name} ({' / '.join(values)})" for name, values in result["drawn"].items()),
        minutes=result["seconds"] / 60,
        **{key: result[key] for key in ("cases", "right", "worst")},
    )
    return f"{page}\n{measured_in(result['environment'])}\n" if "environment" in result else page


def _drawn() -> dict[str, list[str]]:
    """The settings with random values, and these."""
    others = {name: values for name, values in SAMPLED.items() if name not in (*MIXED, "model", "data")}
    return {
        name: [str(value) for value in values if not is_refused({"model": EXPERTS}, name, value)]
        for name, values in others.items()
    }


def _described(name: str) -> str:
    mixture = MIXTURES[name]
    config = mixture.config
    parts = [f"{config.experts} experts, {config.experts_per_token} for a token, {config.scoring} scores"]
    parts += [f"the best {config.groups_per_token} of {config.groups} groups"] if config.groups > 1 else []
    parts += [f"{config.shared_experts} shared expert"] if config.shared_experts else []
    parts += [f"{config.dense_layers} dense layer first"] if config.dense_layers else []
    parts += ["embedding and head tied"] if mixture.tied else []
    parts += ["experts of one layer and the router of another frozen"] if mixture.frozen else []
    return ", ".join(parts)


_PAGE = """\
# The matrix of mixtures

Experts divided over 2 and 4 ranks of a group × every effective layout × 1F1B, ZB-V and breadth-first × tensor \
parallelism 1 and 2 × recompute none and block × kinds of mixture in the built-in decoder, in two pipeline ranks by \
two or four data-parallel ranks, each with random values of sequence_parallel (with tensor parallelism), {others}. Two \
steps with clipping in float64, compared with plain PyTorch in one process: loss, gradient norm and every parameter, \
max|a-b| ≤ 1e-10 · max(1e-2, max|b|).

{mixtures}

`python benchmarks/run.py mixtures` runs it. `make test` runs a sample in which any two settings meet \
(`tests/runtime/test_matrix.py`).

## Result

{right} of {cases} are right; the largest difference is {worst:.1e}. They took {minutes:.0f} minutes. Each cell \
has the number of right cases, in bold if not all are right. *2×2 ranks* are two groups of two.

{tables}{problems}"""
