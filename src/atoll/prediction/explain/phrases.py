"""Phrases of explanations: plans, differences and amounts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from atoll.base.units import format_bytes, format_rate, format_seconds
from atoll.plans.plan import MeshShape
from atoll.prediction.cost import Prediction
from atoll.prediction.cost.outer import outer_words
from atoll.prediction.explain.alternative import EQUAL, Alternative, fullest_rank
from atoll.prediction.explain.choices import CHOICES, NO, SAME_LAYOUT, YES
from atoll.prediction.explain.holdings import Holding
from atoll.prediction.explain.links import UPLINK
from atoll.program.host import IN, OUT, STEPS

AXIS_PHRASES = {
    "pp": "between stages",
    "inter": "between groups",
    "intra": "inside a group",
    "tp": "in a tensor-parallel group",
    UPLINK: "between islands",
    "expert": "between ranks that divide experts",
    "sequence": "between ranks that divide sequences",
    IN: "from host memory",
    OUT: "to host memory",
    STEPS: "in host memory",
}
"""The links along each axis of the mesh, and of host memory."""


def percent(share: float) -> str:
    """Return a share with one decimal: "12.3 %"."""
    return f"{100 * share:.1f} %"


def signed_seconds(seconds: float) -> str:
    """Return seconds with their sign: "+1.2 s"; "0" below a microsecond."""
    return "0" if abs(seconds) < 5e-7 else f"{'+' if seconds > 0 else ''}{format_seconds(seconds)}"


def signed_bytes(nbytes: float) -> str:
    """Return bytes with their sign: "+1.2 GiB"."""
    return "0" if not nbytes else f"{'+' if nbytes > 0 else '-'}{format_bytes(abs(nbytes))}"


def mesh(shape: MeshShape) -> str:
    """Return a mesh: "64 ranks: pp 4 x inter 2 x intra 8"."""
    sizes = " x ".join(f"{name} {size}" for name, size in shape.sizes.items() if size > 1)
    experts = f", experts over {shape.expert}" if shape.expert > 1 else ""
    sequences = f", sequences over {shape.sequence}" if shape.sequence > 1 else ""
    return "1 rank" if shape.world == 1 else f"{shape.world} ranks: {sizes}{experts}{sequences}"


def plan_line(prediction: Prediction) -> str:
    """Return the choices of a plan in one line."""
    own = prediction.plan
    recompute = "" if own.recompute == "none" else f", recompute {own.recompute}"
    batch = f"{own.schedule.counted} of {own.microbatch} x {prediction.use.sequence} tokens a rank"
    outer = "" if own.outer is None else f"; {outer_words(own)}"
    experts = "" if own.expert_layout in (None, own.layout) else f", experts {own.expert_layout}"
    return f"layout {own.layout}{experts}, {own.schedule.name} with {batch}, {own.precision.compute}{recompute}{outer}"


def break_even(prediction: Prediction) -> str:
    """Return where an exchange of rows sends less than a gather of experts; empty without experts."""
    mixture, tokens = prediction.workload.mixture, prediction.use.tokens
    if mixture is None:
        return ""
    most, plan = mixture.break_even, prediction.plan
    once = plan.schedule.whole_microbatches if plan.stays == "step" else 1
    whole = f", divided by the {once} microbatches of a step, since parameters are gathered once" if once > 1 else ""
    less = "exchange" if tokens < most / once else "gather"
    return (
        f"An exchange of rows sends less than gathers of experts where a rank's microbatch has fewer than {most:,.0f} "
        f"tokens (9 x width x experts / 4 x experts of a token){whole}. Here it has {tokens:,}: the {less} sends less."
    )


def setting(alternative: Alternative) -> str:
    """Return the setting for a config: "parallel.schedule = zb-v"."""
    choice = CHOICES[alternative.choice]
    if alternative.choice == "prefetch":
        return f"{choice.key} = 0" if alternative.value == NO else f"no {choice.key}"
    if alternative.choice == "outer steps" or alternative.value == SAME_LAYOUT:
        return f"no {choice.key}"
    return f"{choice.key} = {({YES: 'true', NO: 'false'}).get(alternative.value, alternative.value)}"


def longer(alternative: Alternative) -> str:
    """Return a longer time: "120 ms longer, 2.3 %, mostly pipeline bubble"."""
    seconds = alternative.seconds
    if alternative.is_as_long:
        return f"equal within {percent(EQUAL)}"
    word = "longer" if seconds > 0 else "shorter"
    share = percent(abs(seconds) / alternative.base.seconds)
    return f"{format_seconds(abs(seconds))} {word}, {share}, mostly {alternative.cause}"


def more(alternative: Alternative, *, than: str = "") -> str:
    """Return more bytes: "1.2 GiB more, mostly activations"."""
    nbytes = alternative.nbytes
    if not nbytes:
        return "unchanged"
    word = "more" if nbytes > 0 else "less"
    return f"{format_bytes(abs(nbytes))} {word}{than and f' than {than}'}, mostly {alternative.byte_cause}"


def verdict(alternative: Alternative) -> str:
    """Return "which fits", or the bytes by which it exceeds the device's memory."""
    return "which fits" if alternative.fits else f"which exceeds the memory by {format_bytes(-alternative.margin)}"


def subject(alternative: Alternative) -> str:
    """Return the alternative's name with a capital: "Layout GGG"."""
    return alternative.name[0].upper() + alternative.name[1:]


def room(margin: int) -> str:
    """Return "19.4 GiB free", or "1.2 GiB over"."""
    return f"{format_bytes(abs(margin))} {'free' if margin >= 0 else 'over'}"


def outcome(alternative: Alternative) -> str:
    """Return the outcome of an alternative as the predicate of a sentence: "takes 5.1 s a step (...)"."""
    if alternative.prediction is None:
        return f"is not possible: {alternative.refusal}"
    found = alternative.found
    rank = fullest_rank(found)
    return (
        f"takes {format_seconds(found.seconds)} a step ({longer(alternative)}), "
        f"{format_rate(found.tokens_a_second, 'tokens')}; the highest peak is "
        f"{format_bytes(found.peak(rank).total)} on rank {rank} ({more(alternative)}), {verdict(alternative)}"
    )


def in_flight(holding: Holding) -> str:
    """Return microbatches in flight: "4 microbatches of stage 0 in flight, 10.8 GiB each"."""
    return ", ".join(
        f"{each.microbatches} {each.of(each.microbatches)} of stage {each.stage} in flight, "
        f"{format_bytes(each.nbytes)} each"
        for each in holding.in_flight
        if each.microbatches
    )


def columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in aligned columns: the first left-aligned, the others right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(headers, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in (headers, *rows)
    ]


def alternatives_table(alternatives: Sequence[Alternative], *, title: str = "alternative") -> list[str]:
    """Return a table with one row per alternative."""
    headers = [title, "step", "difference", "tokens/s", "largest cause", "peak", "difference", "memory"]
    rows = []
    for each in alternatives:
        if each.prediction is None:
            rows.append([_named(each), "refused", *[""] * 6])
            continue
        found = each.found
        peak = found.peak(fullest_rank(found)).total
        rows.append(
            [
                _named(each),
                format_seconds(found.seconds),
                signed_seconds(each.seconds),
                f"{each.speed:.3f} x",
                "" if each.is_as_long else each.cause,
                format_bytes(peak),
                signed_bytes(each.nbytes),
                room(each.margin),
            ]
        )
    return columns(headers, rows)


def _named(alternative: Alternative) -> str:
    return alternative.value if alternative.choice == "situation" else alternative.name


def wrapped(text: str, *, width: int = 100, indent: str = "") -> list[str]:
    """Return a sentence wrapped into lines, without a break between a number and its per cent sign."""
    glued = text.replace(" %", "\u00a0%")
    lines = textwrap.wrap(glued, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


def capital(words: str) -> str:
    """Return words with a capital, to begin a sentence."""
    return words[:1].upper() + words[1:]
