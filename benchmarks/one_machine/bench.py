"""Two and four ranks of one machine: how little a step adds to its compute, and what it holds.

There is no slow link here. Ranks have a thread each, and share the cores where there are fewer.
"""

from __future__ import annotations

from functools import partial

from benchmarks.islands import cases, pages, quick
from benchmarks.islands.cases import Case, Course
from benchmarks.islands.pages import Page
from benchmarks.islands.work import Chain

CASE = Case(
    name="one_machine",
    work=Chain(),
    courses={"four ranks": Course(1, 4), "two ranks": Course(1, 2)},
    rounds=5,
)

PAGE = Page(
    title="One machine",
    words="Ranks talk over shared memory or the loopback, four of them on two cores. Trust ratios, not seconds.",
    command="make bench-machine",
)

run = partial(cases.run, CASE)
race_front = partial(quick.race_front, CASE)
confirm = partial(quick.confirm, CASE)
report = partial(pages.report, PAGE)
publish = partial(pages.publish, PAGE)
