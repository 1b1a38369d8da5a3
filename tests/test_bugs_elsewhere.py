"""docs/bugs-elsewhere.md says what its scripts print with the installed torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from atoll.testing import progress

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "bugs-elsewhere.md").read_text(encoding="utf-8")
COLUMNS = re.findall(r"torch (\d+\.\d+\.\d+) \|", PAGE)
ROWS = {
    row[0]: row[1:]
    for row in re.findall(r"^\| `([^`]+)` \| .+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
}


@pytest.mark.slow
@pytest.mark.parametrize("command", ROWS)
def test_a_script_prints_what_the_page_says(command: str, tmp_path: Path) -> None:
    version = torch.__version__.partition("+")[0]
    if version not in COLUMNS:
        pytest.skip(f"the page has no column of torch {version}")
    script, *words = command.split()
    result = progress.run([sys.executable, str(ROOT / "docs" / "examples" / "bugs" / script), *words], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("torch ")]
    said = ROWS[command][COLUMNS.index(version)]
    wanted = {
        "off by 86%": "gradient off by 86%",
        "right": r"gradient off by 0%|of 6 gradients 0 missing, 0 wrong",
        "6 of 6 missing": "of 6 gradients 6 missing, 0 wrong",
        "6 of 6 wrong": "of 6 gradients 0 missing, 6 wrong",
    }[said]
    ends = {stage: [line for line in lines if f"stage {stage}" in line] for stage in (0, 1)}
    assert all(re.search(wanted, line) for line in ends[1])
    assert ends[1]
    assert all(re.search("off by 0%|0 missing, 0 wrong", line) for line in ends[0])


def test_scripts_are_short() -> None:
    for script in (ROOT / "docs" / "examples" / "bugs").glob("*.py"):
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
