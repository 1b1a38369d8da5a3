"""`tests/gpu` runs without a GPU: a case of each test on the CPU, so that no change of the engine breaks it unseen.
`pytest tests/gpu --device cpu` runs every case, which here would repeat the tests of ranks with other numbers.

Past bug: the end of the step moved into `Executor.run`, and twelve cases that watched the run watched the optimizer.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from atoll.testing.progress import run

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "gpu"


def rehearse(*words: str) -> str:
    """Run tests of the folder in a process of its own, as `make gpu` does, and return its last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "cpu", *words]
    # A GPU that is there is hidden: what is rehearsed is what a machine without one can show.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = run(command, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def counts(line: str) -> dict[str, int]:
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", line)}


@pytest.mark.wide(0)
def test_one_case_of_each_test() -> None:
    found = counts(rehearse(str(FOLDER), "--quick"))
    tests = sum(path.read_text(encoding="utf-8").count("\ndef test_") for path in FOLDER.glob("test_*.py"))
    assert found["passed"] == tests
    assert not {"failed", "skipped", "error", "errors", "xfailed"} & found.keys()


@pytest.mark.slow
def test_the_folder_is_loud_without_a_gpu() -> None:
    """Named without a device, it says so and fails: no tests must not look green."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = run(command, cwd=ROOT, env=environment)
    assert done.returncode == 4
    assert "needs a CUDA device" in done.stderr


@pytest.mark.slow
def test_the_folder_needs_pytest_torch_and_atoll_alone() -> None:
    """A machine that is lent for minutes has no other packages: without hypothesis and xdist it still collects."""
    hidden = "import sys; sys.modules.update(hypothesis=None, xdist=None, transformers=None)\n"
    program = (
        f"{hidden}import pytest\nsys.exit(pytest.main({['-q', '--collect-only', '--device', 'cpu', str(FOLDER)]}))"
    )
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run(command, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert counts(done.stdout)["tests"] > 100
