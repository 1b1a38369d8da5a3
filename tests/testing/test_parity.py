"""How far two histories are apart, and where."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from atoll.testing.parity import Case, History, _neutral, difference, worst_difference


def history(losses: list[float] | None = None, norms: list[float] | None = None, **parameters: float) -> History:
    values = {name: torch.tensor([1e-3, value], dtype=torch.float64) for name, value in parameters.items()}
    return History(losses or [], norms or [], values)


def test_a_difference_is_relative_to_what_is_wanted() -> None:
    """And to 0.01, where all is smaller."""
    one, ten, tiny = (torch.tensor([0.0, value]) for value in (1.0, 10.0, 1e-3))
    assert difference(one, ten) == pytest.approx(0.9)
    assert difference(ten, one) == pytest.approx(9.0)
    assert difference(tiny, 2 * tiny) == pytest.approx(0.1)
    assert difference(torch.zeros(0), torch.zeros(0)) == 0.0


def test_the_worst_difference_is_named() -> None:
    wanted = history([2.0, 4.0], [1.0, 1.0], a=1.0, b=10.0)
    assert worst_difference(wanted, wanted)[0] == 0.0
    worst, where = worst_difference(history([2.0, 5.0], [1.0, 1.0], a=1.0, b=10.0), wanted)
    assert worst == pytest.approx(0.25)
    assert where.startswith("loss of step 2")
    worst, where = worst_difference(history([2.0, 5.0], [1.0, 1.5], a=1.0, b=10.0), wanted)
    assert worst == pytest.approx(0.5)
    assert "norm" in where
    assert "2" in where
    worst, where = worst_difference(history([2.0, 4.0], [1.0, 1.0], a=1.3, b=1.0), wanted)
    assert (worst, where) == (pytest.approx(0.9), "parameter b")


def test_parameters_of_other_stages_are_left_out_and_nan_is_infinitely_far() -> None:
    wanted = history(a=1.0, b=10.0)
    assert worst_difference(history(a=1.0), wanted)[0] == 0.0
    worst, where = worst_difference(history(a=math.nan, b=20.0), wanted)
    assert (worst, where) == (math.inf, "parameter a")


def test_one_process_has_none_of_the_options_that_divide_a_case() -> None:
    """What a case is compared with knows its model, batch and precision alone."""
    divided = Case(
        "GGG", pipeline=2, intra=2, schedule="zb-v", recompute="block", post_validation=True, prefetch=3, unit=2
    )
    assert _neutral(divided) == Case(residency="action")
    assert _neutral(replace(divided, microbatches=8, steps=5)) == Case(microbatches=8, steps=5, residency="action")
