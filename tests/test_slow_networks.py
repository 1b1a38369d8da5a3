"""docs/slow-networks.md says what scripts/slow_networks.py computes, and its rules are those of the predictions."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.plans.layouts import Codec

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "slow-networks.md").read_text(encoding="utf-8")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("slow_networks")


def rows_of(head: str) -> dict[str, list[str]]:
    """The rows of the table whose first head is `head`, by their first cell; its heads among them."""
    (text,) = re.findall(rf"^(\| {re.escape(head)} \|[^\n]*\n\| --- .*?)\n\n", PAGE, flags=re.DOTALL | re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("| ").split(" |")] for line in text.splitlines()]
    return {first: cells for first, *cells in rows if not first.startswith("---")}


def way(script: Any, name: str) -> Any:
    return next(each for each in script.WAYS if each.name == name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "link"), [("data parallel", "1 Gb/s"), ("int8", "1 Gb/s"), ("outer, 64", "1 Gb/s")])
def test_a_cell_is_what_is_predicted(script: Any, name: str, link: str) -> None:
    """Its plan, and its seconds over those of compute, which the page says in milliseconds."""
    job, own = script.JOBS[0], way(script, name)
    rows, sizes = rows_of(job.name), rows_of("size")
    value, *words = rows[own.row][rows[job.name].index(link)].replace("*", "").split()
    compute, unit = sizes[job.name][sizes["size"].index("compute")].split()
    assert unit == "ms"
    found = script.predicted(own, job, script.LINKS[link])
    assert " ".join(words) == own.tells(found)
    assert found.seconds == pytest.approx(float(value) * float(compute) / 1e3, rel=0.01)


def test_the_page_names_the_first_way_that_is_fast_enough(script: Any) -> None:
    summary = rows_of("model")
    for job in script.JOBS:
        rows = rows_of(job.name)
        for at, link in enumerate(script.LINKS):
            ratios = {
                each.name: float(re.sub(r"[*,]", "", rows[each.row][at].split()[0]))
                for each in script.WAYS
                if rows[each.row][at] != "does not fit"
            }
            enough = (name for name, value in ratios.items() if value <= script.ENOUGH)
            expected = next(enough, min(ratios, key=lambda name: ratios[name]))
            assert rows["use"][at] == expected, (job.name, link)
            assert summary[job.name][at].startswith(f"{expected}: ")


@pytest.mark.slow
def test_bytes_are_those_of_the_rules(script: Any) -> None:
    """The traffic of predicted programs equals the page's rules for two islands. A small batch keeps planning fast."""
    job = replace(script.JOBS[0], batch=32, across=(2,))
    parameters = job.model.parameters
    code = Codec("int8")
    expected = {
        "data parallel": 8 * (4 + 2) * parameters / 2,
        "int8": 2 * 8 * code.item_bytes * parameters / 2,
        "outer, 64": 64 * parameters / 2 / 64,
        "pipeline": 16 * job.tokens * job.model.hidden,
    }
    found = {each: script.sent(script.predicted(way(script, each), job, script.MIDDLE)) for each in expected}
    assert found == pytest.approx(expected, rel=0.02)


def test_measured_parts_are_those_of_the_raw_files(script: Any) -> None:
    parts = {name: part() for name, part in script.MEASURED.items()}
    assert script.written(PAGE, parts) == PAGE, "run `python scripts/slow_networks.py --measured`"


def test_losses_are_compared_with_the_same_seeds(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"name": "fp32", "kind": "synchronous", "seed": 0, "validation": [[0, 5.0], [9, 2.0]]},
        {"name": "fp32", "kind": "synchronous", "seed": 1, "validation": [[0, 5.0], [9, 4.0]]},
        {"name": "int8", "kind": "codec", "seed": 0, "validation": [[0, 5.0], [9, 2.1]]},
    ]
    monkeypatch.setattr(script, "load", lambda name: {"quality": {"steps": 9, "rows": rows}}[name])
    text = script.losses()
    assert "| fp32 | 3.0000 |  | 2 |" in text
    assert "| int8 | 2.1000 | +5.00% | 1 |" in text
    assert "MuLoCo" not in text


def test_losses_with_muon_have_a_base_of_their_own(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"name": name, "kind": "synchronous", "seed": 0, "validation": [[0, 5.0], [9, loss]]}
        for name, loss in (("AdamW", 2.0), ("MuLoCo", 1.9))
    ]
    quality = {"steps": 20, "rows": [{**rows[0], "name": "fp32"}], "muon": {"rows": rows}}
    monkeypatch.setattr(script, "load", lambda name: {"quality": quality}[name])
    text = script.losses()
    assert "for 9 steps" in text
    assert "| MuLoCo | 1.9000 | -5.00% | 1 |" in text


def test_outer_steps_are_quoted_as_measured(script: Any) -> None:
    speed = {
        "bits": 20e6,
        "outer": {"every": 64},
        "over_alone": [1.0, 1.1, 1.3],
        "times_as_fast": 20.0,
        "best_synchronous": "IIG",
    }
    text = script.measured_outer({"speed": speed})
    assert "at 20 Mbit/s" in text
    assert "every 64 steps take 1.10 times" in text
    assert "20.0 times as fast as IIG" in text
