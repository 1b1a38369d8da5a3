"""Lots of islands that come and go: each is granted once, counted once, and granted again if its island leaves."""

from __future__ import annotations

import random
from itertools import pairwise

from atoll.plans.federation.lots import NO_LOTS, LotRange, Lots, count_lots, joined_up, without_first


def lots_of(runs: tuple[LotRange, ...]) -> list[int]:
    return [lot for run in runs for lot in range(run.start, run.stop)]


def test_lots_that_are_lost_are_granted_before_fresh_ones() -> None:
    lots = NO_LOTS.granted("a", stock=4).granted("b", stock=4)
    assert lots.of("a").ranges == (LotRange(0, 4),)
    assert lots.of("b").ranges == (LotRange(4, 8),)
    lots = lots.counted("a", 3).released("a")
    assert lots.returned == (LotRange(3, 4),)
    lots = lots.counted("b", 2).granted("b", stock=4)
    assert lots.of("b").ranges == (LotRange(6, 8), LotRange(3, 4), LotRange(8, 9))
    assert (lots.returned, lots.fresh) == ((), 9)
    assert lots.of("a") == lots.of("nobody")._replace(island="a")


def test_what_is_counted_twice_is_taken_once() -> None:
    lots = NO_LOTS.granted("a", stock=4).counted("a", 3)
    assert lots.counted("a", 3) == lots
    assert lots.counted("a", 2) == lots
    assert lots.counted("a", 4).of("a").ranges == ()


def test_part_of_what_came_back_stays_for_others() -> None:
    lots = NO_LOTS.granted("a", stock=5).released("a").granted("b", stock=2)
    assert lots.of("b").ranges == (LotRange(0, 2),)
    assert (lots.returned, lots.fresh) == ((LotRange(2, 5),), 5)


def test_neighbours_are_one_run() -> None:
    """Records keep runs: with one for each grant they would grow with the run."""
    runs = (LotRange(0, 2), LotRange(2, 5), LotRange(7, 8), LotRange(6, 7), LotRange(7, 9))
    assert joined_up(runs) == (LotRange(0, 5), LotRange(7, 8), LotRange(6, 9))
    lots = NO_LOTS
    for stock in (1, 3, 4):
        lots = lots.granted("a", stock=stock)
    assert lots.of("a").ranges == (LotRange(0, 4),)


def test_the_first_lots_go() -> None:
    runs = (LotRange(0, 2), LotRange(5, 9))
    assert [lots_of(without_first(runs, count)) for count in (0, 1, 2, 4, 9)] == [
        [0, 1, 5, 6, 7, 8],
        [1, 5, 6, 7, 8],
        [5, 6, 7, 8],
        [7, 8],
        [],
    ]
    assert without_first(runs, 2) == (LotRange(5, 9),)


def test_every_lot_is_read_once_however_islands_come_and_go() -> None:
    """Every lot below `fresh` is counted, held by one island or returned."""
    for seed in range(20):
        chance, lots, counted = random.Random(seed), NO_LOTS, list[int]()
        used = dict.fromkeys("abc", 0)
        for _ in range(60):
            island = chance.choice("abc")
            match chance.choice(("grant", "read", "leave")):
                case "grant":
                    lots = lots.granted(island, stock=chance.randint(1, 6))
                case "read":
                    own = lots_of(lots.of(island).ranges)
                    read = chance.randint(0, len(own))
                    counted += own[:read]
                    used[island] += read
                    lots = lots.counted(island, used[island])
                    assert lots_of(lots.of(island).ranges) == own[read:]
                case _:
                    lots, used[island] = lots.released(island), 0
            _check(lots, counted)


def _check(lots: Lots, counted: list[int]) -> None:
    held = [lot for each in lots.held for lot in lots_of(each.ranges)]
    assert sorted([*counted, *held, *lots_of(lots.returned)]) == list(range(lots.fresh))
    assert count_lots(lots.returned) == len(lots_of(lots.returned))
    assert all(one.stop < other.start for one, other in pairwise(lots.returned))
