"""A model of 7 billion parameters on one node of A100, in small: an emulated device."""

from __future__ import annotations

from functools import partial

from benchmarks.islands import cases, pages, quick
from benchmarks.islands.cases import Case, Course
from benchmarks.islands.pages import DEVICE_WORDS, Page
from benchmarks.islands.work import Sleeping

CASE = Case(
    name="one_machine_a100",
    work=Sleeping(),
    courses={"four ranks": Course(1, 4)},
    rounds=2,
    slack=1.01,
)

PAGE = Page(
    title="One node of A100, emulated",
    words=f"{DEVICE_WORDS} Four ranks talk over shared memory or the loopback. Trust ratios, not seconds.",
    command="make bench-machine",
)

run = partial(cases.run, CASE)
race_front = partial(quick.race_front, CASE)
confirm = partial(quick.confirm, CASE)
report = partial(pages.report, PAGE)
publish = partial(pages.publish, PAGE)
