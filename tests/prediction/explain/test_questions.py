"""Questions: each has an answer for every kind of plan, its figures are the plan's, and wrong keys are helped."""

from __future__ import annotations

import pytest

from atoll.base.errors import ConfigError
from atoll.base.units import format_bytes, format_seconds
from atoll.prediction.explain import QUESTIONS, Explanation, ask
from atoll.prediction.explain.alternative import fullest
from tests.prediction.explain.plans import PLANS, explained

QUICK = [key for key in QUESTIONS if key != "layout-batch"]


@pytest.mark.slow
@pytest.mark.parametrize("explanation", PLANS.values(), ids=PLANS)
def test_every_question_has_an_answer(explanation: Explanation) -> None:
    for key in QUICK:
        found = ask(explanation, key)
        assert found.key == key
        assert found.question.endswith("?")
        assert found.sentences
        for sentence in found.sentences:
            assert sentence[0].isupper() or sentence[0] == "`"
            assert sentence.endswith("."), sentence
            assert "None" not in sentence


def test_a_wrong_key_names_close_ones() -> None:
    with pytest.raises(ConfigError, match=r"no question 'fulest-rank': did you mean 'fullest-rank'"):
        ask(explained(), "fulest-rank")
    with pytest.raises(ConfigError, match=r"no question 'zb-v': did you mean 'why-not-zb-v'"):
        ask(explained(), "zb-v")


def test_the_fullest_rank_is_compared_by_component() -> None:
    explanation = explained()
    most, least = explanation.fullest.held, explanation.emptiest.held
    text = " ".join(ask(explanation, "fullest-rank").sentences)
    assert format_bytes(most.total) in text
    assert format_bytes(least.total) in text
    assert f"+{format_bytes(most.activations - least.activations)} activations" in text
    assert "in flight" in text


def test_a_pipeline_with_zero_2_says_its_price() -> None:
    explanation = explained("NNG")
    found = ask(explanation, "pipeline-with-zero-2")
    plain, sparing = found.alternatives
    assert plain.found.plan.layout.name == sparing.found.plan.layout.name == "NGG"
    assert sparing.found.plan.reduction == "step"
    assert found.sentences[0].startswith("Yes")
    assert format_seconds(plain.found.seconds) in found.sentences[1]
    assert format_bytes(fullest(plain.found).total) in found.sentences[1]
    assert plain.found.ranks.programs.ranks[0].sent["inter"] > sparing.found.ranks.programs.ranks[0].sent["inter"]


def test_why_not_another_schedule_gives_its_bubble_and_its_causes() -> None:
    explanation = explained("NNG")
    found = ask(explanation, "why-not-zb-v")
    (each,) = found.alternatives
    assert each.found.plan.schedule.name == "zb-v"
    text = " ".join(found.sentences)
    shares = [sum(own.bubble for own in every) / sum(own.total for own in every) for every in (
        each.found.breakdown, each.base.breakdown)]  # fmt: skip
    assert f"{100 * shares[0]:.1f} % of the step, that of 1f1b is {100 * shares[1]:.1f} %" in text
    assert ask(explanation, "why-not-1f1b").sentences == ("The plan has schedule 1f1b.",)


def test_another_node_keeps_the_pipeline_and_the_groups() -> None:
    found = ask(explained(), "another-node")
    same, more = found.alternatives[:2]
    assert same.prediction is None, "64 samples over 12 data-parallel ranks"
    assert more.found.plan.mesh.world == 24
    assert more.found.plan.global_batch == 96
    assert "24, 2 more nodes, 1.50 times the devices" in found.sentences[0]


def test_the_microbatch_is_limited_by_memory_or_by_the_batch() -> None:
    text = " ".join(ask(explained(), "microbatch-limit").sentences)
    assert "does not fit" in text or "is not possible" in text


@pytest.mark.slow
def test_the_best_layout_is_looked_for_at_other_batches() -> None:
    found = ask(explained(), "layout-batch")
    batches = [sentence for sentence in found.sentences if sentence.startswith("At ")]
    assert [int(sentence.split()[1]) for sentence in batches] == [16, 32, 64, 128, 256]
    assert all(" is best: " in sentence for sentence in batches)


def test_an_estimate_of_states_alone_is_told_its_share() -> None:
    explanation = explained()
    held = explanation.fullest.held
    share = (held.parameters + held.gradients + held.optimizer) / held.total
    assert f"{100 * share:.1f} % of the {format_bytes(held.total)}" in ask(explanation, "states-only").sentences[0]


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "zb-h1"])
def test_stages_and_messages_of_another_schedule_are_told_if_they_differ(schedule: str) -> None:
    """Two stages a rank double a rank's sends, or triple them on a loop, whose ends are neighbours."""
    explanation = explained("NNG")
    (each,) = ask(explanation, f"why-not-{schedule}").alternatives
    found = each.found
    text = " ".join(ask(explanation, f"why-not-{schedule}").sentences)
    sends = [sum(bool(step.do.sends) for step in own.ranks.programs.ranks[0].instructions)
             for own in (each.base, found)]  # fmt: skip
    assert sends == [8, {"interleaved": 24, "zb-v": 16, "zb-h1": 8}[schedule]]
    assert (f"Rank 0 sends {sends[1]} messages per step instead of 8." in text) == (schedule != "zb-h1")
    parts = [[sum(found.durations.parts(found.ranks.works[block])) for block in run] for run in found.ranks.runs]
    stages = [sum(own) for own in parts]
    told = f"into 4 stages, which take {format_seconds(min(stages))} to {format_seconds(max(stages))} per microbatch"
    assert (told in text) == (schedule != "zb-h1")
    assert ("It splits the model" in text) == (len(stages) == 4)
