"""Exceptions that nobody expected, of a library, a model or a bug, as a command prints them.

    Traceback (most recent call last): ...                               at most LONGEST characters
    error: KeyError: 'a' (modeling_llama.py, line 12, in forward)        one line, at most LONGEST_LINE characters

What is cut is a file, which a last line names: a rank's error cannot always be reproduced.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from traceback import TracebackException

from atoll.base.errors import AtollError, RankError
from atoll.base.units import bounded

LONGEST_TRACEBACK = RankError.longest
"""Most characters of a traceback."""
LONGEST_ENTRY = AtollError.longest
"""Most characters of one frame of it, and of one message."""
LONGEST_LINE = 1_000
"""Most characters of the line that says what happened and where."""


def print_unexpected(error: BaseException, *, who: str = "", line: str | None = None) -> None:
    """Print a traceback and the error's line on stderr.

    who: begins the line, such as "rank 1".  line: instead of the error's own.
    """
    found = TracebackException.from_exception(error)
    if line is None:
        line = f"{who}: {_line(found)}" if who else _line(found)
    entries = [entry.encode(errors="replace").decode() for entry in found.format()]
    text = bounded("".join(_bounded_entry(entry) for entry in entries), LONGEST_TRACEBACK)
    sys.stderr.write(f"{text}error: {line}\n")
    if text != (whole := "".join(entries)):
        with suppress(OSError):
            sys.stderr.write(f"the whole traceback, of {len(whole)} characters, is in {_kept(whole)}\n")
    sys.stderr.flush()


def _line(found: TracebackException) -> str:
    words = " ".join("".join(found.format_exception_only()).encode(errors="replace").decode().split())
    if not found.stack:
        return bounded(words, LONGEST_LINE)
    last = found.stack[-1]
    place = bounded(f" ({last.filename}, line {last.lineno}, in {last.name})", LONGEST_LINE // 2)
    return bounded(words, LONGEST_LINE - len(place)) + place


def _bounded_entry(entry: str) -> str:
    return entry if len(entry) <= LONGEST_ENTRY else f"{bounded(entry.rstrip(), LONGEST_ENTRY)}\n"


def _kept(text: str) -> str:
    """Return the path of a new file with the text, which only this user can read."""
    with tempfile.NamedTemporaryFile("w", prefix="atoll-error-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(text)
    return file.name
