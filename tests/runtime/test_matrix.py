"""A sample of everything with everything: any two settings meet. `make matrix` runs all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.plans.schedules import CATALOGUE
from atoll.testing.parity import assert_parity
from tests.matrix import Choice, case_of, missing_pairs, name_of, sample, whole

SAMPLE = sample()


@pytest.mark.pairs
@pytest.mark.parametrize("choice", SAMPLE, ids=[name_of(choice) for choice in SAMPLE])
def test_a_sample(choice: Choice) -> None:
    case = case_of(choice)
    # Three layers make five blocks, which no pipeline size divides either.
    assert_parity(replace(case, model=replace(case.model, layers=3)))


def test_any_two_values_meet() -> None:
    assert not missing_pairs(SAMPLE)


def test_the_whole_is_every_combination_once() -> None:
    found = [tuple(choice.values())[:5] for choice in whole()]
    assert len(found) == len(set(found)) == len(CATALOGUE) * 14 * 2 * 3 * 4
    assert not missing_pairs(list(whole()))
