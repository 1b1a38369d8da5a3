"""The figures of docs/which-schedule.md: every number is of a schedule that is built and played here.

[Note: what the figures assume]
Unless a figure varies it: p = 8 ranks, m = 32 microbatches, F = I = W = 1 on every rank, no hop, the input's gradient
sent after I. A microbatch keeps one unit of memory from F to I and, where the backward is split, one from I to W.
Orders are built as a config builds them, without costs, except those of `auto` and those whose name says `for costs`:
their search knows the costs that are played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

from charts import Axis, Series, bar_chart, line_charts, markdown_table, point_charts

from atoll.plans.ir import Schedule, insert_sharding
from atoll.plans.ir.residency import collective_counts
from atoll.plans.schedules import CATALOGUE, Memory, build
from atoll.program.sim import Costs, simulate
from atoll.program.trace import Trace

RANKS, MICROBATCHES = 8, 32
SIZES = f"{RANKS} ranks, {MICROBATCHES} microbatches"
EVEN = Costs()

COLOURS: Mapping[str, str] = {
    "gpipe": "#7d8590",
    "1f1b": "#d9534f",
    "interleaved": "#c77f1a",
    "gis": "#96700f",
    "gis-h": "#8c5f4a",
    "breadth-first": "#8a9a1f",
    "zb-h1": "#2f7fd1",
    "zb-h2": "#7a5bd0",
    "zb-v": "#c2409a",
    "v-half": "#1f9e89",
    "v-min": "#3aa655",
    "dualpipe-v": "#b0653a",
    "unit": "#5a8fa8",
    "auto": "#d4a017",
}
SEARCHED_COLOUR = COLOURS["auto"]

PERCENTS: Mapping[float, str] = {rate / 100: f"{rate} %" for rate in (1, 2, 5, 10, 20, 50)}


@dataclass(frozen=True)
class Subject:
    """What a curve is of: a schedule of the catalogue, with options, built for the costs that are played or without."""

    schedule: str
    label: str = ""
    knows_costs: bool = False
    chunks: int | None = None
    placement: str | None = None
    limit: float | tuple[float, ...] | None = None
    objective: str = "makespan"

    @property
    def name(self) -> str:
        return self.label or self.schedule

    @property
    def colour(self) -> str:
        return COLOURS.get(self.schedule, SEARCHED_COLOUR)

    def series(self, points: Iterable[tuple[float, float]], *, is_line: bool = True) -> Series:
        """A curve of it."""
        return Series(self.name, tuple(points), self.colour, self.knows_costs, is_line)

    def steps(self, few: Sequence[float], many: Sequence[float]) -> Sequence[float]:
        """Where its curve has points: a search for each would take long."""
        return few if self.knows_costs else many


@cache
def _built(subject: Subject, costs: Costs, microbatches: int) -> Schedule:
    return build(
        subject.schedule,
        ranks=RANKS,
        microbatches=microbatches,
        costs=costs if subject.knows_costs else None,
        chunks=subject.chunks,
        placement=subject.placement,
        memory_limit=subject.limit,
        objective=subject.objective if "objective" in CATALOGUE[subject.schedule].options else None,
    )


def schedule_of(subject: Subject, costs: Costs = EVEN, microbatches: int = MICROBATCHES) -> Schedule:
    """Searched for once, whatever it is called in a picture and whatever costs it does not know."""
    return _built(replace(subject, label=""), costs if subject.knows_costs else EVEN, microbatches)


@cache
def play(subject: Subject, costs: Costs = EVEN, microbatches: int = MICROBATCHES) -> Trace:
    return simulate(schedule_of(subject, costs, microbatches), costs, Memory())


def percent(rate: float) -> str:
    return f"{max(0.0, rate):.1%}"  # rounding can leave less than nothing


def rates_axis(most: int, step: int) -> Axis:
    """Bubble rates from 0 to `most` percent."""
    ticks = {rate / 100: f"{rate} %" for rate in range(0, most + 1, step)}
    return Axis("", ticks, 0.0, most / 100)


# ---- memory against bubble

SHARES: Mapping[float, str] = {0.5: "1/2", 0.75: "3/4", 1.0: "1", 1.5: "1½", 2.0: "2", 4.0: "4"}
LINE_LIMITS = (0.75, 1.0)
V_LIMITS = (0.5, 0.625, 0.75, 1.0)
SPAN_LIMITS = (1.0, 1.25, 1.5, 1.75, 2.0)
SINGLE = tuple(Subject(name) for name in CATALOGUE)


def kept(trace: Trace) -> float:
    """Memory of the fullest rank, 1F1B's being 1."""
    return max(trace.peak_bytes) / RANKS


def limited(placement: str, share: float, objective: str = "makespan") -> Subject:
    """`auto` in a share of 1F1B's memory."""
    where = {"line": "a line", "v": "a V"}[placement]
    label = f"auto on {where}"
    return Subject("auto", label, knows_costs=True, placement=placement, limit=share * RANKS, objective=objective)


def frontier(placement: str, limits: Sequence[float]) -> Series:
    found = [(share, limited(placement, share)) for share in limits]
    colour = COLOURS["zb-v"] if placement == "v" else SEARCHED_COLOUR
    points = tuple((share, play(subject).bubble_rate) for share, subject in found)
    return Series(found[0][1].name, points, colour, is_dashed=True)


def memory_picture() -> str:
    share = Axis("memory of the fullest rank, 1F1B's = 1", SHARES, 0.34, 4.6, is_log=True)
    rates = rates_axis(16, 2)
    traces = [(each, play(each)) for each in SINGLE]
    makespans = [each.series([(kept(trace), trace.bubble_rate)], is_line=False) for each, trace in traces]
    spans = [each.series([(kept(trace), max(0.0, trace.span_bubble_rate))], is_line=False) for each, trace in traces]
    makespans += [frontier("line", LINE_LIMITS), frontier("v", V_LIMITS)]
    found = [(part, play(limited("line", part, "span")).span_bubble_rate) for part in SPAN_LIMITS]
    spans.append(Series("auto on a line", tuple(found), SEARCHED_COLOUR, is_dashed=True))
    panels = [
        ("Bubble of the makespan: every step waits for the last", share, rates, makespans),
        ("Bubble of the span: steps overlap", share, rates, spans),
    ]
    return point_charts(f"Bubble rate and memory: {SIZES}, F = I = W", panels, height=520)


def memory_table() -> str:
    rows = []
    for each in SINGLE:
        trace = play(each)
        activations = max(trace.peak_microbatches) / RANKS
        rows.append([_link(each.schedule), f"{activations:.2f}", f"{kept(trace):.2f}", percent(trace.bubble_rate),
                     percent(trace.span_bubble_rate)])  # fmt: skip
    heads = ["schedule", "activations", "with what W keeps", "bubble of the makespan", "of the span"]
    limits = sorted({*LINE_LIMITS, *V_LIMITS})
    cells = []
    for placement, known in (("line", LINE_LIMITS), ("v", V_LIMITS)):
        found = [percent(play(limited(placement, share)).bubble_rate) if share in known else "" for share in limits]
        cells.append([limited(placement, 1.0).name, *found])
    return (
        markdown_table(heads, rows)
        + "\n"
        + markdown_table(["memory limit, 1F1B's = 1", *(f"{part:g}" for part in limits)], cells)
    )


def _link(name: str) -> str:
    return f"[`{name}`](schedules/{name}.md)"


# ---- the number of microbatches

NUMBERS = (4, 8, 16, 32, 64)
BY_NUMBER = (
    Subject("gpipe"),
    Subject("1f1b"),
    Subject("v-min"),
    Subject("v-half"),
    Subject("zb-h2"),
    Subject("zb-h1"),
    Subject("interleaved"),
    Subject("breadth-first"),
    Subject("unit"),
    Subject("interleaved", "interleaved of 4 chunks", chunks=4),
    Subject("dualpipe-v"),
    Subject("zb-v"),
)


def least(subject: Subject) -> int:
    """Microbatches that it needs."""
    return 2 * RANKS - 1 if subject.schedule == "dualpipe-v" else 1


def microbatches_picture() -> str:
    x = Axis("microbatches", {number: str(number) for number in NUMBERS}, 3.6, 70, is_log=True)
    y = Axis("", PERCENTS, 0.015, 0.6, is_log=True)
    series = [
        each.series((number, play(each, EVEN, number).bubble_rate) for number in NUMBERS if number >= least(each))
        for each in BY_NUMBER
    ]
    panels = [("Bubble of the makespan", x, y, series)]
    return line_charts(f"Bubble rate by microbatches: {RANKS} ranks, F = I = W", panels, height=440, names=230)


def microbatches_table() -> str:
    rows = [
        [
            each.name,
            *(percent(play(each, EVEN, number).bubble_rate) if number >= least(each) else "" for number in NUMBERS),
        ]
        for each in BY_NUMBER
    ]
    return markdown_table(["microbatches", *map(str, NUMBERS)], rows)


# ---- times of F, I and W

WEIGHTS = (0.4, 0.7, 1.0)
FINE_WEIGHTS = tuple(part / 10 for part in range(4, 11))
HALF, THIRD = (RANKS + 2) // 2, (RANKS + 4) // 3
AS_1F1B = (
    Subject("1f1b"),
    Subject("zb-h1"),
    Subject("zb-h2"),
    Subject("interleaved"),
    Subject("dualpipe-v"),
    Subject("zb-v", "zb-v for costs", knows_costs=True),
)
IN_LESS = (
    Subject("v-min"),
    Subject("auto", "auto in v-min's memory", knows_costs=True, placement="v", limit=THIRD),
    Subject("v-half"),
    Subject("auto", "auto in v-half's memory", knows_costs=True, placement="v", limit=HALF),
)


def weighted(weight: float) -> Costs:
    """W takes `weight` of F, and I and W together take two F."""
    return Costs(1.0, 2.0 - weight, weight)


def weights_picture() -> str:
    x = Axis("W / F, with I + W = 2 F", {weight: f"{weight:g}" for weight in WEIGHTS}, 0.2, 1.05)
    panels = []
    for title, subjects, axis in (
        ("In 1F1B's memory and more", AS_1F1B, rates_axis(20, 4)),
        ("In less than 1F1B's memory", IN_LESS, rates_axis(45, 5)),
    ):
        series = [
            each.series((part, play(each, weighted(part)).bubble_rate) for part in each.steps(WEIGHTS, FINE_WEIGHTS))
            for each in subjects
        ]
        panels.append((title, x, axis, series))
    return line_charts(f"Bubble rate where F, I and W are unequal: {SIZES}", panels, names=140)


def weights_table() -> str:
    rows = [
        [each.name, *(percent(play(each, weighted(part)).bubble_rate) for part in WEIGHTS)]
        for each in (*AS_1F1B, *IN_LESS)
    ]
    return markdown_table(["W / F", *(f"{part:g}" for part in WEIGHTS)], rows)


# ---- hops

HOPS = (0.0, 0.2, 0.4)
FINE_HOPS = tuple(part / 10 for part in range(5))
BY_HOP = (
    Subject("v-min"),
    Subject("unit"),
    Subject("v-half"),
    Subject("gis"),
    Subject("gpipe"),
    Subject("1f1b"),
    Subject("zb-h1"),
    Subject("interleaved", "interleaved of 4 chunks", chunks=4),
    Subject("interleaved"),
    Subject("dualpipe-v"),
    Subject("zb-v"),
    Subject("breadth-first"),
    Subject("zb-h2"),
)


def hops_picture() -> str:
    x = Axis("latency of a hop, in times of F", {hop: f"{hop:g}" for hop in HOPS}, 0.0, 0.41)
    series = [each.series((hop, play(each, Costs(hop=hop)).bubble_rate) for hop in FINE_HOPS) for each in BY_HOP]
    panels = [("Bubble of the makespan", x, rates_axis(50, 10), series)]
    return line_charts(f"Bubble rate by the latency of a hop: {SIZES}, F = I = W", panels, height=470, names=230)


def hops_table() -> str:
    rows = [[each.name, *(percent(play(each, Costs(hop=hop)).bubble_rate) for hop in HOPS)] for each in BY_HOP]
    return markdown_table(["hop / F", *(f"{hop:g}" for hop in HOPS)], rows)


# ---- a rank with less room

ROOMS = (0.5, 0.75, 1.0)


def roomy(placement: str, room: float) -> Subject:
    """`auto` where rank 0 has a share of 1F1B's memory, and the others all of it."""
    limit = (room * RANKS, *(float(RANKS) for _ in range(1, RANKS)))
    return Subject("auto", limited(placement, 1.0).name, knows_costs=True, placement=placement, limit=limit)


def room_picture() -> str:
    x = Axis("room on rank 0, that of the other ranks = 1", {room: f"{room:g}" for room in ROOMS}, 0.46, 1.06)
    lines = [
        Series(
            roomy(kind, 1.0).name,
            tuple((room, play(roomy(kind, room)).bubble_rate) for room in ROOMS),
            COLOURS["zb-v"] if kind == "v" else SEARCHED_COLOUR,
            is_dashed=True,
        )
        for kind in ("line", "v")
    ]
    fixed = [Subject(name) for name in ("1f1b", "zb-h1", "zb-v", "v-half", "v-min")]
    points = [each.series([(kept(play(each)), play(each).bubble_rate)], is_line=False) for each in fixed]
    title = f"Bubble rate where rank 0 has less room than the others: {SIZES}, F = I = W"
    head = "Bubble of the makespan; a point is a fixed order, at the room it needs on every rank"
    panels = [(head, x, rates_axis(40, 5), [*lines, *points])]
    return point_charts(title, panels, height=420)


def room_table() -> str:
    rows = [
        [roomy(kind, 1.0).name, *(percent(play(roomy(kind, room)).bubble_rate) for room in ROOMS)]
        for kind in ("line", "v")
    ]
    return markdown_table(["room on rank 0", *(f"{room:g}" for room in ROOMS)], rows)


# ---- unequal stages

HEADS = (1.0, 1.5, 2.0)
BY_HEAD = (
    Subject("1f1b"),
    Subject("interleaved"),
    Subject("zb-1p", "zb-1p for costs", knows_costs=True),
    Subject("zb-v", "zb-v for costs", knows_costs=True),
)
ALONE = "the busiest rank's work"


def headed(subject: Subject, head: float) -> Costs:
    """The rank of the last stage takes `head` times as long as each of the others."""
    schedule = schedule_of(Subject(subject.schedule))
    slow = schedule.placement.rank_of(schedule.stages - 1)
    times = tuple(head if rank == slow else 1.0 for rank in range(RANKS))
    return Costs(times, times, times)


def evenly(head: float) -> float:
    """The time of the same work shared evenly, without a bubble."""
    return MICROBATCHES * 3 * (RANKS - 1 + head) / RANKS


def head_points(subject: Subject) -> list[tuple[float, float]]:
    return [(head, play(subject, headed(subject, head)).makespan / evenly(head)) for head in HEADS]


def alone_points() -> list[tuple[float, float]]:
    return [(head, MICROBATCHES * 3 * head / evenly(head)) for head in HEADS]


def stages_picture() -> str:
    x = Axis("time of the rank with the last stage, that of the others = 1", {part: f"{part:g}" for part in HEADS},
             0.96, 2.04)  # fmt: skip
    ticks = {1.0: "1", 1.2: "1.2", 1.4: "1.4", 1.6: "1.6", 1.8: "1.8", 2.0: "2"}
    y = Axis("", ticks, 0.95, 2.0)
    series = [each.series(head_points(each)) for each in BY_HEAD]
    series.append(Series(ALONE, tuple(alone_points()), "#7d8590", is_dashed=True))
    panels = [("Step time, that of the same work shared evenly and without a bubble = 1", x, y, series)]
    return line_charts(f"Unequal stages: {SIZES}, F = I = W", panels, height=380, names=230)


def stages_table() -> str:
    rows = [[each.name, *(f"{value:.3f}" for _, value in head_points(each))] for each in BY_HEAD]
    rows.append([ALONE, *(f"{value:.3f}" for _, value in alone_points())])
    return markdown_table(["time of the last stage's rank", *(f"{head:g}" for head in HEADS)], rows)


# ---- sharded parameters

ANY = "any, for one action at a time"
BY_STAY = (
    Subject("1f1b", "gpipe, 1f1b, zb-h1, zb-h2"),
    Subject("breadth-first"),
    Subject("unit"),
    Subject("zb-v"),
    Subject("dualpipe-v"),
    Subject("interleaved"),
    Subject("v-half"),
    Subject("v-min"),
)


def gathers_of(subject: Subject) -> tuple[float, float]:
    """Gathers and reductions of a stage in a step, under residency and reduction `run`: a mean over a rank's stages, on
    the rank where it is most."""
    lowered = insert_sharding(schedule_of(subject), residency="run", reduction="run")
    per_rank = [list(collective_counts(row).values()) for row in lowered.actions]
    return max(mean(gathers for gathers, _ in rank) for rank in per_rank), max(
        mean(reductions for _, reductions in rank) for rank in per_rank
    )


def gathers_picture() -> str:
    rows = [(each.name, each.colour, gathers_of(each)) for each in BY_STAY]
    rows.append((ANY, "#7d8590", (2.0 * MICROBATCHES, 1.0 * MICROBATCHES)))
    heads = ["gathers of a stage's parameters a step (log scale)", "reductions of its gradients a step (log scale)"]
    return bar_chart(f"Sharded parameters, with room for one stage of a rank: {SIZES}", heads, rows)


def gathers_table() -> str:
    rows = []
    for each in BY_STAY:
        gathers, reductions = gathers_of(each)
        chunks = schedule_of(each).chunks
        rows.append([each.name, f"{gathers:g}", f"{reductions:g}", "all" if chunks == 1 else f"1/{chunks}"])
    rows.append([ANY, f"{2 * MICROBATCHES}", f"{MICROBATCHES}", "one block's"])
    return markdown_table(["schedule", "gathers", "reductions", "share of parameters gathered at a time"], rows)


PICTURES: Mapping[str, Callable[[], str]] = {
    "when-memory": memory_picture,
    "when-microbatches": microbatches_picture,
    "when-weights": weights_picture,
    "when-hops": hops_picture,
    "when-room": room_picture,
    "when-stages": stages_picture,
    "when-gathers": gathers_picture,
}

TABLES: Mapping[str, Callable[[], str]] = {
    "when-memory": memory_table,
    "when-microbatches": microbatches_table,
    "when-weights": weights_table,
    "when-hops": hops_table,
    "when-room": room_table,
    "when-stages": stages_table,
    "when-gathers": gathers_table,
}
