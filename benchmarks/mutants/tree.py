"""A copy of the tree in which one file is damaged at a time."""

from __future__ import annotations

import compileall
import os
import py_compile
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "ATOLL_MUTANT_TREE"
"""A variable that every process of a tree inherits, by which those that are left are found."""

LARGEST = 8 << 30
"""Bytes that a process may take: a mutant may take without end."""


@dataclass(frozen=True)
class Outcome:
    """How a run of tests ended. `code` is pytest's, None where it took too long; `failed` is the first that failed."""

    code: int | None
    failed: str
    seconds: float
    written: str


class Tree:
    """The files that git knows, and those it does not ignore, below a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="atoll-mutants-"))
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.split("\0"):
            if name and (root / name).is_file() and not (root / name).is_symlink():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.path / name)
        # By content: damage within a second, of the same length, is invisible to times and sizes.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.path / "src", quiet=2, invalidation_mode=mode)

    def close(self) -> None:
        """Remove it."""
        self._end_what_is_left()
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

    def test(self, tests: Sequence[str], *, limit: float) -> Outcome:
        """Run tests up to the first that fails, for at most `limit` seconds."""
        temporary = self.path / "temporary"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        environment = os.environ | {
            "PYTHONPATH": str(self.path / "src"),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
            MARK: str(self.path),
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
        begin = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (LARGEST, LARGEST))
        try:
            written, _ = process.communicate(timeout=limit)
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            self._end_what_is_left()
            written, code = process.communicate()[0], None
        self._end_what_is_left()
        failed = next((line.split()[1] for line in written.splitlines() if line.startswith(("FAILED", "ERROR "))), "")
        return Outcome(code, failed, round(time.monotonic() - begin, 1), written[-2000:])

    def _end_what_is_left(self) -> None:
        """Ranks have sessions of their own and may outlive a damaged parent."""
        mark = f"{MARK}={self.path}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        os.kill(int(entry.name), signal.SIGKILL)
