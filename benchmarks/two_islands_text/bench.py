"""Two islands of two ranks and a decoder of 100 million parameters on 512 tokens a microbatch.

Needs root, `ip` and `tc`.
"""

from __future__ import annotations

from functools import partial

from benchmarks.islands import cases, pages, quick
from benchmarks.islands.cases import Case, Course
from benchmarks.islands.pages import NETWORK_WORDS, Page
from benchmarks.islands.work import Text

CASE = Case(
    name="two_islands_text",
    work=Text(samples=1),  # two take twice the hours, and hide more of what travels behind compute
    courses={"400 Mbit/s each way": Course(2, 2, 400e6)},
    rounds=2,
)

PAGE = Page(
    title="Two islands, a decoder of 100 million parameters",
    words=NETWORK_WORDS,
    command="make bench-islands",
)

run = partial(cases.run, CASE)
race_front = partial(quick.race_front, CASE)
confirm = partial(quick.confirm, CASE)
report = partial(pages.report, PAGE)
publish = partial(pages.publish, PAGE)
