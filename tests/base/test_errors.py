"""Errors of Atoll as text."""

from __future__ import annotations

import inspect

from atoll.base import errors
from atoll.base.errors import AtollError, PlanError, RankError

EVERY = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, AtollError)]


def test_every_message_is_bounded() -> None:
    """A folder with a vision tower was refused with 23,328 characters: every module of the tower."""
    assert len(EVERY) > 8
    for kind in EVERY:
        made = kind.__new__(kind)
        Exception.__init__(made, f"begins {'x' * 100_000} ends")
        text = str(made)
        assert len(text) == kind.longest <= 16_000
        assert text.startswith("begins xxx")
        assert text.endswith("xxx ends")
        assert "[... 100012 characters ...]" in text
        assert kind.longest <= 2_000 or kind is RankError


def test_a_message_within_the_bound_is_whole() -> None:
    assert str(PlanError("y" * PlanError.longest)) == "y" * PlanError.longest
    assert str(RankError("a\ud800b", rank=1)) == "a?b"


def test_an_error_of_a_rank_says_whose_it_is() -> None:
    error = RankError("gone", rank=3, exit_code=7, speaker=1)
    assert (error.rank, error.exit_code, error.speaker) == (3, 7, 1)
    plain = RankError("gone", rank=0)
    assert (plain.rank, plain.exit_code, plain.speaker) == (0, 1, None)
    assert errors.ReplicaError("differ", ranks=(1, 2)).ranks == (1, 2)
