"""Two ranks of one machine and a decoder of 100 million parameters on 512 tokens a microbatch."""

from __future__ import annotations

from functools import partial

from benchmarks.islands import cases, pages, quick
from benchmarks.islands.cases import Case, Course
from benchmarks.islands.pages import Page
from benchmarks.islands.work import Text

CASE = Case(
    name="one_machine_text",
    work=Text(samples=1),  # two take twice the hours, and hide more of what travels behind compute
    courses={"two ranks": Course(1, 2)},
    rounds=2,
)

PAGE = Page(
    title="One machine, a decoder of 100 million parameters",
    words="Two ranks with a core each talk over shared memory or the loopback. Trust ratios, not seconds.",
    command="make bench-machine",
)

run = partial(cases.run, CASE)
race_front = partial(quick.race_front, CASE)
confirm = partial(quick.confirm, CASE)
report = partial(pages.report, PAGE)
publish = partial(pages.publish, PAGE)
