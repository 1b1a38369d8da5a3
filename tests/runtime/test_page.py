"""Where a process is, read from another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from atoll.runtime.page import AT, TEXT_BYTES, Page, PageView, read_page, status_of


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page()
    yield page
    os.close(page.descriptor)


def read(page: Page) -> str:
    return read_page(os.getpid(), page.descriptor)


def test_a_page_says_the_section_then_the_instruction_then_the_section(page: Page) -> None:
    assert read(page) == ""
    page.say("building the engine")
    assert read(page) == "building the engine"
    first, second = page.add(["0F0", "0B0"]), page.add(["1F0", "1B0", "1W0"])
    page.use(second, 3, 7)
    assert read(page) == "building the engine", "the program has not begun"
    for at, line in enumerate(["1F0", "1B0", "1W0"]):
        page.numbers[AT] = at
        assert read(page) == f"step 7, {line}"
    page.use(first, 2, 0)
    page.numbers[AT] = 1
    assert read(page) == "evaluation, 0B0"
    page.numbers[AT] = -1
    page.say("saving")
    assert read(page) == "saving"


def test_words_that_are_too_long_are_cut(page: Page) -> None:
    page.say("x" * 1000)
    assert read(page) == "x" * 256
    page.use(page.add(["y" * 1000, "z"]), 2, 1)
    page.numbers[AT] = 0
    assert read(page) == f"step 1, {'y' * TEXT_BYTES}"
    page.numbers[AT] = 1
    assert read(page) == "step 1, z"


def test_what_is_no_page_is_not_read(page: Page) -> None:
    """A rank says which descriptor: it may be that of a pipe, or of a file that is not its own to show."""
    reads, writes = os.pipe()
    with open(__file__) as file:
        for other in (reads, writes, file.fileno(), 10_000, -1):
            assert read_page(os.getpid(), other) == ""
    os.close(reads)
    os.close(writes)
    page.numbers[1:5] = memoryview(b"\xff" * 32).cast("q")
    page.numbers[AT] = 0
    assert read(page) == "", "numbers that no page has"


def test_a_view_outlives_the_process() -> None:
    code = "import sys, time; from atoll.runtime.page import own_page; page = own_page(); page.say('saving'); "
    code += "print(page.descriptor, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    view = PageView(process.pid, int(process.stdout.readline()))
    process.kill()
    process.communicate()
    assert view.read() == "saving"
    assert read_page(process.pid, 3) == ""


def test_the_status_of_a_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert status_of(process.pid) == "T"
    process.kill()
    process.wait()
    assert status_of(process.pid) == "X"
    assert status_of(os.getpid()) == "R"
