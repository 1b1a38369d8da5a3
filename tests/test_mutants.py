"""What `make mutants` decides without running a test: which places, which tests, what is on its page."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutants import bench, table
from benchmarks.mutants.table import TABLE, files_of, row_of
from benchmarks.mutants.tree import Tree

ROOT = Path(__file__).parents[1]


def row(**changes: Any) -> dict[str, Any]:
    place = {"module": "sim.py", "package": "sim", "within": "play", "line": 7, "kind": "number"}
    change = {"was": "a = 1", "now": "a = 2", "outcome": "caught", "by": "tests/test_sim.py::test", "seconds": 6.0}
    return {**place, **change, **changes}


def page_of(rows: list[dict[str, Any]], excluded: list[dict[str, str]]) -> str:
    return bench.report({"drawn": 5, "mutants": rows, "excluded": excluded, "least": 0.95})


def test_every_module_has_tests_that_exist() -> None:
    assert {module.partition("/")[0].removesuffix(".py") for module in bench.modules()} == set(bench.PACKAGES)
    assert {row_of(module) for module in bench.modules()} == set(TABLE)
    for start in TABLE:
        for file in files_of(start):
            assert (ROOT / file).exists(), f"{start}: {file}"


def test_the_tests_of_a_modules_own_name_come_first() -> None:
    assert table.tests_of("ir/validate.py") == ("tests/ir/test_validate.py", *TABLE["ir/"])
    assert table.tests_of("ir/schedule.py") == TABLE["ir/"]
    assert table.tests_of("runtime/sharding/access.py") == TABLE["runtime/sharding/access.py"]


def test_what_is_kept_speaks_of_modules_and_gives_reasons() -> None:
    kept = tomllib.loads((bench.HERE / "kept.toml").read_text())
    for entry in (*kept["excluded"], *kept["lives"]):
        assert entry["module"] in bench.modules()
        assert entry["why"].endswith(".")
        assert ("was" in entry) == ("now" in entry)
    assert all("was" in entry for entry in kept["lives"])


def test_the_page_counts_and_shows_what_lives() -> None:
    explained = row(line=8, outcome="lived", why="It changes no result.")
    bare = row(module="data/order.py", package="data", within="", outcome="lived", why="")
    page = page_of([row(), row(outcome="timed out"), explained, bare], [{"module": "sim.py", "why": "No clock."}])
    assert "2 of 4 are detected, 50.0%" in page
    assert "1 more are drawn but have not been run yet." in page
    assert "| sim | 3 | 1 | 1 | 1 | 66.7% |" in page
    assert "| all | 4 | 1 | 1 | 2 | 50.0% |" in page
    shown = "    ```diff\n    - a = 1\n    + a = 2\n    ```\n\n    It changes no result."
    assert f"- `sim.py` line 8, `play`\n\n{shown}" in page
    assert "**Not explained.**" in page
    assert "- `sim.py`\n    No clock." in page


def test_an_entry_speaks_of_a_whole_class_or_of_one_change() -> None:
    whole = {"module": "sim.py", "within": "Player"}
    assert bench._fits(whole, row(within="Player.play"))
    assert not bench._fits(whole, row(within="Players"))
    assert bench._fits({"module": "sim.py", "was": "a = 1", "now": "a = 2"}, row())
    assert not bench._fits({"module": "sim.py", "was": "a = 1", "now": "a = 0"}, row())


def test_a_run_goes_on_and_tries_again_what_lived_other_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "DONE", tmp_path / "results" / "cases.jsonl")
    assert dict(bench._done("source", "tests")) == {}
    cases = {name: {"outcome": name, "by": "", "seconds": 1.0} for name in ("caught", "timed out", "lived")}
    for name, case in cases.items():
        bench._note(name, case)
    bench._note("tests/ir", {"seconds": 3.0})
    assert dict(bench._done("source", "tests")) == {**cases, "tests/ir": {"seconds": 3.0}}
    assert set(dict(bench._done("source", "more tests"))) == {"caught", "timed out"}
    assert dict(bench._done("another", "more tests")) == {}


def test_places_are_the_same_in_every_run_and_spread() -> None:
    places = pytest.importorskip("benchmarks.mutants.places", reason="cosmic-ray is not installed")
    source = (ROOT / "src" / "atoll" / "ir" / "placement.py").read_text()
    found = places.sample("ir/placement.py", source, lambda mutant: False)
    assert found == places.sample("ir/placement.py", source, lambda mutant: False)
    assert len({mutant.line for mutant in found}) == len(found) >= 2
    # Lines above move nothing, and what is left out makes room for the next.
    moved = places.sample("ir/placement.py", "# One more line.\n" + source, lambda mutant: False)
    assert [mutant.name for mutant in moved] == [mutant.name for mutant in found]
    other = places.sample("ir/placement.py", source, lambda mutant: mutant.name == found[0].name)
    assert len(other) == len(found)
    assert found[0].name not in {mutant.name for mutant in other}


@pytest.mark.parametrize(
    ("source", "now"),
    [
        ("def f(a):\n    g(a)\n", "pass"),
        ("def f(a):\n    a.b = 1\n", "pass"),
        ("def f(a):\n    a += 1\n", "pass"),
        ("def f(a, b):\n    return g(a, b)\n", "return g( b,a)"),
        ("def f(a, b):\n    return a in b\n", "return a not in b"),
        ("def f(a, b):\n    return a not in b\n", "return a in b"),
        ("def f(a, b):\n    return a < b\n", "return a <= b"),
        ("def f(a):\n    for b in a:\n        break\n", "continue"),
    ],
)
def test_what_is_changed(source: str, now: str) -> None:
    places = pytest.importorskip("benchmarks.mutants.places", reason="cosmic-ray is not installed")
    made = [places._mutated(place, source) for place in places._places("m.py", source)]
    assert now in [mutant.now for mutant in made if mutant is not None]


@pytest.mark.parametrize(
    "source",
    [
        "def f(a: int | None, *, b: tuple[int, ...]) -> int | str: ...\n",
        "@g(1)\ndef f(): ...\n",
        "from a import *\n",
        "assert 1 < 2\n",
        "a = 'b' + c\n",
        '"""One + two."""\n',
    ],
)
def test_what_says_nothing_is_left_alone(source: str) -> None:
    places = pytest.importorskip("benchmarks.mutants.places", reason="cosmic-ray is not installed")
    assert list(places._places("m.py", source)) == []


@pytest.mark.slow
def test_damage_is_seen_and_is_not_in_the_users_tree(tmp_path: Path) -> None:
    """A repository of two files: the test passes, fails on the damaged copy, and passes again."""
    root = tmp_path / "root"
    (root / "src").mkdir(parents=True)
    (root / "src" / "mended.py").write_text("VALUE = 1\n")
    (root / "test_value.py").write_text("import mended\n\ndef test_value():\n    assert mended.VALUE == 1\n")
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    tree = Tree(root)
    try:
        assert tree.test(["test_value.py"], limit=60).code == 0
        with tree.damaged("src/mended.py", "VALUE = 2\n"):  # of the same length: times and sizes say nothing
            found = tree.test(["test_value.py"], limit=60)
        assert (found.code, found.failed) == (1, "test_value.py::test_value")
        assert tree.test(["test_value.py"], limit=60).code == 0
        with tree.damaged("src/mended.py", "while True: pass\n"):
            assert tree.test(["test_value.py"], limit=2).code is None
    finally:
        tree.close()
    assert (root / "src" / "mended.py").read_text() == "VALUE = 1\n"
    assert not tree.path.exists()
