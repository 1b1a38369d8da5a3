"""When fragments leave and arrive."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import atoll.plans.outer
from atoll.base.errors import PlanError
from atoll.plans.layouts import Codec, Layout
from atoll.plans.outer import Outer, OuterAction, largest_at_once
from atoll.plans.plan import MeshShape, Plan
from atoll.plans.schedules import build


@st.composite
def outers(draw: st.DrawFn) -> tuple[Outer, int]:
    every = draw(st.integers(1, 40))
    fragments = draw(st.integers(0, every))
    delay = draw(st.integers(0, every - 1))
    return Outer(every, fragments=fragments, delay=delay), draw(st.integers(1, 50))


@given(outers())
def test_each_fragment_leaves_once_an_interval_and_arrives_before_it_leaves_again(case: tuple[Outer, int]) -> None:
    outer, units = case
    left: dict[int, list[int]] = {}
    arrived: dict[int, list[int]] = {}
    for step in range(1, 4 * outer.every + 1):
        for way, fragment in outer.turns(step, units):
            if way is OuterAction.LEAVES:
                assert len(arrived.get(fragment, [])) == len(left.get(fragment, [])), "it is still under way"
                left.setdefault(fragment, []).append(step)
            else:
                arrived.setdefault(fragment, []).append(step)
    assert sorted(left) == list(range(outer.count(units)))
    for fragment, steps in left.items():
        assert steps == [outer.offset(fragment, units) + at * outer.every for at in range(4)]
        assert arrived[fragment] == [at + outer.delay for at in steps if at + outer.delay <= 4 * outer.every]
    assert {outer.fragment_of(unit, units) for unit in range(units)} == set(left)


@given(outers())
def test_islands_meet_where_something_arrives(case: tuple[Outer, int]) -> None:
    outer, units = case
    for step in range(1, 3 * outer.every):
        ways = [way for way, _ in outer.turns(step, units)]
        assert outer.meets(step, units) == (OuterAction.ARRIVES in ways)


@given(outers())
def test_the_largest_at_once_is_that_of_a_simulation(case: tuple[Outer, int]) -> None:
    outer, units = case
    sizes = {unit: float(1 + unit % 7) for unit in range(units)}
    under_way: set[int] = set()
    most = 0.0
    for step in range(1, 4 * outer.every + 1):
        for way, fragment in outer.turns(step, units):
            (under_way.add if way is OuterAction.LEAVES else under_way.discard)(fragment)
            most = max(most, sum(size for unit, size in sizes.items() if outer.fragment_of(unit, units) in under_way))
    if outer.delay:
        assert largest_at_once(outer, sizes, units) == most
    else:  # all that leave behind a step are sent before the first of them arrives
        assert largest_at_once(outer, sizes, units) == most


def test_the_drawing_of_the_docstring() -> None:
    outer = Outer(6, fragments=3, delay=1)
    lines = (atoll.plans.outer.__doc__ or "").splitlines()
    drawn = {word: next(line for line in lines if line.split()[:1] == [word]) for word in ("step", "leaves", "arrives")}
    columns = {match.end(): int(match[0]) for match in re.finditer(r"\d+", drawn["step"])}
    for way in OuterAction:
        found = {columns[match.end()]: int(match[0]) for match in re.finditer(r"\d+", drawn[way.value])}
        wanted = {step: turn.fragment for step in columns.values() for turn in outer.turns(step, 3) if turn.way is way}
        assert found == wanted


@pytest.mark.parametrize(
    ("outer", "words"),
    [
        (Outer(64), "every 64 steps, nesterov of lr 0.7 and momentum 0.9, one fragment"),
        (
            Outer(64, "sgd", fragments=0, delay=4, codec=Codec("int4", 64)),
            "every 64 steps, sgd of lr 1 and momentum 0, one fragment per block, delay 4, mix 0.5, int4 of 64",
        ),
        (
            Outer(8, fragments=3, codec=Codec("int8", rounding="stochastic"), feedback=False),
            "every 8 steps, nesterov of lr 0.7 and momentum 0.9, 3 fragments, int8, stochastic, no feedback",
        ),
    ],
)
def test_outer_steps_in_words(outer: Outer, words: str) -> None:
    assert str(outer) == words


@given(st.integers(1, 5000), st.integers(2, 5))
def test_bytes_of_an_outer_gradient(numel: int, islands: int) -> None:
    """A reduce-scatter and an all-gather of padded blocks, of elements or of what encodes them."""
    block = -(-numel // islands)
    assert Outer(4).sent_bytes(numel, islands, 4) == 2 * (islands - 1) * block * 4
    codec = Codec("int4", 16)
    assert Outer(4, codec=codec).sent_bytes(numel, islands, 4) == 2 * (islands - 1) * codec.nbytes(block)


def test_tensors_stored_of_each_parameter() -> None:
    codec = Codec("int8")
    assert [Outer(4).tensors, Outer(4, "sgd").tensors] == [2, 1]
    assert [Outer(4, codec=codec).tensors, Outer(4, "sgd", codec=codec, feedback=False).tensors] == [3, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every = 0"),
        ({"every": 4, "fragments": 5}, "at most 4 fragments"),
        ({"every": 4, "delay": 4}, "0 to 3 steps"),
        ({"every": 4, "fragments": -1}, "0 to send each unit"),
        ({"every": 4, "optimizer": "adam"}, "known: nesterov, sgd"),
        ({"every": 4, "lr": 0.0}, "above 0"),
        ({"every": 4, "momentum": 1.0}, "less than 1"),
        ({"every": 4, "momentum": 0.0}, '"sgd"'),
        ({"every": 4, "mix": 1.0}, "ignore each other"),
    ],
)
def test_values_outside_their_domain(options: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        Outer(**options)  # type: ignore[arg-type]


def test_one_island_has_no_outer_steps() -> None:
    schedule = build("1f1b", ranks=1, microbatches=2)
    with pytest.raises(PlanError, match="a mesh with inter = 1 has one"):
        Plan(MeshShape(intra=2), Layout("NNN"), schedule, 1, outer=Outer(4))


def test_inside_an_island_levels_i_and_g_are_one() -> None:
    schedule = build("1f1b", ranks=1, microbatches=2)
    plan = Plan(MeshShape(inter=2, intra=2), Layout("IGG"), schedule, 1, outer=Outer(4))
    assert plan.islands == 2
    for rank in range(4):
        place = plan.mesh.place(rank)
        nest = plan.sharding(place).nest
        assert (nest.inter, nest.intra, nest.i, nest.j) == (1, 2, 0, place.intra)
