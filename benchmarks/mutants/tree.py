"""A copy of the tree in which one file is damaged at a time, and a warm process that runs tests there."""

from __future__ import annotations

import compileall
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutants.warm import REPORT, WRITTEN


@dataclass(frozen=True)
class Test:
    """A test that ended. number: its place among those that ran.  seconds: processor time of all its processes."""

    name: str
    number: int
    seconds: float
    has_passed: bool


@dataclass(frozen=True)
class Outcome:
    """How a run of tests ended.

    code: pytest's, None if it was not waited for, and then `why`.  failed: the first test that failed.  seconds:
    processor time of all processes.
    """

    code: int | None
    why: str
    failed: str
    seconds: float
    tests: tuple[Test, ...]
    written: str


class Tree:
    """The files that git knows, and those it does not ignore, below a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="atoll-mutants-"))
        self.functions: list[str] = []
        """Of a copy with probes: the functions by number."""
        self._warm: subprocess.Popen[str] | None = None
        for name in _names(root):
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, self.path / name)
        # By content: damage within a second, of the same length, is invisible to times and sizes.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.path / "src", quiet=2, invalidation_mode=mode)

    def close(self) -> None:
        """End its processes, and remove it."""
        if self._warm is not None:
            assert self._warm.stdin is not None
            assert self._warm.stdout is not None
            self._warm.stdin.close()  # it answers what it was asked, and ends
            self._warm.stdout.close()
            self._warm.wait()
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def damaged(self, name: str, source: str) -> Iterator[None]:
        """With another content of one file."""
        file = self.path / name
        before = file.read_text(encoding="utf-8")
        file.write_text(source, encoding="utf-8")
        try:
            yield
        finally:
            file.write_text(before, encoding="utf-8")

    def test(self, words: Sequence[str], *, limit: float, keeps_kernels: bool = True) -> Outcome:
        """Run pytest, for at most `limit` seconds of processor time.

        keeps_kernels: numba may use what it has compiled before, which is by the file of a kernel and not by those of
        the kernels that it calls.
        """
        temporary = self.path / "temporary"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        (self.path / REPORT).unlink(missing_ok=True)
        environment = {} if keeps_kernels else {"NUMBA_CACHE_DIR": str(temporary / "kernels")}
        answer = self._ask({"words": list(words), "limit": limit, "environment": environment})
        report = self.path / REPORT
        lines = _lines(report.read_text(encoding="utf-8")) if report.is_file() else []
        other = {line[word] for line in lines for word in ("skipped", "failed") if word in line}
        tests = [
            Test(line["test"], line["number"], line["seconds"], line["test"] not in other)
            for line in lines
            if "test" in line
        ]
        failed = next((line["failed"] for line in lines if "failed" in line), "")
        written = (self.path / WRITTEN).read_text(encoding="utf-8", errors="replace")
        return Outcome(answer["code"], answer["why"], failed, answer["seconds"], tuple(tests), written[-4000:])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._warm is None:
            self._warm = self._start()
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.write(json.dumps(request) + "\n")
        self._warm.stdin.flush()
        answer = self._warm.stdout.readline()
        if not answer.strip():
            raise RuntimeError("the warm process has ended")
        return json.loads(answer)  # type: ignore[no-any-return]

    def _start(self) -> subprocess.Popen[str]:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(self.path / "src"), str(self.path))),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.path / "temporary"),
        }
        (self.path / "temporary").mkdir(exist_ok=True)
        started = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.mutants.warm"],
            cwd=self.path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert started.stdout is not None
        if started.stdout.readline() != "warm\n":
            raise RuntimeError("the warm process has not started")
        return started


def _names(root: Path) -> list[str]:
    """The files of a repository, or of a tree that is the copy of one."""
    if not (root / ".git").exists():
        return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (root / name).is_file() and not (root / name).is_symlink()]


def _lines(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # it was being written when its process was killed
    return found
