"""A model of 7 billion parameters on two nodes of eight A100, in small: an emulated device and link.

Needs root, `ip` and `tc`.
"""

from __future__ import annotations

from functools import partial

from benchmarks.islands import cases, pages, quick
from benchmarks.islands.cases import Case, Course
from benchmarks.islands.pages import DEVICE_WORDS, NETWORK_WORDS, Page
from benchmarks.islands.work import Sleeping

WORK = Sleeping()

CASE = Case(
    name="two_islands_a100",
    work=WORK,
    courses={f"{rate} Gb/s between nodes": Course(2, 2, WORK.rate(rate)) for rate in (100, 10)},
    rounds=2,
    slack=1.01,
)

PAGE = Page(
    title="Two nodes of A100, emulated",
    words=f"{DEVICE_WORDS} {NETWORK_WORDS}",
    command="make bench-islands",
)

run = partial(cases.run, CASE)
race_front = partial(quick.race_front, CASE)
confirm = partial(quick.confirm, CASE)
report = partial(pages.report, PAGE)
publish = partial(pages.publish, PAGE)
