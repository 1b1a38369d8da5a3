from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plans.ir import lower
from atoll.plans.ir.draw import draw, draw_svg
from atoll.plans.schedules import build
from atoll.program.sim import Costs, simulate
from tests.plans.ir.shapes import SLICED, V, random_schedule, typed

SVG = "{http://www.w3.org/2000/svg}"


def test_columns_are_of_equal_cost() -> None:
    assert draw(typed(*V, kind="v", chunks=2)).splitlines() == [
        "rank 0  0F0 0F1 .   3F0 3I0 3F1 3W0 3I1 3W1 .   0I0 .   .   0I1 0W0 0W1",
        "rank 1  .   1F0 2F0 1F1 2F1 2I0 .   .   2I1 1I0 1W0 2W0 1I1 1W1 2W1",
    ]


def test_slices_are_named_after_their_microbatch() -> None:
    assert draw(typed(*SLICED, slices=2)).splitlines() == [
        "rank 0  F0.0 F0.1 F1.0 F1.1 B0.1 .    B0.0 .    .    .    B1.1 B1.0",
        "rank 1  .    F0.0 F0.1 I0.1 F1.0 I0.0 W0.0 F1.1 W0.1 I1.1 I1.0 W1.0 W1.1",
    ]
    lowered = draw(lower(build("interleaved", ranks=1, microbatches=1, slices=2), residency="step"))
    assert lowered.split()[2:6] == ["0UNSHARD", "0F0.0", "0F0.1", "1UNSHARD"]


@pytest.mark.parametrize("in_time", [False, True])
def test_the_bars_of_every_other_microbatch_are_lighter(in_time: bool) -> None:
    schedule = build("1f1b", ranks=1, microbatches=3, slices=2)
    text = draw_svg(simulate(schedule, Costs()) if in_time else schedule)
    shades = [text.count(f'fill="{colour}"/>') for colour in ("#8fb8de", "#c7dbee", "#e8998d", "#f3ccc6")]
    assert shades == [5, 2, 5, 2]  # the legend has one of each, none lighter
    assert "<title>0F2.1 on rank 0: " in text
    assert ">F2.1</text>" in text
    assert "#c7dbee" not in draw_svg(build("1f1b", ranks=1, microbatches=6))


def test_time_is_drawn_to_scale() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    assert draw(schedule, simulate(schedule, Costs(1, 1, 1, fused_backward=True))).splitlines() == [
        "rank 0  F0 F1 ......B0--- ...B1---",
        "rank 1  ...F0 B0--- F1 B1---",
    ]


def test_a_long_picture_keeps_its_width() -> None:
    schedule = build("1f1b", ranks=4, microbatches=200)
    lines = draw(schedule, simulate(schedule, Costs()), width=100).splitlines()
    assert max(map(len, lines)) <= 100


@given(st.integers(0, 100_000))
def test_every_action_is_drawn_once(seed: int) -> None:
    schedule = random_schedule(seed)
    picture = draw(schedule)
    names = [name for line in picture.splitlines() for name in line.split()[2:] if name != "."]
    assert len(names) == len(schedule.table.cells)


@pytest.mark.parametrize("in_time", [False, True])
@pytest.mark.parametrize("lowered", [False, True])
def test_svg_is_well_formed_and_self_contained(in_time: bool, lowered: bool) -> None:
    schedule = typed(*V, kind="v", chunks=2)
    schedule = lower(schedule) if lowered else schedule
    text = draw_svg(simulate(schedule, Costs(hop=0.5)) if in_time else schedule)
    root = ElementTree.fromstring(text)
    bars = [group.findtext(f"{SVG}title") for group in root.iter(f"{SVG}g")]
    assert len(bars) == 24
    assert "0F0 on rank 0: 0 to " + ("0.5" if in_time else "1") in bars
    assert "href" not in text
    assert text.count("http") == 1  # the namespace


def test_an_action_of_one_column_is_one_letter() -> None:
    schedule = build("gpipe", ranks=1, microbatches=40)
    picture = draw(schedule, simulate(schedule, Costs()), width=130)  # 120 units of time, a column each
    assert picture == "rank 0  " + "F" * 40 + ("B " * 40).rstrip()
