"""What `make mutants` decides without running a test: which places, which tests, what is on its page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.mutants import bench, probes, selection
from benchmarks.mutants.selection import Ran
from benchmarks.mutants.tree import Tree

ROOT = Path(__file__).parents[1]


def row(**changes: Any) -> dict[str, Any]:
    place = {"module": "program/sim.py", "package": "program", "within": "play", "line": 7, "kind": "number"}
    change = {
        "was": "a = 1",
        "now": "a = 2",
        "outcome": "caught",
        "by": "tests/program/test_sim.py::test",
        "seconds": 6.0,
    }
    return {**place, **change, **changes}


def page_of(rows: list[dict[str, Any]], excluded: list[dict[str, str]]) -> str:
    return bench.report({"drawn": 5, "mutants": rows, "excluded": excluded, "least": 0.95})


def ran(name: str, seconds: float, *functions: str) -> Ran:
    return Ran(name, seconds, frozenset(functions))


def test_the_tables_speak_of_files_that_exist() -> None:
    every = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    for pattern in selection.LEFT_OUT:
        assert any(re.fullmatch(pattern, file) for file in every), pattern
    for start, files in selection.BESIDE.items():
        assert any(module.startswith(start) for module in bench.modules()), start
        assert set(files) <= set(selection.test_files())


def test_a_modules_own_tests_have_its_name_in_its_folder_or_above() -> None:
    files = [
        "tests/test_outer.py",
        "tests/runtime/test_outer.py",
        "tests/prediction/cost/test_outer.py",
        "tests/training/data/test_order.py",
    ]
    assert selection.own_files("runtime/sharding/outer.py", files) == files[1::-1]
    assert selection.own_files("prediction/cost/outer.py", files) == [
        "tests/prediction/cost/test_outer.py",
        "tests/test_outer.py",
    ]
    assert selection.own_files("training/data/order.py", files) == ["tests/training/data/test_order.py"]
    assert selection.own_files("training/data/stream.py", files) == []


@pytest.mark.slow
def test_tests_that_run_a_function_are_taken_its_own_file_first_then_the_shortest() -> None:
    files = ["tests/training/data/test_order.py", "tests/base/test_units.py", "tests/training/data/test_mixing.py"]
    home = "training/data/order.py:SampleOrder.take"
    known = [
        ran("tests/base/test_units.py::a", 0.1, home),
        ran("tests/base/test_units.py::b", 0.0, "training/data/order.py:batch"),
        ran("tests/training/data/test_mixing.py::c", 0.3, home),
        ran("tests/training/data/test_order.py::d", 9.0, home),
        ran("tests/training/data/test_order.py::e", 5.0, home),
    ]

    def names(within: str) -> list[str]:
        return [
            each.name.partition("::")[2]
            for each in selection.candidates("training/data/order.py", within, known, files)
        ]

    assert names("SampleOrder.take") == ["e", "d", "c", "a"]  # the file of c imports a name of the module's
    assert names("SampleOrder.take.inner") == names("SampleOrder.take")
    assert names("SampleOrder") == ["e", "d", "c", "b", "a"]  # no function: what runs another of the module
    assert names("batch") == ["b"]
    alone = [ran("tests/base/test_units.py::f", 0.1, "training/data/mixing.py:Mix.take")]
    is_near = [
        selection.is_near("training/data/order.py", within, known[:1]) for within in ("SampleOrder.take", "batch")
    ]
    assert is_near == [True, False]
    assert all(selection.is_near("training/data/order.py", within, known[1:2]) for within in ("", "SampleOrder"))
    found = selection.candidates("training/data/order.py", "", alone, files)
    assert found == alone  # of what imports the module


def test_tests_are_added_until_the_time_is_spent() -> None:
    known = [ran(f"t::{at}", seconds) for at, seconds in enumerate((15.0, 20.0, 8.0, 1.0))]
    assert [each.name for each in selection.selected(known)] == ["t::0", "t::2", "t::3"]
    assert selection.selected([ran("t::0", 900.0)])  # one at least
    assert len(selection.selected([ran(f"t::{at}", 0.0) for at in range(900)])) == selection.MOST_TESTS
    assert len(selection.selected([ran(f"t::{at}", 0.0) for at in range(900)], most=70)) == 70


def test_imports_lead_through_packages_to_the_home_of_a_name() -> None:
    found = selection.imported_by("tests/training/data/test_order.py")  # from atoll.training.data import SampleOrder
    assert "training/data/order.py" in found
    assert "training/data/blocks.py" not in found
    assert "training/data/mixing.py" in selection.importers()["training/data/order.py"]


def test_what_is_kept_speaks_of_modules_and_gives_reasons() -> None:
    kept = tomllib.loads((bench.HERE / "kept.toml").read_text())
    for entry in (*kept["excluded"], *kept["lives"]):
        assert entry["module"] in bench.modules()
        assert entry["why"].endswith(".")
        assert ("was" in entry) == ("now" in entry)
    assert all("was" in entry for entry in kept["lives"])


def test_the_page_counts_and_shows_what_lives() -> None:
    explained = row(line=8, outcome="lived", why="It changes no result.")
    bare = row(module="training/data/order.py", package="training", within="", outcome="lived", why="")
    page = page_of(
        [row(), row(outcome="timed out"), explained, bare], [{"module": "program/sim.py", "why": "No clock."}]
    )
    assert "2 of 4 are detected, 50.0%" in page
    assert "1 more are drawn but have not been run yet." in page
    assert "| program | 3 | 1 | 1 | 1 | 66.7% |" in page
    assert "| all | 4 | 1 | 1 | 2 | 50.0% |" in page
    shown = "    ```diff\n    - a = 1\n    + a = 2\n    ```\n\n    It changes no result."
    assert f"- `program/sim.py` line 8, `play`\n\n{shown}" in page
    assert "**Not explained.**" in page
    assert "- `program/sim.py`\n    No clock." in page


def test_an_entry_speaks_of_a_whole_class_or_of_one_change() -> None:
    whole = {"module": "program/sim.py", "within": "Player"}
    assert bench._fits(whole, row(within="Player.play"))
    assert not bench._fits(whole, row(within="Players"))
    assert bench._fits({"module": "program/sim.py", "was": "a = 1", "now": "a = 2"}, row())
    assert not bench._fits({"module": "program/sim.py", "was": "a = 1", "now": "a = 0"}, row())


def test_a_verdict_holds_until_its_module_or_its_tests_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("src/atoll/m.py", "tests/test_m.py", "tests/test_n.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("VALUE = 1\n")

    def known() -> bench.Undamaged:
        made = bench.Undamaged.__new__(bench.Undamaged)
        made.files, made._base, made._found = ["tests/test_m.py", "tests/test_n.py"], tmp_path, {}
        made.ran = [ran("tests/test_m.py::a", 1.0, "m.py:f"), ran("tests/test_n.py::b", 1.0, "m.py:f")]
        return made

    mutant: Any = SimpleNamespace(module="m.py", within="f")
    module = known().digest("src/atoll/m.py")
    caught = {"by": "tests/test_m.py::a", "module_digest": module}
    caught["tests"] = known().tests_digest(mutant, caught["by"])
    lived = {"by": "", "module_digest": module, "tests": known().tests_digest(mutant, "")}

    def holds() -> tuple[bool, bool]:
        return known().is_current(caught, mutant), known().is_current(lived, mutant)

    monkeypatch.setattr(selection, "importers", lambda: {"m.py": ()})
    assert holds() == (True, True)
    (tmp_path / "tests" / "test_m.py").write_text("VALUE = 1  # why\n")
    assert holds() == (True, True)
    (tmp_path / "tests" / "test_n.py").write_text("VALUE = 2\n")  # not what caught it, but it may catch what lived
    assert holds() == (True, False)
    assert known().is_current({**lived, "outcome": "lived"}, mutant, is_explained=True)
    (tmp_path / "tests" / "test_m.py").write_text("VALUE = 2\n")
    assert holds() == (False, False)
    (tmp_path / "tests" / "test_m.py").write_text("VALUE = 1\n")
    (tmp_path / "src" / "atoll" / "m.py").write_text("VALUE = 2\n")
    assert holds() == (False, False)


def test_half_a_line_of_an_interrupted_run_is_no_case(tmp_path: Path) -> None:
    path = tmp_path / "results" / "cases.jsonl"
    bench._note(path, {"name": "a", "outcome": "lived"})
    bench._note(path, {"name": "a", "outcome": "caught"})
    with path.open("a") as file:
        file.write('{"name": "b", "outc')
    assert bench.read(path) == {"a": {"outcome": "caught"}}


def test_probes_say_what_ran_and_change_nothing(tmp_path: Path) -> None:
    package = tmp_path / "src" / "atoll"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "m.py").write_text(
        '"""A module."""\nfrom __future__ import annotations\n\n'
        'class C:\n    def f(self) -> int:\n        """One."""\n        return 1\n\n'
        "def g():\n    def h():\n        return 2\n    return h\n\n@kernel\ndef k(): ...\n"
    )
    names = probes.probe(tmp_path)
    assert names == ["m.py:C.f", "m.py:g", "m.py:g.h"]
    program = "import atoll.m as m; import builtins; m.C().f(); m.C().f(); print(m.C.f.__doc__, m.g()())"
    (package / "m.py").write_text((package / "m.py").read_text().replace("@kernel", ""))
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "src", capture_output=True, text=True, check=True
    )
    assert told.stdout == "One. 2\n"
    assert probes.ran(tmp_path, names) == {0: ["m.py:C.f", "m.py:g", "m.py:g.h"]}
    assert probes.ran(tmp_path, names) == {}


def test_places_are_the_same_in_every_run_and_spread() -> None:
    places = pytest.importorskip("benchmarks.mutants.places", reason="cosmic-ray is not installed")
    source = (ROOT / "src" / "atoll" / "plans" / "ir" / "placement.py").read_text()
    found = places.sample("plans/ir/placement.py", source, lambda mutant: False)
    assert found == places.sample("plans/ir/placement.py", source, lambda mutant: False)
    assert len({mutant.line for mutant in found}) == len(found) == max(1, round(len(source.splitlines()) / places.EACH))
    # Lines above move nothing, and what is left out makes room for the next.
    moved = places.sample("plans/ir/placement.py", "# One more line.\n" + source, lambda mutant: False)
    assert [mutant.name for mutant in moved] == [mutant.name for mutant in found]
    other = places.sample("plans/ir/placement.py", source, lambda mutant: mutant.name == found[0].name)
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
    shutil.copytree(ROOT / "benchmarks" / "mutants", root / "benchmarks" / "mutants")
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    tree = Tree(root)
    try:
        found = tree.test(["test_value.py"], limit=60)
        assert (found.code, [test.name for test in found.tests]) == (0, ["test_value.py::test_value"])
        with tree.damaged("src/mended.py", "VALUE = 2\n"):  # of the same length: times and sizes say nothing
            found = tree.test(["test_value.py"], limit=60)
        assert (found.code, found.failed) == (1, "test_value.py::test_value")
        assert tree.test(["test_value.py"], limit=60).code == 0
        with tree.damaged("src/mended.py", "while True: pass\n"):
            found = tree.test(["test_value.py"], limit=2)
        assert found.code is None
        assert "s of processor time, of 2 s" in found.why
        left = "import subprocess, sys\nsubprocess.Popen(['sleep', '4321'], start_new_session=True)\nVALUE = 1\n"
        with tree.damaged("src/mended.py", left):
            assert tree.test(["test_value.py"], limit=60).code == 0
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.is_file()]
        assert b"sleep\x004321\x00" not in commands
    finally:
        tree.close()
    assert (root / "src" / "mended.py").read_text() == "VALUE = 1\n"
    assert not tree.path.exists()
