"""The catalogue of schedules. To add one: its function, a row here, its picture, its laws."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from atoll.base.errors import ConfigError
from atoll.plans.ir.placement import PlacementKind
from atoll.plans.ir.schedule import Schedule
from atoll.plans.schedules import forms
from atoll.plans.schedules.automatic import automatic, zb_1p, zb_2p, zero_bubble_v
from atoll.plans.schedules.breadth_first import breadth_first
from atoll.plans.schedules.closed_form import ClosedForm, RankForm
from atoll.plans.schedules.controllable_memory import v_half, v_min
from atoll.plans.schedules.dualpipe_v import dualpipe_v
from atoll.plans.schedules.generalized_interleaved import gis, gis_h
from atoll.plans.schedules.gpipe import gpipe
from atoll.plans.schedules.interleaved import interleaved
from atoll.plans.schedules.one_forward_one_backward import one_forward_one_backward
from atoll.plans.schedules.timing import StageCosts
from atoll.plans.schedules.unit import unit_schedule
from atoll.plans.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the catalogue.

    bubbles       closed forms, for the options' defaults except where the sizes name them
    activations   microbatches that rank r keeps from F to I or B: what Trace.peak_microbatches measures
    kept          from F to W or B: with what a pending W keeps
    chunks        stages per rank by default
    options       arguments of `function` besides ranks and microbatches
    """

    name: str
    function: Callable[..., Schedule]
    summary: str
    paper: str
    bubbles: tuple[ClosedForm, ...]
    activations: RankForm
    kept: RankForm
    placement: PlacementKind = "line"
    chunks: int = 1
    options: tuple[str, ...] = ()


_ONE_EACH = RankForm("min(m, (p-r-1)/n + 1)", forms.one_chunk_peak)
_INTERLEAVED = RankForm(
    "min(m, (2(p-r-1)/n + (v-1)g + 1)/v), g the largest group; min(m, (p-r-1)/n + 1) for v = 1",
    forms.interleaved_peak,
)
_GIS = RankForm(
    "min(m, p - r/v)",
    lambda sizes, rank: min(sizes.microbatches, sizes.ranks - rank / sizes.chunks),
    "at most",
)
_GIS_H = RankForm(
    "min(m, (p-r + (v-1)g)/v), g = ceil(p/2)",
    lambda sizes, rank: min(
        sizes.microbatches, (sizes.ranks - rank + (sizes.chunks - 1) * forms.half_group(sizes)) / sizes.chunks
    ),
    "at most",
)
_V = RankForm("min(m, (p-1)/n + 1); for (m-1)n < 2p-2 also at most (m + 1 + r/n)/2", forms.zero_bubble_v_peak)
_HALF = RankForm("(p+2) // 2", lambda sizes, rank: (sizes.ranks + 2) // 2, "at most")
_THIRD = RankForm("(p+4) // 3", lambda sizes, rank: (sizes.ranks + 4) // 3, "at most")
_DUAL = RankForm("p + 1/2", lambda sizes, rank: min(sizes.microbatches, sizes.ranks + 0.5), "at most")

_COSTS_AND_BYTES = (
    "costs",
    "objective",
    "memory_limit",
    "static_bytes",
    "activation_bytes",
    "weight_grad_bytes",
)
_SEARCHED = ("placement", "chunks", *_COSTS_AND_BYTES)

_ENTRIES = (
    Entry(
        name="gpipe",
        function=gpipe,
        summary="all forwards, then all backwards",
        paper="arXiv 1811.06965",
        bubbles=forms.ONE_CHUNK,
        activations=forms.ALL,
        kept=forms.ALL,
        options=("slices",),
    ),
    Entry(
        name="1f1b",
        function=one_forward_one_backward,
        summary="one forward, one backward in turn",
        paper="arXiv 2006.09503",
        bubbles=forms.ONE_CHUNK,
        activations=_ONE_EACH,
        kept=_ONE_EACH,
        options=("slices",),
    ),
    Entry(
        name="interleaved",
        function=interleaved,
        summary="1F1B over several chunks a rank",
        paper="arXiv 2104.04473",
        bubbles=forms.INTERLEAVED,
        activations=_INTERLEAVED,
        kept=_INTERLEAVED,
        placement="loop",
        chunks=2,
        options=("chunks", "slices"),
    ),
    Entry(
        name="gis",
        function=gis,
        summary="interleaved 1F1B in 1F1B's memory, where p divides m",
        paper="arXiv 2503.01328",
        bubbles=forms.GENERALIZED_INTERLEAVED,
        activations=_GIS,
        kept=_GIS,
        placement="loop",
        chunks=2,
        options=("chunks",),
    ),
    Entry(
        name="gis-h",
        function=gis_h,
        summary="`gis` in about half of its memory, the more chunks the nearer",
        paper="arXiv 2503.01328",
        bubbles=forms.GENERALIZED_INTERLEAVED_HALF,
        activations=_GIS_H,
        kept=_GIS_H,
        placement="loop",
        chunks=2,
        options=("chunks",),
    ),
    Entry(
        name="breadth-first",
        function=breadth_first,
        summary="all microbatches through one chunk before the next",
        paper="arXiv 2211.05953",
        bubbles=forms.BREADTH_FIRST,
        activations=forms.ALL,
        kept=forms.ALL,
        placement="loop",
        chunks=2,
        options=("chunks",),
    ),
    Entry(
        name="zb-h1",
        function=zero_bubble_h1,
        summary="1F1B with a split backward, in 1F1B's memory",
        paper="arXiv 2401.10241",
        bubbles=forms.ZERO_BUBBLE_H1,
        activations=_ONE_EACH,
        kept=RankForm("min(m, (p-1)/n + 1)", lambda sizes, rank: forms.one_chunk_peak(sizes, 0)),
        options=("slices",),
    ),
    Entry(
        name="zb-h2",
        function=zero_bubble_h2,
        summary="split backward and twice the warm-up, in twice the memory",
        paper="arXiv 2401.10241",
        bubbles=forms.ZERO_BUBBLE_H2,
        activations=RankForm(
            "min(m, 2(p-r)-1)", lambda sizes, rank: min(sizes.microbatches, 2 * (sizes.ranks - rank) - 1)
        ),
        kept=RankForm("min(m, 2p-1)", lambda sizes, rank: min(sizes.microbatches, 2 * sizes.ranks - 1)),
    ),
    Entry(
        name="zb-v",
        function=zero_bubble_v,
        summary="no bubble in 1F1B's memory where F, I and W take the same time",
        paper="arXiv 2401.10241",
        bubbles=forms.ZERO_BUBBLE_V,
        activations=_V,
        kept=_V,
        placement="v",
        chunks=2,
        options=(*_COSTS_AND_BYTES, "slices"),
    ),
    Entry(
        name="v-half",
        function=v_half,
        summary="half of 1F1B's activations, about half of its bubble",
        paper="arXiv 2405.15362",
        bubbles=forms.V_HALF,
        activations=_HALF,
        kept=_HALF,
        placement="v",
        chunks=2,
        options=("costs",),
    ),
    Entry(
        name="v-min",
        function=v_min,
        summary="a third of 1F1B's activations, about two thirds of its bubble",
        paper="arXiv 2405.15362",
        bubbles=forms.V_MIN,
        activations=_THIRD,
        kept=_THIRD,
        placement="v",
        chunks=2,
        options=("costs",),
    ),
    Entry(
        name="dualpipe-v",
        function=dualpipe_v,
        summary="forwards of one chunk beside backwards of the other, from 2p-1 microbatches up",
        paper="github.com/deepseek-ai/DualPipe",
        bubbles=forms.DUALPIPE_V,
        activations=_DUAL,
        kept=_DUAL,
        placement="v",
        chunks=2,
    ),
    Entry(
        name="unit",
        function=unit_schedule,
        summary="units of microbatches, chunk by chunk: few gathers and reductions of sharded parameters",
        paper="arXiv 2402.03791",
        bubbles=forms.UNIT,
        activations=RankForm("U, the largest unit", lambda sizes, rank: forms.largest_unit(sizes)),
        kept=RankForm("2U", lambda sizes, rank: 2 * forms.largest_unit(sizes), "at most"),
        placement="loop",
        chunks=2,
        options=("chunks", "unit", "keep", "costs"),
    ),
    Entry(
        name="auto",
        function=automatic,
        summary="the best order found for given costs and memory limits, on any placement",
        paper="arXiv 2401.10241",
        bubbles=(),
        activations=forms.ANY,
        kept=forms.ANY,
        options=_SEARCHED,
    ),
    Entry(
        name="zb-1p",
        function=zb_1p,
        summary="`auto` in 1F1B's memory",
        paper="arXiv 2401.10241",
        bubbles=(),
        activations=forms.UP_TO_P,
        kept=forms.UP_TO_P,
        options=_SEARCHED,
    ),
    Entry(
        name="zb-2p",
        function=zb_2p,
        summary="`auto` in twice 1F1B's memory",
        paper="arXiv 2401.10241",
        bubbles=(),
        activations=forms.UP_TO_2P,
        kept=forms.UP_TO_2P,
        options=_SEARCHED,
    ),
)

CATALOGUE: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
"""Name -> row, in the order in which they are listed to users."""

_WHOLE = ("slices", 1)
"""The option that every schedule takes, without effect: a whole sequence is one slice."""


def takes(name: str, option: str) -> bool:
    """Return True if a schedule takes an option; False for one that is not in the catalogue, whose order is given."""
    return name in CATALOGUE and option in CATALOGUE[name].options


def build(name: str, *, ranks: int, microbatches: int, costs: StageCosts | None = None, **options: object) -> Schedule:
    """Build the schedule `name`. An option of None counts as not given.

    Every schedule takes `costs` (an atoll.program.sim.Costs); those with a fixed order ignore them. Some take `slices`
    of each sequence (atoll.plans.slices): 1 is the whole sequence, as if not given.
    Raises ConfigError for an unknown name or option, or an impossible size.
    """
    entry = CATALOGUE.get(name)
    if entry is None:
        raise ConfigError(f"schedule {name!r} does not exist{_nearest(name, CATALOGUE)}: choose one of "
                          f"{', '.join(CATALOGUE)}")  # fmt: skip
    given = {option: value for option, value in options.items() if value is not None and (option, value) != _WHOLE}
    for option in given:
        if option not in entry.options:
            if option == "slices":
                sliced = ", ".join(row.name for row in CATALOGUE.values() if option in row.options)
                raise ConfigError(
                    f"schedule {name!r} runs whole sequences, not slices of them: use one of {sliced}, or leave out "
                    "slices"
                )
            known = ", ".join(entry.options) or "none"
            guess = _nearest(option, entry.options)
            raise ConfigError(f"schedule {name!r} has no option {option!r}{guess}: its options are {known}")
    counts = {"ranks": ranks, "microbatches": microbatches} | given
    for word in ("ranks", "microbatches", "chunks", "unit", "keep", "slices"):
        count = counts.get(word, 1)
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"schedule {name!r} needs at least 1 of {word}, not {count}")
    if costs is not None and "costs" in entry.options:
        given["costs"] = costs
    return entry.function(ranks=ranks, microbatches=microbatches, **given)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
