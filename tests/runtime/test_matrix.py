"""A sample of everything with everything: any two settings meet. `make matrix` runs all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.base.errors import ConfigError, PlanError
from atoll.plans.schedules import CATALOGUE
from atoll.runtime.assemble.describe import describe_rank
from atoll.runtime.sharding.matrices import MatrixUpdate
from atoll.testing.parity import assert_parity
from tests.matrix import (
    MIXED,
    REFUSALS,
    SAMPLED,
    Choice,
    Refusal,
    case_of,
    is_refused,
    large_meshes,
    missing_pairs,
    mixtures,
    name_of,
    sample,
    whole,
)

SAMPLE = sample()
LARGER = large_meshes()


@pytest.mark.pairs
@pytest.mark.parametrize("choice", SAMPLE, ids=[name_of(choice) for choice in SAMPLE])
def test_a_sample(choice: Choice) -> None:
    case = case_of(choice)
    # Three layers make five blocks, which no pipeline size divides either.
    assert_parity(replace(case, model=replace(case.model, layers=3)))


@pytest.mark.wide(0)
@pytest.mark.parametrize("choice", LARGER, ids=[name_of(choice) for choice in LARGER])
def test_a_large_mesh(choice: Choice) -> None:
    """With each schedule and layout; the sample has each schedule on one of them."""
    test_a_sample(choice)


def test_any_two_values_meet() -> None:
    assert not missing_pairs(SAMPLE)


def test_the_whole_is_every_combination_once() -> None:
    found = [tuple(choice.values())[:5] for choice in whole()]
    assert len(found) == len(set(found)) == len(CATALOGUE) * 14 * 2 * 3 * 4


def test_the_matrix_of_mixtures_is_every_combination_once() -> None:
    rows = list(mixtures())
    found = {tuple(row[name] for name in MIXED) for row in rows}
    assert len(rows) == len(found) == 3 * 3 * 14 * 2 * 2 * 2
    assert not any(is_refused(row, name, value) for row in rows for name, value in row.items())


@pytest.mark.parametrize("refusal", REFUSALS, ids=[f"{each.one}-{each.other}" for each in REFUSALS])
def test_what_the_sample_leaves_out_is_refused(refusal: Refusal) -> None:
    plain = {name: values[0] for name, values in SAMPLED.items()}
    pairs = [(a, b) for a in SAMPLED[refusal.one] for b in SAMPLED[refusal.other]]
    refused = [(a, b) for a, b in pairs if refusal.values(a) and refusal.others(b)]
    assert refused
    for a, b in refused:
        case = case_of({**plain, refusal.one: a, refusal.other: b})

        def build(recipe: Any = case.model) -> nn.Module:
            with torch.device("meta"):
                model: nn.Module = recipe.build()
            return model

        optimizer = case.optimizer_of_engine()
        matrices = optimizer.whole if isinstance(optimizer, MatrixUpdate) else None
        with pytest.raises((PlanError, ConfigError), match=refusal.words):
            describe_rank(build, replace(case.plan, whole=matrices), 0)
