"""The output of `atoll explain`: sentences and tables. Every figure is a value of `Explanation`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from atoll.base.units import format_bytes, format_rate, format_seconds
from atoll.prediction.cost.breakdown import PARTS
from atoll.prediction.explain import phrases
from atoll.prediction.explain.explanation import Explanation, Measured
from atoll.prediction.explain.holdings import Holding
from atoll.prediction.explain.links import PIPELINE_MESSAGES
from atoll.prediction.explain.questions import QuestionAnswer, bottleneck

MOST_BETTER = 5
"""Number of faster alternatives to list."""


def describe_explanation(explanation: Explanation) -> Iterator[str]:
    """Yield the whole explanation, line by line."""
    for at, (title, section) in enumerate(SECTIONS.items()):
        lines = list(section(explanation))
        if lines:
            yield from (*([""] if at else []), title, "-" * len(title), *lines)
    if explanation.measured is not None:
        yield from (
            "",
            "Predicted and measured",
            "----------------------",
            *measured(explanation, explanation.measured),
        )


def answer_lines(found: QuestionAnswer) -> Iterator[str]:
    """Yield a question, its answer, and a table of the alternatives."""
    yield found.question
    for sentence in found.sentences:
        yield from phrases.wrapped(sentence, indent="  ")
    if found.alternatives:
        yield from ("", *(f"  {line}" for line in phrases.alternatives_table(found.alternatives)))


# ---- sections


def _plan(explanation: Explanation) -> Iterator[str]:
    prediction = explanation.prediction
    yield f"{prediction.workload.name} on {phrases.mesh(explanation.plan.mesh)}"
    yield phrases.plan_line(prediction)
    yield (
        f"A step takes {format_seconds(prediction.seconds)}: "
        f"{format_rate(prediction.tokens_a_second, 'tokens')}, MFU {phrases.percent(prediction.mfu)}."
    )
    if (outer := prediction.outer) is not None:
        waits = "waits for transfers among them" if outer.waits else "none of it waiting"
        yield from phrases.wrapped(
            f"Outer steps add {format_seconds(outer.seconds)} of it on average, and {format_seconds(outer.worst)} "
            f"after the worst step, {waits}. A rank sends {format_bytes(outer.nbytes)} a step between islands, and "
            f"{format_bytes(outer.largest)} after one step at most."
        )


def _bytes(explanation: Explanation) -> Iterator[str]:
    prediction, most = explanation.prediction, explanation.fullest
    names = [name for name in most.held._fields if any(getattr(each.held, name) for each in explanation.holdings)]
    rows = [
        [
            prediction.seats.name(each.rank),
            *(format_bytes(getattr(each.held, name)) for name in names),
            format_bytes(each.held.total),
        ]
        for each in explanation.holdings
    ]
    yield from phrases.columns(["at the peak", *names, "total"], rows)
    yield ""
    yield from phrases.columns(
        ["stored between microbatches", "part", "elements", "parameters", "gradients", "optimizer", "total"],
        [
            [
                f"rank {each.rank}",
                own.name,
                f"{own.elements:,}",
                *map(format_bytes, (own.parameters, own.gradients, own.optimizer, own.total)),
            ]
            for each in explanation.holdings
            for own in each.state
        ],
    )
    yield ""
    for each in explanation.holdings:
        yield from phrases.wrapped(_peak(each))
    margin, memory = prediction.margin(most.rank), prediction.seats.memory(most.rank)
    name = f"{phrases.capital(prediction.seats.name(most.rank))} {prediction.seats.is_fullest}"
    yield (
        f"{name} and leaves {format_bytes(margin)} of the device's {format_bytes(memory)} free."
        if margin >= 0
        else f"{name} and needs {format_bytes(-margin)} more than the device's {format_bytes(memory)}."
    )


def _peak(each: Holding) -> str:
    flight = phrases.in_flight(each)
    when = "between steps" if each.during is None else f"at {each.during}"
    largest = max(each.held._fields, key=lambda name: getattr(each.held, name))
    amount = format_bytes(getattr(each.held, largest))
    return (
        f"Rank {each.rank} peaks {when}{f', with {flight}' if flight else ''}. Its largest component is "
        f"{largest}, {amount} of {format_bytes(each.held.total)}."
    )


def _seconds(explanation: Explanation) -> Iterator[str]:
    every = explanation.prediction.breakdown
    names = [name for name in PARTS if any(getattr(each, name) > 1e-6 * each.total for each in every)]
    rows = [[PARTS[name], *(format_seconds(getattr(each, name)) for each in every)] for name in names]
    rows.append(["the step", *(format_seconds(each.total) for each in every)])
    yield from phrases.columns(["seconds of a step", *map(explanation.prediction.seats.name, range(len(every)))], rows)
    busiest = explanation.busiest
    own = every[busiest]
    if len(every) > 1:
        yield from phrases.wrapped(
            f"{phrases.capital(explanation.prediction.seats.name(busiest))} is the bottleneck of the pipeline: it "
            f"waits least for the other ranks, {phrases.percent(own.bubble / own.total)} of the step."
        )


def _links(explanation: Explanation) -> Iterator[str]:
    every = [(rank, use) for rank in range(explanation.plan.mesh.pipeline) for use in explanation.links(rank)]
    if not every:
        return
    step = explanation.prediction.seconds
    rows = [
        [
            f"rank {rank}",
            phrases.AXIS_PHRASES[use.axis],
            use.kind,
            str(use.times),
            format_bytes(use.nbytes),
            format_seconds(use.seconds),
            phrases.percent(use.seconds / step),
        ]
        for rank, use in every
    ]
    yield from phrases.columns(["sends", "link", "what", "times", "bytes a step", "busy", "of the step"], rows)
    if compared := phrases.break_even(explanation.prediction):
        yield from phrases.wrapped(compared)
    waits = explanation.prediction.breakdown
    data = [own.gathers + own.reductions for own in waits]
    if any(use.kind != PIPELINE_MESSAGES for _, use in every):
        most = max(range(len(data)), key=data.__getitem__)
        yield from phrases.wrapped(
            f"Exposed gathers and reductions (not hidden by compute) take at most {format_seconds(data[most])} of the "
            f"step, on rank {most}."
        )


def _host(explanation: Explanation) -> Iterator[str]:
    if (cost := explanation.host) is None:
        return
    rate = f"{format_bytes(cost.now, decimal=True)}/s"
    added = "adds nothing to" if cost.seconds < 1e-6 else f"adds {format_seconds(cost.seconds)} to"
    yield from phrases.wrapped(
        f"{format_bytes(cost.resting)} of a rank rest in host memory. That saves {format_bytes(cost.saved)} of the "
        f"fullest rank's peak, and {added} a step, on links of {rate}."
    )
    if cost.rate is None:
        text = "No link is fast enough for that to cost at most 1 %: the host's memory or its processors are the limit."
    else:
        text = f"It costs at most 1 % on links of {format_bytes(cost.rate, decimal=True)}/s or more."
    yield from phrases.wrapped(text)


def _bottleneck(explanation: Explanation) -> Iterator[str]:
    for sentence in bottleneck(explanation):
        yield from phrases.wrapped(sentence)


def _layouts(explanation: Explanation) -> Iterator[str]:
    rows = []
    for row in explanation.layouts:
        each, sent = row.alternative, row.travel
        name = f"{each.value}{' *' if each.value == each.was else ''}"
        if sent is None:
            rows.append([name, "refused", *[""] * 7])
            continue
        found = each.found
        peak = max(found.peak(rank).total for rank in range(found.plan.mesh.pipeline))
        rows.append(
            [
                name,
                format_bytes(sent.intra),
                format_bytes(sent.inter),
                format_seconds(sent.seconds),
                phrases.percent(sent.hidden),
                format_seconds(found.seconds),
                phrases.signed_seconds(each.seconds),
                format_bytes(peak),
                phrases.room(each.margin),
            ]
        )
    if not rows:
        return
    headers = [
        "layout",
        "inside groups",
        "between groups",
        "busy",
        "hidden",
        "step",
        "difference",
        "peak",
        "memory",
    ]
    yield from phrases.columns(headers, rows)
    yield from phrases.wrapped(
        "* marks the plan's layout. Bytes are per step, of the rank that sends most; busy is the time of the slower of "
        "its two links; hidden is the share of that time overlapped with compute."
    )
    yield from phrases.wrapped(_layout_verdict(explanation))


def _layout_verdict(explanation: Explanation) -> str:
    own, *others = explanation.layouts
    fitting = [row.alternative for row in others if row.alternative.fits]
    faster = [each for each in fitting if each.is_better]
    name = own.alternative.value
    if faster:
        best = min(faster, key=lambda each: each.seconds)
        return f"{best.value} would be faster than {name}: {phrases.longer(best)}, {phrases.more(best)}."
    equal = [each for each in fitting if each.is_as_long and each.nbytes < 0]
    if equal:
        least = min(equal, key=lambda each: each.nbytes)
        return (
            f"No layout that fits is faster by 0.1 % or more. Of those that are as fast, {least.value} uses the least "
            f"memory: {phrases.more(least, than=name)}."
        )
    return f"No layout that fits is faster by 0.1 % or more, and none as fast uses less memory than {name}."


def _undone(explanation: Explanation) -> Iterator[str]:
    if explanation.undone:
        yield from phrases.alternatives_table(explanation.undone, title="replaced by")


def _alternatives(explanation: Explanation) -> Iterator[str]:
    undone = {each.name for each in explanation.undone}
    yield from phrases.alternatives_table([each for each in explanation.others if each.name not in undone])
    refused = [each for each in explanation.others if each.prediction is None]
    for each in refused:
        first = each.refusal.splitlines()[0]
        yield from phrases.wrapped(f"{each.name} is refused: {first}")
    better = explanation.better[:MOST_BETTER]
    if better:
        words = ", ".join(f"{phrases.setting(each)} ({each.speed:.3f} x)" for each in better)
        yield from phrases.wrapped(f"These fit and are faster: {words}.")
    else:
        yield "No single change fits and is faster."


def _situations(explanation: Explanation) -> Iterator[str]:
    yield from phrases.alternatives_table(explanation.situations, title="if")
    for each in explanation.situations:
        if each.prediction is None:
            yield from phrases.wrapped(f"{each.value} is refused: {each.refusal}")


def measured(explanation: Explanation, run: Measured) -> Iterator[str]:
    """Yield the measurements of a run next to their predictions."""
    prediction = explanation.prediction
    error = run.seconds / prediction.seconds - 1.0
    yield (
        f"Step time: {format_seconds(run.seconds)} measured, {format_seconds(prediction.seconds)} predicted, "
        f"{100 * error:+.1f} %."
    )
    rows = [
        [f"rank {rank}", PARTS[part], *map(format_seconds, pair), phrases.signed_seconds(pair[1] - pair[0])]
        for rank, parts in enumerate(run.parts)
        for part, pair in parts.items()
    ]
    if rows:
        yield from phrases.columns(["timed step", "part", "predicted", "measured", "difference"], rows)
        yield from phrases.wrapped(_largest(run.parts))
    for rank, peak in enumerate(run.peaks):
        held = prediction.peak(rank)
        yield f"Rank {rank}: {format_bytes(peak)} measured ({run.memory}), {format_bytes(held.allocated)} predicted."


def _largest(parts: Sequence[Mapping[str, tuple[float, float]]]) -> str:
    every = [
        (rank, part, measured - predicted)
        for rank, own in enumerate(parts)
        for part, (predicted, measured) in own.items()
    ]
    rank, part, seconds = max(every, key=lambda each: abs(each[2]))
    return f"The largest difference is on rank {rank}, {PARTS[part]}: {phrases.signed_seconds(seconds)}."


SECTIONS: Mapping[str, Callable[[Explanation], Iterator[str]]] = {
    "The plan": _plan,
    "Peak memory": _bytes,
    "Step time": _seconds,
    "Links": _links,
    "Host memory": _host,
    "Bottleneck": _bottleneck,
    "Layouts": _layouts,
    "Without each choice": _undone,
    "Alternatives": _alternatives,
    "Other conditions": _situations,
}
"""Sections by title, in order. A section without lines is left out."""
