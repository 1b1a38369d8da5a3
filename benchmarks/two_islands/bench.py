"""Two islands of two ranks joined by a slow link: seconds against peak memory, beside FSDP2, DDP and DeepSpeed.

Needs root, `ip` and `tc`.
"""

from __future__ import annotations

from functools import partial

from benchmarks.islands import cases, pages, quick
from benchmarks.islands.cases import Case, Course
from benchmarks.islands.pages import NETWORK_WORDS, Page
from benchmarks.islands.work import Chain

CASE = Case(
    name="two_islands",
    work=Chain(),
    courses={"400 Mbit/s each way": Course(2, 2, 400e6)},
    counts_layouts=True,
)

PAGE = Page(
    title="Two islands",
    words=NETWORK_WORDS,
    command="make bench-islands",
)

run = partial(cases.run, CASE)
race_front = partial(quick.race_front, CASE)
confirm = partial(quick.confirm, CASE)
report = partial(pages.report, PAGE)
publish = partial(pages.publish, PAGE)
