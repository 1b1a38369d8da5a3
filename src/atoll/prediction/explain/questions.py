"""Questions about a plan and their answers, computed from its figures. A question is selected by its key."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from atoll.base.errors import ConfigError, PlanError
from atoll.base.units import format_bytes, format_count, format_seconds
from atoll.plans.ir.residency import Reduction
from atoll.plans.layouts import EFFECTIVE, Layout
from atoll.plans.plan import Plan
from atoll.prediction.cost import Prediction
from atoll.prediction.explain import phrases
from atoll.prediction.explain.alternative import EQUAL, Alternative, fullest_rank, predicted
from atoll.prediction.explain.choices import CHOICES, FIXED, rebuilt
from atoll.prediction.explain.explanation import Explanation
from atoll.prediction.explain.links import travel

BATCHES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Global batches to compare, as multiples of the plan's."""

MOST_SAVING = 6
"""Maximum number of memory-saving changes to list."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in sentences, with the alternatives its figures describe."""

    key: str
    question: str
    sentences: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()


Sentences = tuple[tuple[str, ...], tuple[Alternative, ...]]


@dataclass(frozen=True, slots=True)
class Question:
    """A question with a key."""

    key: str
    text: str
    answer: Callable[[Explanation], Sentences]


def ask(explanation: Explanation, key: str) -> Answer:
    """Answer the question with this key. Raises ConfigError with similar keys if there is none."""
    if key not in QUESTIONS:
        word = key.lower()
        near = [each for each in QUESTIONS if word in each] or difflib.get_close_matches(
            word, QUESTIONS, n=3, cutoff=0.45
        )
        guess = f"did you mean {' or '.join(map(repr, near[:3]))}? " if near else ""
        raise ConfigError(f"no question {key!r}: {guess}`atoll explain CONFIG --ask` lists them")
    question = QUESTIONS[key]
    sentences, alternatives = question.answer(explanation)
    return Answer(question.key, question.text, sentences, alternatives)


# ---- memory


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
    sentences.append(
        f"Schedule {explanation.plan.schedule.name} has {most.microbatches} of rank {most.rank}'s microbatches in "
        f"flight at that time, and {least.microbatches} of rank {least.rank}'s."
    )
    return tuple(sentences), ()


def _states_only(explanation: Explanation) -> Sentences:
    most = explanation.fullest
    held = most.held
    state = held.parameters + held.gradients + held.optimizer
    rest = {name: nbytes for name, nbytes in held._asdict().items() if name not in ("parameters", "gradients")}
    rest.pop("optimizer")
    terms = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in rest.items() if nbytes)
    return (
        f"Parameters, gradients and optimizer state of rank {most.rank} are {format_bytes(state)}, "
        f"{phrases.percent(state / held.total)} of the {format_bytes(held.total)} at its peak. The rest is {terms}.",
    ), ()


def _uneven_stages(explanation: Explanation) -> Sentences:
    totals = [each.held.total for each in explanation.holdings]
    average, most = sum(totals) / len(totals), explanation.fullest
    each = ", ".join(format_bytes(total) for total in totals)
    return (
        f"The peaks of the pipeline ranks are {each}.",
        f"Their average, {format_bytes(average)}, is {phrases.percent(1.0 - average / most.held.total)} less than the "
        f"peak of rank {most.rank}, which decides whether the plan fits.",
    ), ()


def _buffers(explanation: Explanation) -> Sentences:
    sentences = []
    for each in explanation.holdings:
        state = sum(own.total for own in each.state)
        most = max(explanation.prediction.held(each.rank), key=lambda held: held.gathered + held.buffers)
        both = most.gathered + most.buffers
        sentences.append(
            f"Rank {each.rank} has up to {format_bytes(both)} of buffers, {format_bytes(most.gathered)} of gathered "
            f"parameters and {format_bytes(most.buffers)} of gradients: {both / max(state, 1):.2f} times its state of "
            f"{format_bytes(state)}. At its peak they take {format_bytes(each.held.gathered + each.held.buffers)}."
        )
    return tuple(sentences), (*explanation.alternatives("prefetch"), *explanation.alternatives("unit"))


def _logits(explanation: Explanation) -> Sentences:
    prediction = explanation.prediction
    head = prediction.ranks.works[-1]
    rank = prediction.plan.schedule.placement.rank_of(prediction.plan.schedule.stages - 1)
    if explanation.plan.vocabulary_parallel:
        return (
            "The head is split over the pipeline ranks: each keeps its own slice of the softmax, which is counted as "
            "activations.",
        ), ()
    return (
        f"The head is on rank {rank}. It keeps {format_bytes(head.kept)} of each microbatch until its backward, logits "
        f"included, and its loss needs up to {format_bytes(max(head.peak, head.loss))} more for the gradients of "
        "logits.",
        f"The peak of rank {rank} is {format_bytes(prediction.peak(rank).total)}; the highest, of rank "
        f"{explanation.fullest.rank}, is {format_bytes(explanation.fullest.held.total)}.",
    ), tuple(explanation.alternatives("vocabulary"))


def _microbatch_limit(explanation: Explanation) -> Sentences:
    found: list[Alternative] = []
    size, limit = 2 * explanation.plan.microbatch, ""
    while not limit:
        each = explanation.alternative("microbatch", str(size))
        if each.prediction is None:
            limit = f"A microbatch of {size} samples is not possible: {each.refusal}."
            break
        found.append(each)
        if not each.fits:
            rank = fullest_rank(each.found)
            limit = (
                f"A microbatch of {size} samples does not fit: the peak of rank {rank} would be "
                f"{format_bytes(each.found.peak(rank).total)}, {format_bytes(-each.margin)} too much. The largest "
                f"increase is in {each.byte_cause}."
            )
        size *= 2
    best = max((each for each in found if each.is_better), key=lambda each: each.speed, default=None)
    gain = (
        f"The fastest larger one that fits, {best.value} samples, has {best.speed:.3f} times the tokens per second."
        if best
        else "No larger microbatch that fits is faster."
    )
    return (limit, gain), tuple(found)


def _fit(explanation: Explanation) -> Sentences:
    most = explanation.fullest
    margin = explanation.prediction.margin(most.rank)
    memory = explanation.prediction.device.memory
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


# ---- sharding


def _with_layout(name: str, explanation: Explanation) -> Sentences:
    """Compare a layout in a pipeline with the plan's reduction and residency, and with one reduction per step."""
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


def _layout_batch(explanation: Explanation) -> Sentences:
    """Find the best layout at smaller and larger batches, and where it changes."""
    base, plan = explanation.prediction, explanation.plan
    if plan.mesh.data == 1:
        return ("The plan has one data-parallel rank: all layouts are the same.",), ()
    sentences, names = [], []
    for times in BATCHES:
        batch = int(plan.global_batch * times)
        try:
            changed = rebuilt(plan, batch=batch)
            best = _best_layout(predicted(base, replace(changed, layout=layout)) for layout in EFFECTIVE)
        except PlanError as error:
            sentences.append(f"At {batch} samples a step: {error}.")
            continue
        if best is None:
            sentences.append(f"At {batch} samples a step no layout fits.")
            continue
        names.append(best.plan.layout.name)
        sentences.append(
            f"At {batch} samples a step {best.plan.layout} is best: {format_seconds(best.seconds)} a step, "
            f"highest peak {format_bytes(best.peak(fullest_rank(best)).total)}."
        )
    changes = len(set(names)) > 1
    ending = (
        f"So the choice depends on the batch, from small to large: {', '.join(dict.fromkeys(names))}."
        if changes
        else "The choice does not change in this range."
    )
    rule = (
        f"The best is the fastest that fits; among layouts within {phrases.percent(EQUAL)}, the one with the lowest "
        "peak memory."
    )
    return (*sentences, ending, rule), ()


def _best_layout(predictions: Iterable[Prediction]) -> Prediction | None:
    """Return the fastest that fits; among equally fast ones, the one with the lowest peak memory."""
    fastest = sorted(predictions, key=lambda each: each.seconds)
    first = next((each for each in fastest if each.fits), None)
    if first is None:
        return None
    equal = takewhile(lambda each: each.seconds <= (1.0 + EQUAL) * first.seconds, fastest)
    return min((each for each in equal if each.fits), key=_held)


def _held(prediction: Prediction) -> int:
    return prediction.peak(fullest_rank(prediction)).total


# ---- seconds


def _why_not(choice: str, value: str, explanation: Explanation) -> Sentences:
    if CHOICES[choice].now(explanation.plan) == value:
        return (f"The plan has {choice} {value}.",), ()
    if choice == "schedule" and explanation.plan.mesh.pipeline == 1:
        return (f"The plan has no pipeline: all schedules are then the same. {value} needs two ranks.",), ()
    if choice == "layout" and explanation.plan.mesh.data == 1:
        return ("The plan has one data-parallel rank: all layouts have the same memory and traffic.",), ()
    each = explanation.alternative(choice, value)
    sentences = [f"{phrases.subject(each)} {phrases.outcome(each)}."]
    if each.prediction is None:
        return tuple(sentences), (each,)
    terms = sorted(each.causes.items(), key=lambda item: -abs(item[1]))
    causes = ", ".join(f"{phrases.signed_seconds(value)} {name}" for name, value in terms if abs(value) >= 5e-7)
    sentences.append(f"The difference by cause, averaged over the pipeline ranks: {causes or 'none'}.")
    if choice == "schedule":
        before, after = (each.base.breakdown, each.found.breakdown)
        shares = [sum(own.bubble for own in every) / sum(own.total for own in every) for every in (before, after)]
        sentences.append(
            f"Its bubble is {phrases.percent(shares[1])} of the step, that of {each.was} is "
            f"{phrases.percent(shares[0])}."
        )
        sentences += _hops(each)
    return tuple(sentences), (each,)


def _hops(each: Alternative) -> list[str]:
    """Compare the number of messages, and describe the stages of a schedule with chunks."""
    times = [sum(bool(step.do.sends) for step in every.ranks.programs.ranks[0].instructions)
             for every in (each.base, each.found)]  # fmt: skip
    found = [f"Rank 0 sends {times[1]} messages per step instead of {times[0]}."] if times[0] != times[1] else []
    schedule = each.found.plan.schedule
    if schedule.chunks > 1:
        seconds = [
            sum(sum(each.found.parts(each.found.ranks.works[at])) for at in run) for run in each.found.ranks.runs
        ]
        found.append(
            f"It splits the model into {schedule.stages} stages, which take {format_seconds(min(seconds))} to "
            f"{format_seconds(max(seconds))} per microbatch; if they are unequal, ranks wait for the longest."
        )
    return found


def _bubble(explanation: Explanation) -> Sentences:
    parts, busiest = explanation.prediction.breakdown, explanation.busiest
    plan = explanation.plan
    if plan.mesh.pipeline == 1:
        return ("The plan has no pipeline, and no bubble.",), ()
    waits = ", ".join(f"rank {rank} {format_seconds(own.bubble)}" for rank, own in enumerate(parts))
    own = parts[busiest]
    ideal = (plan.mesh.pipeline - 1) / (plan.schedule.microbatches + plan.mesh.pipeline - 1)
    sentences = (
        f"Time that ranks wait for others: {waits}, of a step of {format_seconds(explanation.prediction.seconds)}.",
        f"Rank {busiest} waits least, {phrases.percent(own.bubble / own.total)} of the step. With equal stages and "
        f"free messages the bubble of 1F1B is {phrases.percent(ideal)}: warm-up and cool-down of a pipeline of "
        f"{plan.mesh.pipeline} with {plan.schedule.microbatches} microbatches.",
    )
    return sentences, tuple(explanation.alternatives("schedule"))


def _faster(explanation: Explanation) -> Sentences:
    better = explanation.better
    if not better:
        return ("No single change fits and is faster.",), ()
    best = better[0]
    return (
        f"Single changes that fit and are faster: {len(better)}. The fastest is {best.name} "
        f"({phrases.setting(best)}): it {phrases.outcome(best)}.",
    ), better


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
    return tuple(sentences), (same, more, *(own for own in explanation.situations if own.value.startswith("twice")))


def _recompute(explanation: Explanation) -> Sentences:
    every = explanation.alternatives("recompute")
    sentences = [f"{phrases.subject(each)} {phrases.outcome(each)}." for each in every]
    larger = explanation.attempt(
        "recompute block with",
        f"a microbatch of {2 * explanation.plan.microbatch}",
        lambda: rebuilt(replace(explanation.plan, recompute="block"), microbatch=2 * explanation.plan.microbatch),
    )
    sentences.append(f"With the saved memory, {larger.name} {phrases.outcome(larger)}.")
    return tuple(sentences), (*every, larger)


def _slow_link(explanation: Explanation) -> Sentences:
    step, sentences = explanation.prediction.seconds, []
    for axis, joins in phrases.AXES.items():
        of_rank = [
            [use for use in explanation.links(rank) if use.axis == axis]
            for rank in range(explanation.plan.mesh.pipeline)
        ]
        sent = max(sum(use.nbytes for use in uses) for uses in of_rank)
        busy = max(sum(use.seconds for use in uses) for uses in of_rank)
        if sent:
            sentences.append(
                f"The link {joins} transfers up to {format_bytes(sent)} per rank and step, and is busy for "
                f"{format_seconds(busy)}, {phrases.percent(busy / step)} of the step."
            )
    if not sentences:
        return ("The plan has one rank: it sends nothing.",), ()
    saved = next((each for each in explanation.resources if each.name == "network"), None)
    if saved is not None:
        sentences.append(f"A network that is 10 % faster would save {format_seconds(saved.saved)} a step.")
    halves = tuple(each for each in explanation.situations if each.value.endswith("half as fast"))
    sentences += [f"With the {each.value} it {phrases.outcome(each)}." for each in halves]
    return tuple(sentences), halves


def _constants(explanation: Explanation) -> Sentences:
    cluster = explanation.prediction.given
    own = cluster.device.efficiency
    sources = {
        "Rates and memory of the device": cluster.device.source,
        "Efficiency of kernels": own.source,
        "The link inside a node": cluster.node.link.source if cluster.node.link else "",
        "The network": cluster.network.source if cluster.network else "",
    }
    sentences = [f"{what}: {source}." for what, source in sources.items() if source]
    low, high = explanation.prediction.interval
    sentences.append(
        f"The mean error on held-out steps is {phrases.percent(own.spread)}, so a step is expected to take "
        f"{format_seconds(low)} to {format_seconds(high)}."
        if own.spread
        else "The error of these constants is unknown. `atoll doctor --calibrate` fits them to your own steps, and reports "
        "it."
    )
    values = ", ".join(
        f"{name} {value:.4g}" for name, value in own.model_dump().items() if name not in ("source", "spread")
    )
    sentences.append(f"The constants are {values}; docs/clusters.md defines them. Memory does not depend on them.")
    return tuple(sentences), ()


def _without_a_run(explanation: Explanation) -> Sentences:
    prediction = explanation.prediction
    instructions = sum(len(program.instructions) for program in prediction.ranks.programs.ranks)
    return (
        f"No rank was started. The programs of the {explanation.plan.mesh.world} ranks, "
        f"{format_count(instructions)} instructions on {explanation.plan.mesh.pipeline} pipeline ranks, were built by "
        "the code that a run uses, and simulated with the times of kernels and links.",
        "`atoll train CONFIG --dry-run` makes the other checks of a run.",
    ), ()


# ----

_QUESTIONS = (
    Question("fullest-rank", "Why does this rank use more memory than the others?", _fullest_rank),
    Question("fit", "Does it fit, and what would save memory for the least time?", _fit),
    Question("microbatch-limit", "What limits the size of the microbatch?", _microbatch_limit),
    Question("recompute", "What would recomputing activations cost, and what would it save?", _recompute),
    Question("states-only", "How much memory is not model state?", _states_only),
    Question("buffers", "How much memory do gathered copies and communication buffers take?", _buffers),
    Question("logits", "How much memory do the head and its logits take?", _logits),
    Question("uneven-stages", "How far is the average over pipeline ranks from the peak?", _uneven_stages),
    Question(
        "pipeline-with-zero-2",
        "Does a pipeline work with ZeRO-2 here, and what does it cost?",
        partial(_with_layout, "NGG"),
    ),
    Question(
        "pipeline-with-zero-3",
        "Does a pipeline work with ZeRO-3 here, and what does it cost?",
        partial(_with_layout, "GGG"),
    ),
    Question("layout-batch", "At what global batch would another layout be best?", _layout_batch),
    Question("bubble", "Where does the pipeline bubble come from, and which schedule has less?", _bubble),
    Question("faster", "Which single change would be faster?", _faster),
    Question("another-node", "How much faster would another node be?", _another_node),
    Question("slow-link", "How much does the network matter?", _slow_link),
    Question("constants", "Where do the constants behind the seconds come from?", _constants),
    Question("without-a-run", "How can this be known without a run?", _without_a_run),
)

_WHY_NOT = (
    *(Question(f"why-not-{name}", f"Why not schedule {name}?", partial(_why_not, "schedule", name)) for name in FIXED),
    *(
        Question(
            f"why-not-{layout.name.lower()}",
            f"Why not layout {layout}?",
            partial(_why_not, "layout", layout.name),
        )
        for layout in EFFECTIVE
    ),
)

QUESTIONS: Mapping[str, Question] = {question.key: question for question in (*_QUESTIONS, *_WHY_NOT)}
"""Questions by key; the why-not questions come last."""
