"""Every figure has a source: pages say what the raw files say, and how old these are."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks import claims, due, provenance, rows
from benchmarks.claims import CLAIMS, PART, Claim

ROOT = Path(__file__).parents[1]
NAMES = claims.raw_names()

BENCH = """
from atoll.plans import ir
from atoll.plans.ir import Action
from benchmarks.two import pages
FILE = "helper.c"
def run(arguments):
    from benchmarks.two.race import go
    return go(Action, FILE)
def report(result):
    return pages.text(result)
"""

FILES: Mapping[str, str] = {
    "benchmarks/one/bench.py": BENCH,
    "benchmarks/one/helper.c": "int one;",
    "benchmarks/two/race.py": "def go(*_): ...",
    "benchmarks/two/pages.py": "",
    "src/atoll/__init__.py": "from atoll.runtime import Engine",
    "src/atoll/plans/ir/__init__.py": "from atoll.plans.ir.action import Action\nfrom atoll.ir.draw import draw",
    "src/atoll/plans/ir/action.py": "import torch\nif TYPE_CHECKING:\n    import atoll.plans.ir.draw",
    "src/atoll/plans/ir/draw.py": "",
}


@pytest.fixture(scope="module")
def pages() -> dict[Path, str | None]:
    return claims.wanted_pages()


def test_pages_say_what_the_raw_files_say(pages: dict[Path, str | None]) -> None:
    found = {path: path.read_text(encoding="utf-8") if path.is_file() else None for path in pages}
    wrong = [path for path, text in pages.items() if found[path] != text]
    assert not wrong, f"{', '.join(path.relative_to(ROOT).as_posix() for path in wrong)}: run `make evidence`"


def test_every_result_has_a_page_and_every_page_of_a_benchmark_a_result(pages: dict[Path, str | None]) -> None:
    written = {path.parent.name for path in ROOT.glob("benchmarks/*/README.md")}
    # The page of the GPU kit is there before the first line.
    assert written == {*NAMES, "gpu"} == {path.parent.name for path in pages if path.match("benchmarks/*/README.md")}


def test_the_readme_has_the_table_once() -> None:
    assert len(PART.findall((ROOT / "README.md").read_text(encoding="utf-8"))) == 1


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.what for claim in CLAIMS])
def test_a_claim_stands_on_a_raw_file_or_on_tests(claim: Claim) -> None:
    assert bool(claim.raw) != bool(claim.tests)
    assert claim.raw in ("", *NAMES)
    for path in claim.tests:
        assert "\ndef test_" in (ROOT / path).read_text(encoding="utf-8"), path
    # Only layouts, ranks and tolerances are written by hand: a measured figure has a place.
    figures = re.findall(
        r"\d[\d.]*", re.sub(r"\{[^}]*\}|1e-\d+|\[.*?\]\(.*?\)|[\w/-]*[A-Za-z][\w-]*", "", claim.result)
    )
    assert set(figures) <= {"4", "8", "2"}, f"{claim.result}: {figures}"


@pytest.mark.parametrize("name", NAMES)
def test_a_raw_file_says_where_it_is_from(name: str) -> None:
    measured_in = provenance.load(name)["environment"]
    assert re.fullmatch("[0-9a-f]{40}", measured_in["commit"])
    assert {"date", "command", "cpu", "cores", "torch"} <= set(measured_in)
    assert measured_in["uncommitted_source"] == bool(measured_in["uncommitted"])
    assert f"benchmarks/{name}/bench.py" in measured_in["depends"]


def test_a_benchmark_depends_on_what_its_run_reaches() -> None:
    assert provenance.closure("benchmarks.one.bench", FILES.get) == {
        "benchmarks/one/bench.py",
        "benchmarks/one/helper.c",
        "benchmarks/two/race.py",  # imported late
        "src/atoll/plans/ir/__init__.py",
        "src/atoll/plans/ir/action.py",  # not draw.py, for type checkers, nor pages.py, for the report
    }


@pytest.mark.parametrize(
    ("path", "text", "is_older"),
    [
        ("benchmarks/two/race.py", '"""Words."""\n\ndef go( *_ ):  # more words\n    """Words."""\n    ...\n', False),
        ("benchmarks/two/race.py", "def go(*_): return 1", True),
        ("benchmarks/one/bench.py", BENCH.replace("pages.text", "pages.words"), False),
        ("benchmarks/one/bench.py", BENCH.replace("FILE)", "1)"), True),
        ("benchmarks/one/helper.c", "int two;", True),
        ("src/atoll/plans/ir/draw.py", "import this", False),
    ],
)
def test_a_result_is_older_if_the_code_of_a_file_changes(path: str, text: str, is_older: bool) -> None:
    depended = provenance.depends("one", FILES.get)
    assert provenance.changed(depended, FILES.get) == []
    assert provenance.changed(depended, {**FILES, path: text}.get) == ([path] if is_older else [])
    gone = {name: text for name, text in FILES.items() if name != path}
    assert provenance.changed(depended, gone.get) == ([path] if path in depended else [])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_what_is_not_committed_is_not_measured(tmp_path: Path) -> None:
    """In a repository of its own, whose only benchmark has changed since the last commit."""
    for path in ("run.py", "provenance.py", "environment.py", "claims.py", "confirmations.py"):
        target = tmp_path / "benchmarks" / path
        target.parent.mkdir(exist_ok=True)
        target.write_text((ROOT / "benchmarks" / path).read_text(encoding="utf-8"), encoding="utf-8")
    bench = tmp_path / "benchmarks" / "parity" / "bench.py"
    bench.parent.mkdir()
    bench.write_text("def run(arguments): raise SystemExit('measured')\n", encoding="utf-8")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)

    def measure(*options: str) -> str:
        command = [sys.executable, str(tmp_path / "benchmarks" / "run.py"), "parity", *options]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip()

    assert measure() == "measured"
    bench.write_text("def run(arguments): raise SystemExit('measured again')\n", encoding="utf-8")
    assert measure().startswith("parity depends on files that are not committed: benchmarks/parity/bench.py")
    assert measure("--quick") == measure("--uncommitted") == "measured again"


def test_a_place_without_a_figure_is_an_error() -> None:
    claim = Claim(what="a", how="b", result="{missing}", raw="parity")
    with pytest.raises(KeyError, match="missing"):
        claim.row()


def test_a_raw_file_has_a_line_for_each_row() -> None:
    names = [f"run {at}" for at in range(40)]
    raw = {"a": 1.5, "rows": [{"name": name, "seconds": [0.1, 0.2], "more": {"b": None}} for name in names], "c": {}}
    text = rows.to_text(raw)
    assert json.loads(text) == raw
    assert text.count("\n") == 40 + 6
    for name in NAMES:
        file = ROOT / provenance.raw_path(name)
        assert file.read_text(encoding="utf-8") == rows.to_text(json.loads(file.read_text(encoding="utf-8"))), name


def test_a_benchmark_depends_on_what_it_starts() -> None:
    """Past fault: two results that start `atoll train` called themselves current whatever changed in it."""
    files = {
        **FILES,
        "benchmarks/three/bench.py": 'import sys\ndef run(_):\n    return go([sys.executable, "-m", "atoll", "train"])',
        "benchmarks/four/bench.py": 'def run(_):\n    return go("-m", ["-m", "benchmarks.four.worker"])',
        "benchmarks/four/worker.py": "from benchmarks.two import race",
        "src/atoll/__main__.py": "from atoll.cli.main import main",
        "src/atoll/cli/main.py": "def main():\n    from atoll.plans.ir import Action",
    }
    assert provenance.closure("benchmarks.three.bench", files.get) == {
        "benchmarks/three/bench.py",
        "src/atoll/__init__.py",
        "src/atoll/__main__.py",
        "src/atoll/cli/main.py",
        "src/atoll/plans/ir/__init__.py",
        "src/atoll/plans/ir/action.py",
    }
    assert provenance.closure("benchmarks.four.bench", files.get) == {
        "benchmarks/four/bench.py",
        "benchmarks/four/worker.py",
        "benchmarks/two/race.py",
    }


def test_what_trains_depends_on_the_trainer() -> None:
    found = provenance.closure("benchmarks.quality.bench")
    assert {"src/atoll/cli/train.py", "src/atoll/training/run/loop.py", "src/atoll/runtime/engine.py"} <= found


NOW = datetime(2026, 11, 26, tzinfo=UTC)
LINKS = "[a](docs/evidence.md#first) [b](docs/evidence.md#first) [c](benchmarks/matrix/README.md)"


def due_result(name: str, date: str, confirmed_in: Mapping[str, float] | None = None, **more: float) -> due.Result:
    return due.result(name, {"date": f"{date}T00:00:00+00:00", **more}, LINKS, NOW, confirmed_in=confirmed_in)


def test_a_value_of_a_package_leads_to_no_more_than_the_package() -> None:
    """Past fault: `atoll.__version__` made every result depend on all that `import atoll` offers."""
    files = {
        **FILES,
        "benchmarks/five/bench.py": "from atoll import __version__\ndef run(_):\n    return __version__",
        "src/atoll/__init__.py": '__version__ = "1"\ndef more():\n    from atoll.ir import Action',
    }
    assert provenance.closure("benchmarks.five.bench", files.get) == {
        "benchmarks/five/bench.py",
        "src/atoll/__init__.py",
    }


def test_a_string_in_parts_has_one_digest_under_every_python() -> None:
    """Past fault: from Python 3.12 on, joined f-strings end in an empty part, and a GPU's lines were refused."""
    read, empty = ast.parse('f"{a}" "b"').body[0].value, ast.Constant(value="")  # type: ignore[attr-defined]
    more = ast.JoinedStr(values=[*read.values, empty])
    assert provenance._shape(more) == provenance._shape(read)
    assert provenance._shape(ast.JoinedStr(values=[*read.values, ast.Constant("c")])) != provenance._shape(read)


def test_the_most_urgent_result_is_measured_first() -> None:
    """By age, by links on the README, and by how long it takes; one that does not fit waits."""
    first = due_result("first", "2026-11-20", seconds=600.0)
    matrix = due_result("matrix", "2026-11-20")
    other = due_result("other", "2026-11-25")
    assert (first.full.days, first.full.links, first.full.minutes) == (6.0, 2, 10.0)
    assert (matrix.full.links, matrix.full.minutes) == (1, due.MINUTES["matrix"])
    assert (other.full.links, other.full.minutes) == (0, due.OTHER_MINUTES)
    assert due.order([other, matrix, first], 120.0) == [first.full, matrix.full, other.full]
    assert due.following([matrix, other], minutes=30.0) is other.full
    assert due.following([matrix, other], minutes=5.0) is None
    assert set(due.MINUTES) <= set(NAMES)


@pytest.mark.parametrize(
    ("full", "short", "left", "is_confirmed"),
    [
        (20.0, 12.0, 30.0, False),
        (20.0, 12.0, 15.0, True),  # the full one does not fit
        (60.0, 12.0, 90.0, True),  # it takes five times as long
        (60.0, None, 90.0, False),  # there is no short one, or it was refuted
        (60.0, None, 30.0, None),
        (60.0, 12.0, 10.0, None),
    ],
)
def test_a_result_is_confirmed_where_the_full_measurement_does_not_fit_or_is_much_longer(
    full: float, short: float | None, left: float, is_confirmed: bool | None
) -> None:
    confirmed_in = None if short is None else {"seconds": 60.0 * short}
    result = due_result("first", "2026-11-20", confirmed_in, seconds=60.0 * full)
    found = due.following([result], left)
    assert (None if found is None else found.confirms) is is_confirmed


def test_the_minutes_of_a_confirmation_are_those_of_the_last_one_or_an_estimate() -> None:
    race = due_result("two_islands", "2026-11-20", {})
    assert race.short is not None
    assert race.short.minutes == due.CONFIRMATIONS["two_islands"]
    assert race.short.urgency > race.full.urgency
