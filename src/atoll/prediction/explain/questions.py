"""The six questions about a plan, and their answers, computed from its figures. A question is selected by its key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from atoll.base.errors import ConfigError
from atoll.base.units import format_bytes, format_seconds
from atoll.plans.ir.residency import Reduction
from atoll.plans.layouts import Layout
from atoll.plans.plan import Plan
from atoll.prediction.cost import Cluster
from atoll.prediction.explain import phrases
from atoll.prediction.explain.alternative import Alternative, attempt
from atoll.prediction.explain.choices import CHOICES, rebuilt
from atoll.prediction.explain.explanation import NEARLY_FULL, Explanation
from atoll.prediction.explain.links import travel

ZERO_2 = "NGG"
"""The layout of ZeRO-2."""

MOST_SAVING = 6
"""Maximum number of memory-saving changes to list."""


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """An answer in sentences, with the alternatives its figures describe."""

    key: str
    question: str
    sentences: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()


Sentences = tuple[tuple[str, ...], tuple[Alternative, ...]]


@dataclass(frozen=True, slots=True)
class _Question:
    """A question with a key."""

    key: str
    text: str
    answer: Callable[[Explanation], Sentences]


def ask(explanation: Explanation, key: str) -> QuestionAnswer:
    """Answer the question with this key. Raises ConfigError with all questions if there is none."""
    if key not in QUESTIONS:
        raise ConfigError("\n  ".join([f"no question {key!r}; there are", *listed()]))
    question = QUESTIONS[key]
    sentences, alternatives = question.answer(explanation)
    return QuestionAnswer(question.key, question.text, sentences, alternatives)


def listed() -> Iterator[str]:
    """Yield the questions with their keys, a line for each."""
    width = max(map(len, QUESTIONS))
    yield from (f"{key:{width}}  {question.text}" for key, question in QUESTIONS.items())


def _pipeline_with_zero_2(explanation: Explanation) -> Sentences:
    """Compare ZeRO-2 in a pipeline with the plan's reduction and residency, and with one reduction per step."""
    name = ZERO_2
    alternatives = [] if explanation.plan.layout.name == name else [explanation.alternative("layout", name)]
    base = explanation.prediction
    if explanation.plan.mesh.data == 1:
        return ("The plan has one data-parallel rank: there is nothing to shard.",), ()
    if explanation.plan.mesh.pipeline == 1:
        opening = f"Yes. The plan has no pipeline; the following uses a pipeline of 2 with {name}."

        def piped(reduction: Reduction) -> Plan:
            own = CHOICES["pipeline"].make(replace(explanation.plan, layout=Layout(name)), "2")
            return replace(own, reduction=reduction)

        alternatives = [explanation.attempt("pipeline 2 with layout", name, partial(piped, "microbatch"))]
        once = explanation.attempt("pipeline 2 with layout", f"{name} reduced once a step", partial(piped, "step"))
    else:
        opening = f"Yes: {name} gives the result of one process under every schedule."
        sparing = partial(
            replace, explanation.plan, layout=Layout(name), reduction="step", residency="step", resident=None
        )
        once = explanation.attempt("layout", f"{name} once a step", sparing)
    every = (*alternatives, once)
    sentences = [opening]
    if explanation.plan.layout.name == name:
        sentences.append(f"The plan already has {name}: it takes {format_seconds(base.seconds)} a step.")
    for each in every:
        sentence = f"{phrases.subject(each)} {phrases.outcome(each)}."
        if each.prediction is not None:
            found = travel(each.prediction)
            sentence += (
                f" Per step a rank sends {format_bytes(found.intra)} inside its group and {format_bytes(found.inter)} "
                f"between groups; its links are busy for {format_seconds(found.seconds)}, "
                f"{phrases.percent(found.hidden)} of it hidden by compute."
            )
        sentences.append(sentence)
    return tuple(sentences), every


def _fullest_rank(explanation: Explanation) -> Sentences:
    most, least = explanation.fullest, explanation.emptiest
    if len(explanation.holdings) == 1:
        return (f"There is one pipeline rank: the peak of all ranks is {format_bytes(most.held.total)}.",), ()
    sentences = [
        f"The peak of rank {most.rank} is {format_bytes(most.held.total)}, that of rank {least.rank} "
        f"{format_bytes(least.held.total)}: {format_bytes(most.held.total - least.held.total)} less."
    ]
    differences = {name: getattr(most.held, name) - getattr(least.held, name) for name in most.held._fields}
    ordered = sorted(differences.items(), key=lambda each: -abs(each[1]))
    terms = [f"{phrases.signed_bytes(nbytes)} {name}" for name, nbytes in ordered if nbytes]
    sentences.append(f"The difference by component: {', '.join(terms)}.")
    for each in (most, least):
        state = ", ".join(f"{own.name} {format_bytes(own.total)}" for own in each.state)
        flight = phrases.in_flight(each)
        sentences.append(f"Rank {each.rank} stores the state of {state}{f'; it has {flight}' if flight else ''}.")
    what = "slices" if explanation.plan.schedule.slices > 1 else "microbatches"
    sentences.append(
        f"Schedule {explanation.plan.schedule.name} has {most.microbatches} of rank {most.rank}'s {what} in flight at "
        f"that time, and {least.microbatches} of rank {least.rank}'s."
    )
    return tuple(sentences), ()


def _why_not_zb_v(explanation: Explanation) -> Sentences:
    if explanation.plan.mesh.pipeline == 1:
        return ("The plan has no pipeline: all schedules are then the same. ZB-V needs two ranks.",), ()
    if CHOICES["schedule"].now(explanation.plan) == "zb-v":
        return ("The plan has schedule zb-v.",), ()
    each = explanation.alternative("schedule", "zb-v")
    sentences = [f"{phrases.subject(each)} {phrases.outcome(each)}."]
    if each.prediction is None:
        return tuple(sentences), (each,)
    terms = sorted(each.causes.items(), key=lambda item: -abs(item[1]))
    causes = ", ".join(f"{phrases.signed_seconds(value)} {name}" for name, value in terms if abs(value) >= 5e-7)
    shares = [
        sum(own.bubble for own in every) / sum(own.total for own in every)
        for every in (each.base.breakdown, each.found.breakdown)
    ]
    sentences += [
        f"The difference by cause, averaged over the pipeline ranks: {causes or 'none'}.",
        f"Its bubble is {phrases.percent(shares[1])} of the step, that of {each.was} is {phrases.percent(shares[0])}.",
        *_hops(each),
    ]
    return tuple(sentences), (each,)


def _hops(each: Alternative) -> list[str]:
    """Compare the number of messages, and describe the stages."""
    times = [sum(bool(step.do.sends) for step in every.ranks.programs.ranks[0].instructions)
             for every in (each.base, each.found)]  # fmt: skip
    found = [f"Rank 0 sends {times[1]} messages per step instead of {times[0]}."] if times[0] != times[1] else []
    placement, durations, ranks = each.found.plan.schedule.placement, each.found.durations, each.found.ranks
    seconds = [
        sum(sum(durations.parts_on(placement.rank_of(stage), ranks.works[at])) for at in run)
        for stage, run in enumerate(ranks.runs)
    ]
    found.append(
        f"It splits the model into {len(seconds)} stages, which take {format_seconds(min(seconds))} to "
        f"{format_seconds(max(seconds))} per microbatch; if they are unequal, ranks wait for the longest."
    )
    return found


def bottleneck(explanation: Explanation) -> Iterator[str]:
    """Yield what binds: memory, the resource that a faster step needs first, and the rank that computes longest."""
    prediction, most = explanation.prediction, explanation.fullest
    margin = prediction.margin(most.rank)
    share, name = margin / prediction.seats.memory(most.rank), prediction.seats.name(most.rank)
    if margin < 0:
        yield f"Memory is the bottleneck: {name} does not fit."
    elif share < NEARLY_FULL:
        yield f"Memory is nearly full: {name} leaves {phrases.percent(share)} free."
    else:
        yield f"Memory is not the bottleneck: {name} {prediction.seats.is_fullest}, {phrases.percent(share)} is free."
    saved = explanation.resources
    terms = ", ".join(
        f"{each.name} {format_seconds(each.saved)} ({phrases.percent(each.saved / prediction.seconds)})"
        for each in saved
    )
    yield f"Time saved per step if one of these were 10 % faster: {terms}."
    yield f"So the step time depends most on the {saved[0].name}."
    if len(prediction.breakdown) > 1:
        rank, seconds = explanation.most_computing
        yield (
            f"Rank {rank} computes longest, {format_seconds(seconds)}: with these stages no schedule and no link makes "
            "a step shorter."
        )


def _what_binds(explanation: Explanation) -> Sentences:
    """Add the bubble, the time that each link is busy, and the changes that are faster."""
    sentences, step = [*bottleneck(explanation)], explanation.prediction.seconds
    parts = explanation.prediction.breakdown
    if len(parts) > 1:
        own = parts[explanation.busiest]
        waits = ", ".join(f"rank {rank} {format_seconds(each.bubble)}" for rank, each in enumerate(parts))
        sentences.append(
            f"Ranks wait for others: {waits}, of a step of {format_seconds(step)}; rank {explanation.busiest} waits "
            f"least, {phrases.percent(own.bubble / own.total)}."
        )
    for axis, joins in phrases.AXIS_PHRASES.items():
        of_rank = [[use for use in explanation.links(rank) if use.axis == axis] for rank in range(len(parts))]
        sent = max(sum(use.nbytes for use in uses) for uses in of_rank)
        busy = max(sum(use.seconds for use in uses) for uses in of_rank)
        if sent:
            sentences.append(
                f"The link {joins} transfers up to {format_bytes(sent)} per rank and step, and is busy for "
                f"{format_seconds(busy)}, {phrases.percent(busy / step)} of the step."
            )
    coded = [each for each in explanation.alternatives("hop codec") if each.value != "none" and each.is_better]
    if coded:
        best = max(coded, key=lambda each: each.speed)
        words = f"{phrases.setting(best)} {phrases.outcome(best)}, and rounds activations (docs/codecs.md)"
        sentences.append(f"Messages between stages take part of the step: {words}.")
    better = explanation.better[:MOST_SAVING]
    sentences.append(
        f"The fastest single change that fits is {better[0].name} ({phrases.setting(better[0])})."
        if better
        else "No single change fits and is faster."
    )
    return tuple(sentences), better


def _another_node(explanation: Explanation) -> Sentences:
    plan, cluster = explanation.plan, explanation.prediction.given
    devices, unit = cluster.node.devices, plan.mesh.world // plan.mesh.inter
    step = -(-devices // unit)  # number of groups that a node adds
    inter = plan.mesh.inter + step
    nodes = step * unit / devices
    title = "one more node" if nodes == 1 else f"{nodes:g} more nodes"
    wide = replace(plan.mesh, inter=inter)
    batch = plan.global_batch * inter // plan.mesh.inter
    same = explanation.attempt(f"{title} with", "the same batch", lambda: rebuilt(plan, mesh=wide))
    more = explanation.attempt(f"{title} with", f"a batch of {batch}", lambda: rebuilt(plan, mesh=wide, batch=batch))
    sentences = [
        f"The plan has {plan.mesh.world} ranks; the next world size with the same pipeline, group and tensor-parallel "
        f"sizes is {wide.world}, {title}, {wide.world / plan.mesh.world:.2f} times the devices."
    ]
    for each in (same, more):
        sentence = f"With {each.value} it {phrases.outcome(each)}."
        if each.prediction is not None:
            share = each.speed * plan.mesh.world / wide.world
            sentence += f" Tokens per second and device are {phrases.percent(share)} of the present."
        sentences.append(sentence)
    base = explanation.prediction
    faster = tuple(
        attempt(base, "situation", f"{name} twice as fast", "", base.on(changed))
        for name, changed in _twice_as_fast(cluster, plan.mesh.world)
    )
    sentences += [f"With the {each.value} it {phrases.outcome(each)}." for each in faster]
    twice = (own for own in explanation.situations if own.value.startswith("twice"))
    return tuple(sentences), (same, more, *twice, *faster)


def _twice_as_fast(cluster: Cluster, world: int) -> Iterator[tuple[str, Cluster]]:
    """Yield the links that a plan of `world` ranks uses, by name, and the cluster with twice the rate of each."""
    if cluster.node.link is not None and world > 1:
        yield "node.link", cluster.with_links(lambda link: link.times(2))
    if cluster.network is not None and world > cluster.node.devices:
        yield "network", cluster.with_network(lambda link: link.times(2))


def _fit(explanation: Explanation) -> Sentences:
    most = explanation.fullest
    margin = explanation.prediction.margin(most.rank)
    memory = explanation.prediction.seats.memory(most.rank)
    now = (
        f"The plan fits: rank {most.rank}, with the highest peak, leaves {format_bytes(margin)} of "
        f"{format_bytes(memory)} free."
        if margin >= 0
        else f"The plan does not fit: rank {most.rank} needs {format_bytes(-margin)} more than {format_bytes(memory)}."
    )
    every = (*explanation.alternatives("layout"), *explanation.others)
    exact = (each for each in every if each.fits and CHOICES[each.choice].is_exact)
    saving = sorted((each for each in exact if each.nbytes < 0), key=lambda each: -each.speed)[:MOST_SAVING]
    if not saving:
        return (now, "No single change both saves memory and fits."), ()
    best = saving[0]
    return (
        now,
        f"Of the changes that save memory and fit, {best.name} costs the least time: it {phrases.outcome(best)}.",
    ), tuple(saving)


# ----

_SIX = (
    _Question(
        "pipeline-with-zero-2", "Does a pipeline work with ZeRO-2 here, and what does it cost?", _pipeline_with_zero_2
    ),
    _Question("fullest-rank", "Why does this rank use more memory than the others?", _fullest_rank),
    _Question("why-not-zb-v", "Why is ZB-V no faster?", _why_not_zb_v),
    _Question("bottleneck", "What binds: memory, a rank or a link?", _what_binds),
    _Question("another-node", "What would another node, or a faster link, bring?", _another_node),
    _Question("fit", "Does it fit, and what would save memory for the least time?", _fit),
)

QUESTIONS: Mapping[str, _Question] = {question.key: question for question in _SIX}
"""Questions by key."""
