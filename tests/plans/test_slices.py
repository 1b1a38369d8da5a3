"""Lengths of slices of equal work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import ConfigError
from atoll.plans.slices import even_slices, slice_shares, slice_work

WORK = st.floats(0, 10)


def test_pictures() -> None:
    assert even_slices(8, 4) == (2, 2, 2, 2)
    assert even_slices(8, 3) == (3, 2, 3)
    assert even_slices(100, 4, linear=0, quadratic=1) == (50, 21, 16, 13)  # ends at 100 times the root of k/4
    assert even_slices(4096, 4, linear=1.0, quadratic=0.001) == (1691, 981, 769, 655)
    assert even_slices(4096, 4, linear=1.0, quadratic=0.001, multiple=128) == (1664, 1024, 768, 640)
    assert even_slices(5, 1, linear=0, quadratic=1) == (5,)


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 16), WORK, WORK)
def test_lengths_are_whole_and_the_work_is_even(
    units: int, slices: int, multiple: int, linear: float, quadratic: float
) -> None:
    if units < slices or (linear < 1e-3 and quadratic < 1e-3):
        return
    length = units * multiple
    lengths = even_slices(length, slices, linear=linear, quadratic=quadratic, multiple=multiple)
    assert (len(lengths), sum(lengths)) == (slices, length)
    assert min(lengths) >= multiple
    assert all(each % multiple == 0 for each in lengths)
    # Each end is within half a multiple of where it should be, unless slices would have no token.
    if min(lengths) > multiple:
        work = slice_work(lengths, linear=linear, quadratic=quadratic)
        most = multiple * (linear + quadratic * length)  # of a multiple, the last one
        assert max(work) - min(work) <= 2 * most * (1 + 1e-9)
    if quadratic == 0:
        assert max(lengths) - min(lengths) <= multiple
    elif min(lengths) > multiple:
        assert max(lengths) - lengths[0] <= multiple


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), WORK, WORK)
def test_the_work_of_slices_is_that_of_the_sequence(lengths: list[int], linear: float, quadratic: float) -> None:
    """Counted one token at a time, each of which attends to those before it and to half of itself."""
    if linear == quadratic == 0:
        return
    work = slice_work(lengths, linear=linear, quadratic=quadratic)
    start = 0
    for length, found in zip(lengths, work, strict=True):
        tokens = range(start, start + length)
        assert found == pytest.approx(sum(linear + quadratic * (token + 0.5) for token in tokens))
        start += length


def test_shares() -> None:
    """Slices of 1 and 3 tokens have 1/16 and 15/16 of the work of attention."""
    assert slice_shares((1, 3), forward=(1, 0), input_grad=(0, 1)) == ((0.25, 1 / 16, 0.25), (0.75, 15 / 16, 0.75))
    assert slice_shares((7,), forward=(1, 1), input_grad=(1, 1)) == ((1, 1, 1),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 8, "slices": 0}, "slices = 0: it must be at least 1"),
        ({"length": 8, "slices": 2, "multiple": 0}, "multiple = 0: it must be at least 1"),
        (
            {"length": 3, "slices": 4},
            "a sequence of 3 tokens cannot be cut into 4 slices of multiples of 1: .* least 4",
        ),
        (
            {"length": 100, "slices": 2, "multiple": 8},
            "multiples of 8: its length must be a multiple of 8, and at least 16",
        ),
        (
            {"length": 8, "slices": 2, "multiple": 8},
            "a sequence of 8 tokens cannot be cut into 2 slices of multiples of 8",
        ),
        ({"length": 8, "slices": 2, "linear": -1.0}, r"linear = -1\.0: work must be a finite number, 0 or more"),
        ({"length": 8, "slices": 2, "quadratic": float("inf")}, "quadratic = inf: work must be a finite number"),
        ({"length": 8, "slices": 2, "linear": 0.0}, "linear = quadratic = 0: a token needs some work"),
    ],
)
def test_impossible_cuts(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        even_slices(**arguments)  # type: ignore[arg-type]
