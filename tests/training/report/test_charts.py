"""The parts of charts: numbers, scales, ticks and paths.

What is expected was written down from d3 7.9, which drew the page before its own scripts did.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest

from benchmarks.browser import Page, browser, found

pytestmark = pytest.mark.skipif(found() is None, reason="no Chromium on this machine: install Debian's chromium")

CHARTS = resources.files("atoll.training.report").joinpath("assets", "charts.js").read_text(encoding="utf-8")

TICKS = [
    (0, 1, 2, [0, 0.5, 1]),
    (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    (0, 1, 8.7, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]),
    (0.37, 12.5, 2, [5, 10]),
    (0.37, 12.5, 5, [2, 4, 6, 8, 10, 12]),
    (0.37, 12.5, 8.7, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
    (0, 0.00013, 2, [0, 5e-05, 0.0001]),
    (0, 0.00013, 5, [0, 2e-05, 4e-05, 6e-05, 8e-05, 0.0001, 0.00012]),
    (-0.0123, 5.2, 2, [0, 2, 4]),
    (-0.0123, 5.2, 5, [0, 1, 2, 3, 4, 5]),
    (-0.0123, 5.2, 8.7, [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5]),
    (99, 101, 2, [99, 100, 101]),
    (99, 101, 5, [99, 99.5, 100, 100.5, 101]),
    (99, 101, 8.7, [99, 99.2, 99.4, 99.6, 99.8, 100, 100.2, 100.4, 100.6, 100.8, 101]),
    (0, 0.3, 2, [0, 0.2]),
    (0, 0.3, 5, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]),
    (7, 7, 2, [7]),
    (1, 30, 2, [20]),
    (1, 30, 5, [5, 10, 15, 20, 25, 30]),
    (0, 3500000000, 2, [0, 2000000000]),
    (0, 3500000000, 5, [0, 500000000, 1000000000, 1500000000, 2000000000, 2500000000, 3000000000, 3500000000]),
    (12.345678, 12.345679, 2, [12.345678, 12.3456785, 12.345679]),
    (12.345678, 12.345679, 5, [12.345678, 12.3456782, 12.3456784, 12.3456786, 12.3456788, 12.345679]),
    (5000, 8999, 2, [6000, 8000]),
    (5000, 8999, 5, [5000, 6000, 7000, 8000]),
    (5000, 8999, 8.7, [5000, 5500, 6000, 6500, 7000, 7500, 8000, 8500]),
]
"""First and last value, how many ticks are wanted, and the ticks."""

FOUR_DIGITS = {
    0: "0",
    1: "1",
    0.1: "0.1",
    0.12345: "0.1235",
    123.456: "123.5",
    1234.5: "1235",
    9999: "9999",
    9999.6: "1e+4",
    9999.4: "9999",
    10000: "10k",
    12345: "12.35k",
    -12345: "−12.35k",
    99995: "100k",
    999949: "999.9k",
    999950: "1M",
    1000000: "1M",
    1234567: "1.235M",
    1500000000: "1.5G",
    25000000000000: "25T",
    1000000000000000000: "1E",
    1e24: "1Y",
    1e27: "1000Y",
    0.001: "0.001",
    1.5e-05: "0.000015",
    1e-06: "0.000001",
    1.23456e-07: "1.235e-7",
    1e-07: "1e-7",
    -3e-09: "−3e-9",
    5e-324: "4.941e-324",
    0.6666666666666666: "0.6667",
}
INTEGERS = {0: "0", -0.2: "0", -2.5: "−3", -1: "−1", 1: "1", 29.999999999: "30", 1234567: "1234567", -25: "−25"}
INKS = {
    "#0072b2": "#fff",
    "#e69f00": "#111",
    "#009e73": "#111",
    "#cc79a7": "#111",
    "#f0e442": "#111",
    "#8a8a8a": "#111",
    "#56b4e9": "#111",
    "#d55e00": "#111",
    "#b4a7d6": "#111",
    "#ffffff": "#111",
    "#12161b": "#fff",
}


@pytest.fixture(scope="module")
def shown() -> Iterator[Page]:
    with browser() as page:
        yield page


def values(shown: Page, expression: str) -> Any:
    """Return the value of an expression beside the functions of `charts.js`."""
    return shown.run(f"(() => {{ {CHARTS}\n return {expression}; }})()")


def test_ticks_are_at_round_numbers(shown: Page) -> None:
    asked = json.dumps([row[:3] for row in TICKS])
    ticks = values(shown, f"{asked}.map(([from, to, wanted]) => ticksOf([from, to], wanted))")
    assert ticks == [row[3] for row in TICKS]
    assert values(shown, "ticksOf([NaN, NaN], 5)") == []


@pytest.mark.parametrize(("name", "said"), [("plain", FOUR_DIGITS), ("integer", INTEGERS)])
def test_numbers_are_said_shortly(shown: Page, name: str, said: dict[float, str]) -> None:
    assert values(shown, f"{json.dumps([*said])}.map({name})") == [*said.values()]
    assert values(shown, "[NaN, Infinity].map(plain)") == ["–", "–"]


def test_words_are_black_on_light_colours(shown: Page) -> None:
    assert values(shown, f"{json.dumps([*INKS])}.map(inkOn)") == [*INKS.values()]


def test_a_scale_and_its_inverse(shown: Page) -> None:
    """Upwards, downwards, and of one value, which is in the middle."""
    scales = "[linear([0, 10], [62, 390]), linear([-2, 5.5], [166, 10]), linear([0, 0], [92, 1198])]"
    found = values(
        shown, f"{scales}.map((scale, at) => {{ const x = scale([3.7, 1, 0][at]); return [x, scale.invert(x)]; }})"
    )
    assert [pair[0] for pair in found] == [183.36, 103.6, 645]
    assert [pair[1] for pair in found] == pytest.approx([3.7, 1, 0])


def test_paths(shown: Page) -> None:
    assert values(shown, "pathOf([[1, 2], [3, 4.55555]])") == "M1,2L3,4.556"
    area = "M0,1L5,1L5,2L7,2L7,3.333L7,8L7,9L5,9L5,10L0,10Z"
    assert values(shown, "areaOf([[0, 10, 1], [5, 9, 2], [7, 8, 3.33333]])") == area
    assert values(shown, "[pathOf([]), areaOf([])]") == ["", ""]


def test_extents_leave_out_what_is_no_number(shown: Page) -> None:
    assert values(shown, "extent([undefined, 3, NaN, -1, 2])") == [-1, 3]
    assert values(shown, "extent([NaN])") == [None, None]
    assert values(shown, "indexOfMost([1, 5, 5, 2])") == 1


def test_first_above_is_after_equal_values(shown: Page) -> None:
    assert values(shown, "[0, 1, 2, 2.5, 9].map((value) => firstAbove([1, 2, 2, 3], value))") == [0, 1, 3, 3, 4]
    assert values(shown, "firstAbove([1, 2, 2, 3], 0, 2)") == 2
