"""What is drawn leaves out no value, and is the same in every run."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import drawn, example


def test_picture() -> None:
    assert drawn(6, "abcdef", (1, 2, 3), (True, False)) == [
        ("a", 3, True),
        ("b", 1, False),
        ("c", 3, False),
        ("d", 1, True),
        ("e", 2, False),
        ("f", 2, True),
    ]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(0, 9))
def test_every_value_of_every_axis_is_drawn_as_often(lengths: list[int], more: int) -> None:
    axes = [range(length) for length in lengths]
    rows = drawn(max(lengths) + more, *axes)
    assert rows == drawn(max(lengths) + more, *axes)
    for axis, column in zip(axes, zip(*rows, strict=True), strict=True):
        counts = Counter(column)
        assert counts.keys() == set(axis)
        assert max(counts.values()) - min(counts.values()) <= 1


def test_a_value_that_would_be_left_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 combinations leave out values of an axis of 3"):
        drawn(2, "ab", "abc")


def test_an_example_that_fails_is_named() -> None:
    with pytest.raises(AssertionError) as caught, example("zb-v", 3):
        raise AssertionError
    assert caught.value.__notes__ == ["in the example zb-v, 3"]
