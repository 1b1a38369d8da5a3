"""Every setting that an expert would try: of Atoll's engine, and of torch's pipelining with FSDP2.

A setting knows its name and its neighbours, which differ from it in one choice; the search walks from seeds along
neighbours (search.py). The same choices are open to both sides: schedule, stages a rank, number of microbatches, how
long parameters stay gathered, how gradients are reduced, how much is gathered at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from atoll.plans.ir.residency import REDUCTIONS, RESIDENCIES, Reduction, Residency

CHUNKS = (2, 4)
MICROBATCHES = (8, 16, 32)
LAYERS_A_RANK = 4

_LOOPS = ("interleaved", "breadth-first", "unit")
_SPLITS = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v", "unit")
SCHEDULES = ("1f1b", "interleaved", "breadth-first", "unit", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v")

TORCH_LOOPS = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
TORCH_LINES = ("GPipe", "1F1B")
TORCH_SCHEDULES = (*TORCH_LINES, *TORCH_LOOPS, "ZBVZeroBubble", "DualPipeV")

Value = TypeVar("Value")
Layout = Literal["NNN", "NNG", "NGG", "GGG"]
_LAYOUTS: tuple[Layout, ...] = ("NNG", "NGG", "GGG")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """How Atoll runs.

    chunks: stages a rank, where the schedule lets one choose.  unit: layers that are gathered together.
    posts: whether the optimizer's step is validated afterwards.  is_ahead: whether it gathers ahead.
    """

    schedule: str
    layout: Layout = "GGG"
    residency: Residency = "action"
    reduction: Reduction = "microbatch"
    microbatches: int = 16
    chunks: int = 2
    unit: int = 1
    posts: bool = False
    is_ahead: bool = True

    @property
    def is_ours(self) -> bool:
        """Whose it is."""
        return True

    @property
    def is_loop(self) -> bool:
        """Whether the number of stages a rank is open."""
        return self.schedule in _LOOPS

    @property
    def schedule_options(self) -> dict[str, int]:
        """The options of `schedules.build` besides ranks and microbatches."""
        return {"chunks": self.chunks} if self.is_loop else {}

    @property
    def stages_a_rank(self) -> int:
        """One on a line, two on a V, what is chosen on a loop."""
        return self.chunks if self.is_loop else 1 if self.schedule in ("1f1b", "zb-h1", "zb-h2") else 2

    @property
    def gathers(self) -> bool:
        """Whether parameters rest sharded."""
        return self.layout == "GGG"

    @property
    def name(self) -> str:
        """What is special, after the schedule and the layout."""
        words = ["atoll", self.schedule + (f" {self.chunks}" if self.is_loop else "")]
        words.append(self.layout)
        if self.gathers:
            words.append(f"{self.residency}/{self.reduction}")
        elif self.layout == "NGG":
            words.append(self.reduction)
        words.append(f"m {self.microbatches}")
        words += [f"unit {self.unit}"] * (self.unit > 1)
        words += ["posted"] * self.posts
        words += ["nothing ahead"] * (not self.is_ahead)
        return " ".join(words[:2]) + ", " + ", ".join(words[2:])

    def neighbours(self) -> Iterator[Ours]:
        """One choice changed."""
        for value in _beside(self.microbatches, MICROBATCHES):
            yield replace(self, microbatches=value)
        yield replace(self, posts=not self.posts)
        for layout in _beside(self.layout, _LAYOUTS):
            yield replace(self, layout=layout).plain()
        in_a_line = self.stages_a_rank == 1  # the one stage's: `run` is `step`
        residencies: tuple[Residency, ...] = ("unit", "step") if in_a_line else RESIDENCIES
        reductions: tuple[Reduction, ...] = ("microbatch", "step") if in_a_line else REDUCTIONS
        if self.gathers:
            yield from (replace(self, residency=each) for each in _beside(self.residency, residencies))
        if self.layout in ("NGG", "GGG"):
            yield from (replace(self, reduction=each) for each in _beside(self.reduction, reductions))
        if self.is_loop:
            yield from (replace(self, chunks=value).plain() for value in _beside(self.chunks, CHUNKS))
        for unit in _beside(self.unit, (1, 2, 4)):
            if unit * self.stages_a_rank <= LAYERS_A_RANK:
                yield replace(self, unit=unit)

    def plain(self) -> Ours:
        """The same without choices that mean nothing here."""
        residency = self.residency if self.gathers else "unit"
        reduction = self.reduction if self.layout in ("NGG", "GGG") else "microbatch"
        unit = min(self.unit, LAYERS_A_RANK // self.stages_a_rank)
        return replace(self, residency=residency, reduction=reduction, unit=unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Theirs:
    """How torch runs.

    is_kept: `reshard_after_forward=False`.  is_direct: gradients are reduced by a direct exchange that is waited for
    before the optimizer's step, as a stream of NCCL's would be; otherwise by gloo's reduce-scatter, which sends an
    all-reduce's bytes and blocks.  is_ahead: everything is gathered as the step begins (pipelining's runtime for
    several stages a rank does so by itself).
    """

    schedule: str
    is_kept: bool = True
    is_direct: bool = True
    is_ahead: bool = True
    microbatches: int = 16
    chunks: int = 2
    unit: int = 1

    @property
    def is_ours(self) -> bool:
        """Whose it is."""
        return False

    @property
    def is_loop(self) -> bool:
        """Whether the number of stages a rank is open."""
        return self.schedule in TORCH_LOOPS

    @property
    def is_line(self) -> bool:
        """Whether a rank has one stage."""
        return self.schedule in TORCH_LINES

    @property
    def stages_a_rank(self) -> int:
        """One on a line, two on a V, what is chosen on a loop."""
        return self.chunks if self.is_loop else 1 if self.is_line else 2

    @property
    def name(self) -> str:
        """What is special, after the schedule."""
        words = ["torch", self.schedule + (f" {self.chunks}" if self.is_loop else "")]
        words.append("kept" if self.is_kept else "resharded")
        words += ["gloo's reduction"] * (not self.is_direct)
        words += ["gathered late"] * (self.is_line and not self.is_ahead)
        words.append(f"m {self.microbatches}")
        words += [f"unit {self.unit}"] * (self.unit > 1)
        return " ".join(words[:2]) + ", " + ", ".join(words[2:])

    def neighbours(self) -> Iterator[Theirs]:
        """One choice changed."""
        for value in _beside(self.microbatches, MICROBATCHES):
            yield replace(self, microbatches=value)
        yield replace(self, is_kept=not self.is_kept)
        yield replace(self, is_direct=not self.is_direct)
        if self.is_line:
            yield replace(self, is_ahead=not self.is_ahead)
        for unit in _beside(self.unit, (1, 2, 4)):
            if unit * self.stages_a_rank <= LAYERS_A_RANK:
                yield replace(self, unit=unit)
        if self.is_loop:
            for value in _beside(self.chunks, CHUNKS):
                yield replace(self, chunks=value, unit=min(self.unit, LAYERS_A_RANK // value))


Setting = Ours | Theirs


def _beside(value: Value, known: tuple[Value, ...]) -> Iterator[Value]:
    """The values before and after one of an order."""
    if value in known:
        at = known.index(value)
        yield from known[max(0, at - 1) : at]
        yield from known[at + 1 : at + 2]


def seeds() -> tuple[Setting, ...]:
    """Where the search begins: every schedule, with the least and the most that stays whole."""
    ours = [Ours(schedule=schedule, layout=layout) for schedule in SCHEDULES for layout in ("NNG", "GGG")]
    ours += [Ours(schedule=each, residency="run", reduction="run") for each in ("breadth-first", "unit")]
    ours += [Ours(schedule=each, layout="NNG", posts=True) for each in ("zb-h2", "zb-v")]
    theirs = [Theirs(schedule=schedule, is_kept=kept) for schedule in TORCH_SCHEDULES for kept in (True, False)]
    return (*theirs, *ours)


LINE: tuple[Ours, ...] = (
    Ours(schedule="1f1b"),
    Ours(schedule="1f1b", residency="unit", reduction="step"),
    Ours(schedule="1f1b", residency="step", reduction="microbatch"),
    Ours(schedule="1f1b", residency="step", reduction="step"),
)
"""1F1B with everything sharded, from the least that stays whole to the most."""

EXTRA: tuple[Setting, ...] = (
    Ours(schedule="1f1b", layout="NNN"),
    Ours(schedule="1f1b", is_ahead=False),
    *LINE[1:],
    Theirs(schedule="1F1B", is_direct=False),
)
"""Visited whatever the search finds: what a reader would ask for."""
