"""docs/bugs-elsewhere.md says what its scripts print with the installed torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from atoll.testing import progress

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "bugs-elsewhere.md").read_text(encoding="utf-8")
COLUMNS = re.findall(r"(?:torch|DeepSpeed) (\d+\.\d+\.\d+) \|", PAGE)
ROWS = {
    row[0]: row[1:]
    for row in re.findall(r"^\| `([^`]+)` \| .+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
}
SPOILED = {"deepspeed_pipeline.py": "stage 0", "deepspeed_zero2.py": "rank", "split_backward.py": "stage 1",
           "shared_weight.py": "stage 1"}  # fmt: skip
"""Script -> text of the output lines that may report wrong gradients; all other lines must report right ones."""
LAYOUTS = re.search(r"under ([A-Z, and]+)\.", PAGE)


FORKED = """\
import functools, runpy, sys
import torch.multiprocessing as processes
processes.spawn = functools.partial(processes.start_processes, start_method="fork")
script, *sys.argv[1:] = sys.argv[1:]
sys.path.insert(0, script.rpartition("/")[0])
runpy.run_path(script, run_name="__main__")
"""
"""Runs a script whose ranks are forks of it: they import nothing again, which takes most of their time."""


def printed(words: Sequence[str], folder: Path) -> list[str]:
    script, *rest = words
    path = ROOT / "docs" / "examples" / "bugs" / script
    result = progress.run([sys.executable, "-c", FORKED, str(path), *rest], cwd=folder)
    assert result.returncode == 0, result.stderr
    return [
        line for line in result.stdout.splitlines() if line.startswith(("torch ", "deepspeed ", "linears", "twice"))
    ]


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("command", ROWS)
def test_a_script_prints_what_the_page_says(command: str, tmp_path: Path) -> None:
    words = command.split()
    package = "deepspeed" if words[0].startswith("deepspeed") else "torch"
    pytest.importorskip(package)
    installed = version(package).partition("+")[0]
    columns = COLUMNS[3:] if package == "deepspeed" else COLUMNS[:3]
    if installed not in columns:
        pytest.skip(f"the page has no column of {package} {installed}")
    said = ROWS[command][columns.index(installed)]
    wanted = {
        "right": r"off by 0%|of 6 gradients 0 missing, 0 wrong",
        "6 of 6 missing": "of 6 gradients 6 missing, 0 wrong",
        "6 of 6 wrong": "of 6 gradients 0 missing, 6 wrong",
    }.get(said, said)
    lines = printed(words, tmp_path)
    wrong = [line for line in lines if SPOILED[words[0]] in line]
    right = [line for line in lines if line not in wrong]
    assert len(lines) == (2 if package == "deepspeed" or words[0] == "shared_weight.py" else 4)
    assert wrong
    assert all(re.search(wanted, line) for line in wrong)
    assert all(re.search("off by 0%|0 missing, 0 wrong", line) for line in right)


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("at", range(4))
def test_ours_are_right(tmp_path: Path, at: int) -> None:
    assert LAYOUTS is not None
    layouts = re.findall(r"[A-Z]{3}", LAYOUTS[1])
    assert len(layouts) == 4
    lines = printed(["with_atoll.py", layouts[at]], tmp_path)
    assert len(lines) == 2 * 4
    assert all(re.search(r": 0 of [36] gradients wrong$", line) for line in lines)


def test_scripts_are_short() -> None:
    for script in (ROOT / "docs" / "examples" / "bugs").glob("*.py"):
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
