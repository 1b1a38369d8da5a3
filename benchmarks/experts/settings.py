"""The settings of both courses: what an expert of each system would try, few enough to visit all in an hour.

`x1` and `x4` are microbatches of a step. Atoll's settings are those that gather experts (`expert` 1) beside those that
exchange tokens, in the same layouts. FSDP2 and HSDP shard experts with their block or apart, free parameters after each
forward, keep them until the backward or for the step, reduce each microbatch or the last one, and prefetch two units.
Most use a true reduce-scatter, which is the faster one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from benchmarks.islands.cases import Course
from benchmarks.islands.contenders import Atoll, Ddp, DeepSpeed, Fsdp2, Setting, has_deepspeed

MICROBATCHES = 4

WHOLE = 500
"""Megabytes of a bucket that holds all gradients."""

ONCE: Any = {"after": "step", "reduce": "last", "across": "last"}
"""Gathered once a step and reduced once, as FSDP2 accumulates where there is memory."""

Stage = Literal["2", "3", "mics", "hpz"]

Full = partial(Fsdp2, scatter="direct")
Groups = partial(Fsdp2, groups=True, scatter="direct")


def settings(course: Course) -> Sequence[Setting]:
    """All settings of a course, Atoll's first and a peer's last."""
    if course.inter == 1:
        return [*_ours_on_one_machine(), *_peers_on_one_machine()]
    return [*_ours_on_islands(), *_peers_on_islands()]


def _ours_on_one_machine() -> list[Setting]:
    found: list[Setting] = []
    for expert in (4, 2, 1):
        found += [Atoll(layout, expert=expert) for layout in ("GGG", "NGG", "NNG", "NNN")]
        found += [Atoll("GGG", MICROBATCHES, expert=expert), Atoll("GGG", expert=expert, recompute=True)]
    for expert in (4, 1):
        found.append(Atoll("NNG", MICROBATCHES, expert=expert))
        found.append(Atoll("GGG", MICROBATCHES, expert=expert, prefetch=0))
    return [*found, Atoll("GGG", MICROBATCHES, expert=4, recompute=True)]


def _ours_on_islands() -> list[Setting]:
    found: list[Setting] = []
    for expert in (2, 1):
        found += [Atoll(layout, expert=expert) for layout in ("IIG", "NIG", "NNG", "III", "GGG")]
        found += [Atoll(layout, MICROBATCHES, expert=expert) for layout in ("IIG", "NNG", "GGG")]
        found.append(Atoll("IIG", expert=expert, recompute=True))
    # The dense part and the experts in layouts of their own: only one of them crosses the link in each microbatch.
    found += [Atoll("NNG", expert=2, experts="GGG"), Atoll("GGG", expert=2, experts="NNG")]
    return [*found, Atoll("IIG", MICROBATCHES, expert=2, recompute=True)]


def _peers_on_one_machine() -> list[Setting]:
    found: list[Setting] = [*_ddp(), *_deepspeed("2", "3")]
    found += [Groups(), Groups(after="keep"), Groups(apart=True, after="keep"), Groups(MICROBATCHES, **ONCE)]
    found += [Fsdp2(apart=True), Full(MICROBATCHES, prefetch=0), Full(MICROBATCHES, recompute=True)]
    for apart in (False, True):
        found += [Full(apart=apart, after=after) for after in ("free", "keep")]
        found += [Full(apart=apart, prefetch=0), Full(apart=apart, recompute=True)]
        found += [Full(MICROBATCHES, apart=apart, after="step"), Full(MICROBATCHES, apart=apart, **ONCE)]
        found.append(Full(MICROBATCHES, apart=apart))
    return found


def _peers_on_islands() -> list[Setting]:
    found: list[Setting] = [*_ddp(), *_deepspeed("2", "mics", "hpz")]
    found += [Full(), Full(apart=True), Full(after="keep"), Full(after="island"), Full(recompute=True)]
    found += [Full(MICROBATCHES), Full(MICROBATCHES, **ONCE)]
    found += [Groups(prefetch=0), Fsdp2(groups=True, after="keep")]
    found += [Groups(MICROBATCHES, after="step", across="last"), Groups(MICROBATCHES, reduce="last", across="last")]
    found.append(Groups(MICROBATCHES, across="last", recompute=True))
    for apart in (False, True):
        found += [Groups(apart=apart), Groups(apart=apart, after="keep"), Groups(apart=apart, recompute=True)]
        found += [Groups(MICROBATCHES, apart=apart, **ONCE), Groups(MICROBATCHES, apart=apart, across="last")]
    return found


def _ddp() -> list[Setting]:
    return [Ddp(), Ddp(bucket=WHOLE), Ddp(zero=True), Ddp(MICROBATCHES)]


def _deepspeed(*stages: Stage) -> list[Setting]:
    return [DeepSpeed(stage, overlap=True) for stage in stages] if has_deepspeed() else []
