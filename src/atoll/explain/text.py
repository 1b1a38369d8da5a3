"""An explanation in sentences and tables: what `atoll explain` prints. Every figure is a value of `Explanation`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from atoll.cost.breakdown import PARTS
from atoll.explain import phrases
from atoll.explain.explanation import NEARLY_FULL, Explanation, Measured
from atoll.explain.holdings import Holding
from atoll.explain.links import MESSAGES
from atoll.explain.questions import QUESTIONS, Answer
from atoll.units import format_bytes, format_rate, format_seconds

MOST_BETTER = 5
"""Faster alternatives that are named."""


def describe(explanation: Explanation) -> Iterator[str]:
    """The whole explanation, line by line."""
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


def questions() -> Iterator[str]:
    """The questions that can be asked, by key."""
    every = [(key, each.text) for key, each in QUESTIONS.items() if not key.startswith("why-not-")]
    values = [key.removeprefix("why-not-") for key in QUESTIONS if key.startswith("why-not-")]
    width = max(len(key) for key, _ in every)
    yield from (f"{key:{width}}  {text}" for key, text in every)
    yield f"{'why-not-NAME':{width}}  Why not this schedule or layout? NAME is one of"
    yield from phrases.wrapped(", ".join(values), indent=" " * (width + 2))


def answer(found: Answer) -> Iterator[str]:
    """A question, its answer, and the alternatives side by side."""
    yield found.question
    for sentence in found.sentences:
        yield from phrases.wrapped(sentence, indent="  ")
    if found.alternatives:
        yield from ("", *(f"  {line}" for line in phrases.table(found.alternatives)))


# ---- sections


def _plan(explanation: Explanation) -> Iterator[str]:
    prediction = explanation.prediction
    yield f"{prediction.workload.name} on {phrases.mesh(explanation.plan.mesh)}"
    yield phrases.plan(prediction)
    yield (
        f"A step takes {format_seconds(prediction.seconds)}: "
        f"{format_rate(prediction.tokens_a_second, 'tokens')}, MFU {phrases.percent(prediction.mfu)}."
    )


def _bytes(explanation: Explanation) -> Iterator[str]:
    prediction, most = explanation.prediction, explanation.fullest
    names = [name for name in most.held._fields if any(getattr(each.held, name) for each in explanation.holdings)]
    rows = [
        [
            f"rank {each.rank}",
            *(format_bytes(getattr(each.held, name)) for name in names),
            format_bytes(each.held.total),
        ]
        for each in explanation.holdings
    ]
    yield from phrases.columns(["at the peak", *names, "total"], rows)
    yield ""
    yield from phrases.columns(
        ["state between microbatches", "of", "elements", "parameters", "gradients", "optimizer", "total"],
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
    margin, memory = prediction.margin(most.rank), prediction.device.memory
    yield (
        f"Rank {most.rank} is the fullest: it leaves {format_bytes(margin)} of the device's {format_bytes(memory)}."
        if margin >= 0
        else f"Rank {most.rank} is the fullest: it needs {format_bytes(-margin)} more than the device's "
        f"{format_bytes(memory)}."
    )


def _peak(each: Holding) -> str:
    flight = phrases.in_flight(each)
    when = "between steps" if each.during is None else f"at {each.during}"
    largest = max(each.held._fields, key=lambda name: getattr(each.held, name))
    amount = format_bytes(getattr(each.held, largest))
    return (
        f"Rank {each.rank} holds most {when}{f', with {flight}' if flight else ''}. Its largest component is "
        f"{largest}, {amount} of {format_bytes(each.held.total)}."
    )


def _seconds(explanation: Explanation) -> Iterator[str]:
    every = explanation.prediction.breakdown
    names = [name for name in PARTS if any(getattr(each, name) > 1e-6 * each.total for each in every)]
    rows = [[PARTS[name], *(format_seconds(getattr(each, name)) for each in every)] for name in names]
    rows.append(["the step", *(format_seconds(each.total) for each in every)])
    yield from phrases.columns(["seconds of a step", *(f"rank {rank}" for rank in range(len(every)))], rows)
    busiest = explanation.busiest
    own = every[busiest]
    if len(every) > 1:
        yield from phrases.wrapped(
            f"Rank {busiest} waits least for the others, {phrases.percent(own.bubble / own.total)} of the step: it "
            "sets the pace."
        )


def _links(explanation: Explanation) -> Iterator[str]:
    every = [(rank, use) for rank in range(explanation.plan.mesh.pipeline) for use in explanation.links(rank)]
    if not every:
        return
    step = explanation.prediction.seconds
    rows = [
        [
            f"rank {rank}",
            phrases.AXES[use.axis],
            use.kind,
            str(use.times),
            format_bytes(use.nbytes),
            format_seconds(use.seconds),
            phrases.percent(use.seconds / step),
        ]
        for rank, use in every
    ]
    yield from phrases.columns(["sends", "link", "what", "times", "bytes a step", "busy", "of the step"], rows)
    waits = explanation.prediction.breakdown
    data = [own.gathers + own.reductions for own in waits]
    if any(use.kind != MESSAGES for _, use in every):
        most = max(range(len(data)), key=data.__getitem__)
        yield from phrases.wrapped(
            f"Waits for gathers and reductions that nothing hides take at most {format_seconds(data[most])} of a "
            f"rank's step, on rank {most}."
        )


def _binding(explanation: Explanation) -> Iterator[str]:
    prediction, most = explanation.prediction, explanation.fullest
    margin = prediction.margin(most.rank)
    share = margin / prediction.device.memory
    if margin < 0:
        sentence = f"Memory binds: rank {most.rank} does not fit."
    elif share < NEARLY_FULL:
        sentence = f"Memory binds: rank {most.rank} leaves {phrases.percent(share)} of the device's memory."
    else:
        sentence = f"Memory does not bind: rank {most.rank}, the fullest, leaves {phrases.percent(share)}."
    yield from phrases.wrapped(sentence)
    saved = explanation.resources
    terms = ", ".join(
        f"{each.name} {format_seconds(each.saved)} ({phrases.percent(each.saved / prediction.seconds)})"
        for each in saved
    )
    yield from phrases.wrapped(f"What a step would save if one of these were 10 % faster: {terms}.")
    yield from phrases.wrapped(f"So the seconds of a step depend most on the {saved[0].name}.")
    if len(prediction.breakdown) > 1:
        rank, seconds = explanation.most_computing
        yield from phrases.wrapped(
            f"Rank {rank} computes for {format_seconds(seconds)}, longer than the others: with these stages no order "
            "of the work and no link makes a step shorter than that."
        )


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
        "a step",
        "difference",
        "fullest",
        "memory",
    ]
    yield from phrases.columns(headers, rows)
    yield from phrases.wrapped(
        "* is the plan's. Bytes are what the rank that sends most sends in a step; busy is the slower of its two "
        "links; hidden is the share of that for which the rank does not wait."
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
            f"No layout that fits is faster by 0.1 % or more. Of those that are as fast {least.value} holds least: "
            f"{phrases.more(least, than=name)}."
        )
    return f"No layout that fits is faster by 0.1 % or more, and none that is as fast holds less than {name}."


def _undone(explanation: Explanation) -> Iterator[str]:
    if explanation.undone:
        yield from phrases.table(explanation.undone, title="undone, to")


def _alternatives(explanation: Explanation) -> Iterator[str]:
    undone = {each.name for each in explanation.undone}
    yield from phrases.table([each for each in explanation.others if each.name not in undone])
    refused = [each for each in explanation.others if each.prediction is None]
    for each in refused:
        first = each.refusal.splitlines()[0]
        yield from phrases.wrapped(f"{each.name} is refused: {first}")
    better = explanation.better[:MOST_BETTER]
    if better:
        words = ", ".join(f"{phrases.setting(each)} ({each.speed:.3f} x)" for each in better)
        yield from phrases.wrapped(f"Faster, and it fits: {words}.")
    else:
        yield "No single change of a choice fits and is faster."


def _situations(explanation: Explanation) -> Iterator[str]:
    yield from phrases.table(explanation.situations, title="if")
    for each in explanation.situations:
        if each.prediction is None:
            yield from phrases.wrapped(f"{each.value} is refused: {each.refusal}")


def measured(explanation: Explanation, run: Measured) -> Iterator[str]:
    """What a run has measured, beside what was predicted."""
    prediction = explanation.prediction
    error = run.seconds / prediction.seconds - 1.0
    yield (
        f"A step took {format_seconds(run.seconds)}; {format_seconds(prediction.seconds)} were predicted: "
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
        yield (f"Rank {rank} held {format_bytes(peak)} ({run.memory}); {format_bytes(held.allocated)} were predicted.")


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
    "Where the bytes are": _bytes,
    "Where the seconds go": _seconds,
    "What the links carry": _links,
    "What binds": _binding,
    "Why this layout": _layouts,
    "Each choice undone": _undone,
    "Why not the alternatives": _alternatives,
    "If something else changes": _situations,
}
"""By title, in their order. A section without lines is left out."""
