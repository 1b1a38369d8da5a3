"""Closed forms of each family of schedules. p, v, m, n, r, T_F, T_I, T_W, T_c: see Sizes."""

from __future__ import annotations

from dataclasses import replace

from atoll.plans.schedules.closed_form import ClosedForm, RankForm, Sizes
from atoll.plans.schedules.interleaved import interleaved_groups


def _full(sizes: Sizes) -> float:
    return sizes.forward + sizes.input_grad + sizes.weight_grad


ONE_CHUNK = (
    ClosedForm(
        text="(p-1)(T_F+T_I+T_W)/n",
        domain="any p, m and n",
        value=lambda sizes: (sizes.ranks - 1) * _full(sizes) / sizes.slices,
        backward="fused",
    ),
    ClosedForm(
        text="(p-1)(T_F+T_I)/n",
        domain="any p, m and n",
        value=lambda sizes: (sizes.ranks - 1) * (sizes.forward + sizes.input_grad) / sizes.slices,
        backward="early",
    ),
)
"""GPipe and 1F1B."""


def _ramp(sizes: Sizes) -> int:
    """Return the steps of p-1 ranks and, with fewer slices than ranks, a gap between each two chunks."""
    return sizes.ranks - 1 + (sizes.chunks - 1) * max(0, sizes.ranks - sizes.all_slices)


def _early_chunks(sizes: Sizes) -> float:
    late = sizes.ranks * sizes.input_grad - sizes.all_slices * (sizes.input_grad + sizes.weight_grad)
    gradients = (sizes.ranks - 1) * sizes.input_grad + (sizes.chunks - 1) * max(0.0, late)
    return (_ramp(sizes) * sizes.forward + gradients) / (sizes.chunks * sizes.slices)


_FUSED_CHUNKS = ClosedForm(
    text="(p-1)(T_F+T_I+T_W)/v; for m < p with p-1+(v-1)(p-m) in place of p-1",
    domain="any p, v and m",
    value=lambda sizes: _ramp(sizes) * _full(sizes) / (sizes.chunks * sizes.slices),
    backward="fused",
)

INTERLEAVED = (
    replace(
        _FUSED_CHUNKS,
        text="(p-1)(T_F+T_I+T_W)/(vn); for mn < p with p-1+(v-1)(p-mn) in place of p-1",
        domain="any p, v, m and n",
    ),
    ClosedForm(
        text="(p-1)(T_F+T_I)/(vn); for mn < p it adds (v-1)((p-mn) T_F + max(0, p T_I - mn(T_I+T_W)))/(vn)",
        domain="T_W <= T_F, or mn < 2p, or v = 1",
        value=_early_chunks,
        within=lambda sizes: (
            sizes.weight_grad <= sizes.forward or sizes.all_slices < 2 * sizes.ranks or sizes.chunks == 1
        ),
        backward="early",
    ),
)
BREADTH_FIRST = (
    _FUSED_CHUNKS,
    ClosedForm(
        text="(p-1)(T_F+T_I)/v; for m < p it adds (v-1)((p-m) T_F + max(0, p T_I - m(T_I+T_W)))/v",
        domain="any p, v and m",
        value=_early_chunks,
        backward="early",
    ),
)


def half_group(sizes: Sizes) -> int:
    """Return the microbatches of a group of GIS-H: ceil(p/2)."""
    return -(-sizes.ranks // 2)


GENERALIZED_INTERLEAVED = (
    ClosedForm(
        text="(p-1)(T_F+T_I+T_W)/v",
        domain="p divides m",
        value=lambda sizes: (sizes.ranks - 1) * _full(sizes) / sizes.chunks,
        within=lambda sizes: sizes.microbatches % sizes.ranks == 0,
        backward="fused",
    ),
    ClosedForm(
        text="(p-1)(T_F+T_I)/v",
        domain="p divides m",
        value=lambda sizes: (sizes.ranks - 1) * (sizes.forward + sizes.input_grad) / sizes.chunks,
        within=lambda sizes: sizes.microbatches % sizes.ranks == 0,
        backward="early",
    ),
)


def _half_bubble(sizes: Sizes) -> float:
    group = half_group(sizes)
    late = sizes.ranks * sizes.input_grad - group * (sizes.input_grad + sizes.weight_grad)
    ramp = (sizes.ranks - 1) * (sizes.forward + sizes.input_grad)
    return (ramp + (sizes.chunks - 1) * ((sizes.ranks - group) * sizes.forward + max(0.0, late))) / sizes.chunks


def _keeps_up(sizes: Sizes) -> bool:
    """Return True if groups of GIS-H are long enough for the pipeline's round trip, and all of them whole."""
    group = half_group(sizes)
    is_long = group * _full(sizes) >= sizes.ranks * max(sizes.forward, sizes.input_grad)
    return sizes.microbatches % group == 0 and is_long and sizes.weight_grad <= sizes.forward


GENERALIZED_INTERLEAVED_HALF = (
    ClosedForm(
        text="((p-1)(T_F+T_I) + (v-1)((p-g) T_F + max(0, p T_I - g(T_I+T_W))))/v, g = ceil(p/2)",
        domain="g divides m, T_W <= T_F and p max(T_F, T_I) <= g(T_F+T_I+T_W)",
        value=_half_bubble,
        within=_keeps_up,
        backward="early",
    ),
)


def interleaved_peak(sizes: Sizes, rank: int) -> float:
    """Return warm-up + 1 chunk forwards, at most as many as there are."""
    if sizes.chunks == 1:
        return one_chunk_peak(sizes, rank)
    largest = len(interleaved_groups(sizes.ranks, sizes.microbatches, sizes.slices)[0])
    ramp = 2 * (sizes.ranks - 1 - rank) / sizes.slices
    return min(sizes.microbatches, (ramp + (sizes.chunks - 1) * largest + 1) / sizes.chunks)


def one_chunk_peak(sizes: Sizes, rank: int) -> float:
    """Return the slices of one microbatch, and one for each later rank, at most all."""
    return min(sizes.microbatches, (sizes.ranks - 1 - rank) / sizes.slices + 1)


def _h1_makespan(sizes: Sizes) -> float:
    hidden = min(sizes.forward, sizes.input_grad, sizes.weight_grad)
    return (sizes.ranks - 1) * (sizes.forward + sizes.input_grad - hidden) / sizes.slices


def _h1_span(sizes: Sizes) -> float:
    left = sizes.forward + sizes.input_grad - min(sizes.forward, sizes.weight_grad)
    return (sizes.ranks - 1) * left / sizes.slices


def _warms_up(sizes: Sizes) -> bool:
    """Return True if rank 0 has forwards until the first gradient arrives."""
    return sizes.all_slices - sizes.slices >= sizes.ranks - 1


ZERO_BUBBLE_H1 = (
    ClosedForm(
        text="(p-1)(T_F+T_I-min(T_F, T_I, T_W))/n, published for n = 1 as (p-1)(T_F+T_I-T_W)",
        domain="(m-1)n >= p-1",
        value=_h1_makespan,
        within=_warms_up,
    ),
    ClosedForm(
        text="(p-1)(T_F+T_I-min(T_F, T_W))/n",
        domain="(m-1)n >= p-1",
        value=_h1_span,
        within=_warms_up,
        measure="span",
    ),
)


def _h2_left(sizes: Sizes) -> float:
    return sizes.forward + sizes.input_grad + 2 * sizes.hop - 2 * min(sizes.forward, sizes.weight_grad)


ZERO_BUBBLE_H2 = (
    ClosedForm(
        text="(p-1) max(0, T_F+T_I+2T_c-2min(T_F, T_W)), published as (p-1)(T_F+T_I+2T_c-2T_W)",
        domain="m >= 2p-1 and T_c <= min(T_F, T_I, T_W)",
        value=lambda sizes: (sizes.ranks - 1) * max(0.0, _h2_left(sizes)),
        within=lambda sizes: (
            sizes.microbatches >= 2 * sizes.ranks - 1
            and sizes.hop <= min(sizes.forward, sizes.input_grad, sizes.weight_grad)
        ),
        measure="span",
    ),
    ClosedForm(
        text="(p-1) max(T_F, T_F+T_I-2min(T_F, T_W))",
        domain="m >= 2p-1",
        value=lambda sizes: (sizes.ranks - 1) * max(sizes.forward, _h2_left(sizes)),
        within=lambda sizes: sizes.microbatches >= 2 * sizes.ranks - 1,
    ),
)


def _even_and_long(sizes: Sizes) -> bool:
    return sizes.is_even and sizes.all_slices - sizes.slices >= 2 * sizes.ranks - 2


ZERO_BUBBLE_V = (
    ClosedForm(
        text="0",
        domain="T_F = T_I = T_W and (m-1)n >= 2p-2",
        value=lambda sizes: 0.0,
        within=_even_and_long,
        measure="span",
    ),
    ClosedForm(
        text="(p-1) T_F/(2n)",
        domain="T_F = T_I = T_W and (m-1)n >= 2p-2",
        value=lambda sizes: (sizes.ranks - 1) * sizes.forward / (2 * sizes.slices),
        within=_even_and_long,
    ),
)


def zero_bubble_v_peak(sizes: Sizes, rank: int) -> float:
    """Return p-1+n slices for every rank; with too few, both chunks of n+r of them and one chunk of the rest."""
    kept = min(sizes.all_slices, sizes.ranks - 1 + sizes.slices, (sizes.all_slices + sizes.slices + rank) / 2)
    return kept / sizes.slices


V_HALF = (
    ClosedForm(
        text="(3p-7) T_F/2 for even p, (3p-4) T_F/2 for odd",
        domain="T_F = T_I = T_W, p >= 3 and m >= 2p",
        value=lambda sizes: (3 * sizes.ranks - (4 if sizes.ranks % 2 else 7)) * sizes.forward / 2,
        within=lambda sizes: sizes.is_even and sizes.ranks >= 3 and sizes.microbatches >= 2 * sizes.ranks,
        relation="at most",
    ),
)
V_MIN = (
    ClosedForm(
        text="(4p-5) T_F/2, (4p-7) T_F/2 where 3 divides p",
        domain="T_F = T_I = T_W, p >= 3 and m >= 2p",
        value=lambda sizes: (4 * sizes.ranks - (5 if sizes.ranks % 3 else 7)) * sizes.forward / 2,
        within=lambda sizes: sizes.is_even and sizes.ranks >= 3 and sizes.microbatches >= 2 * sizes.ranks,
        relation="at most",
    ),
)


def _suits_dualpipe(sizes: Sizes) -> bool:
    is_ordered = sizes.weight_grad <= sizes.input_grad and sizes.forward <= sizes.input_grad + sizes.weight_grad
    return is_ordered and sizes.microbatches >= 2 * sizes.ranks - 1


DUALPIPE_V = (
    ClosedForm(
        text="(p-1)(T_F+2T_I-T_W)/2, published as (p-1)(F&B+B-3W) in times of a chunk",
        domain="m >= 2p-1, T_W <= T_I and T_F <= T_I+T_W",
        value=lambda sizes: (sizes.ranks - 1) * (sizes.forward + 2 * sizes.input_grad - sizes.weight_grad) / 2,
        within=_suits_dualpipe,
        relation="at most",
    ),
)


def largest_unit(sizes: Sizes) -> int:
    """Return the number of microbatches in the largest unit, of the requested size or the default."""
    return -(-sizes.microbatches // _unit_count(sizes))


def _unit_count(sizes: Sizes) -> int:
    if sizes.unit is None:
        return max(1, sizes.microbatches // sizes.ranks)
    return -(-sizes.microbatches // sizes.unit)


def _has_long_units(sizes: Sizes) -> bool:
    smallest = sizes.microbatches // _unit_count(sizes)
    return sizes.is_even and sizes.chunks > 1 and smallest >= sizes.ranks


UNIT = (
    ClosedForm(
        text="(p-1)(T_F+T_I)/v",
        domain="T_F = T_I = T_W, v >= 2 and no unit smaller than p",
        value=lambda sizes: (sizes.ranks - 1) * (sizes.forward + sizes.input_grad) / sizes.chunks,
        within=_has_long_units,
        relation="at most",
    ),
)

ALL = RankForm("m", lambda sizes, rank: sizes.microbatches)
"""Every microbatch."""

ANY = RankForm("m", lambda sizes, rank: sizes.microbatches, "at most")
UP_TO_P = RankForm("min(m, p)", lambda sizes, rank: min(sizes.microbatches, sizes.ranks), "at most")
UP_TO_2P = RankForm("min(m, 2p)", lambda sizes, rank: min(sizes.microbatches, 2 * sizes.ranks), "at most")
