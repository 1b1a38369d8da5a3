"""The tables of moves: every row joins its two levels, and sums what it must sum exactly once."""

import pytest

from atoll.plans.layouts import (
    GATHER_PARAMETER,
    REDUCE_GRADIENT,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    Axis,
    Level,
    MoveKind,
    Moves,
)


def _walk(moves: Moves, start: Level) -> Level:
    """The level where `moves` end that begin at `start`; fails if a move does not begin where the last ended."""
    level = start
    for move in moves:
        before, after = (move.coarse, move.fine) if move.kind is MoveKind.REDUCE else (move.fine, move.coarse)
        assert level is before, f"{move} begins at {before.name}, the last ended at {level.name}"
        level = after
    return level


@pytest.mark.parametrize("level", list(Level))
def test_gathering_a_parameter_ends_whole(level: Level) -> None:
    assert _walk(GATHER_PARAMETER[level], level) is Level.N


@pytest.mark.parametrize("level", list(Level))
def test_reducing_a_gradient_starts_whole(level: Level) -> None:
    assert _walk(REDUCE_GRADIENT[level], Level.N) is level


@pytest.mark.parametrize(("gradient", "optimizer"), list(SYNC_GRADIENT))
def test_syncing_gradients_joins_the_levels(gradient: Level, optimizer: Level) -> None:
    assert _walk(SYNC_GRADIENT[gradient, optimizer], gradient) is optimizer


@pytest.mark.parametrize(("optimizer", "parameter"), list(SYNC_PARAMETER))
def test_syncing_parameters_joins_the_levels(optimizer: Level, parameter: Level) -> None:
    moves = SYNC_PARAMETER[optimizer, parameter]
    if optimizer <= parameter:
        assert moves == (), "a finer copy is an own slice: nothing travels"
    else:
        assert _walk(moves, optimizer) is parameter
    assert all(move.kind is MoveKind.GATHER for move in moves)


@pytest.mark.parametrize(("gradient", "optimizer"), list(SYNC_GRADIENT))
def test_a_gradient_is_summed_once_along_each_axis(gradient: Level, optimizer: Level) -> None:
    moves = (*REDUCE_GRADIENT[gradient], *SYNC_GRADIENT[gradient, optimizer])
    for axis in Axis:
        assert sum(move.kind is MoveKind.REDUCE and move.axis is axis for move in moves) == 1


def test_the_tables_are_complete() -> None:
    pairs = {(first, second) for first in Level for second in Level}
    assert set(SYNC_GRADIENT) == set(SYNC_PARAMETER) == pairs
    assert set(GATHER_PARAMETER) == set(REDUCE_GRADIENT) == set(Level)
