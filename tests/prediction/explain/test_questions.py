"""Questions: each has an answer for every kind of plan, its figures are the plan's, and wrong keys are helped."""

from __future__ import annotations

import pytest

from atoll.base.errors import ConfigError
from atoll.base.units import format_bytes, format_seconds
from atoll.prediction.explain import QUESTIONS, Explanation, ask
from atoll.prediction.explain.alternative import fullest
from atoll.prediction.explain.phrases import signed_seconds
from atoll.prediction.explain.questions import bottleneck
from tests.prediction.explain.plans import PLANS, explained


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize("explanation", PLANS.values(), ids=PLANS)
def test_every_question_has_an_answer(explanation: Explanation) -> None:
    for key in QUESTIONS:
        found = ask(explanation, key)
        assert found.key == key
        assert found.question.endswith("?")
        assert found.sentences
        for sentence in found.sentences:
            assert sentence[0].isupper() or sentence[0] == "`"
            assert sentence.endswith("."), sentence
            assert "None" not in sentence


@pytest.mark.parametrize("key", ["fulest-rank", "states-only", "why-not-gpipe"])
def test_an_unknown_question_lists_the_six(key: str) -> None:
    assert len(QUESTIONS) == 6
    with pytest.raises(ConfigError, match=f"no question '{key}'") as caught:
        ask(explained(), key)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(QUESTIONS)
    assert all(question.text in line for question, line in zip(QUESTIONS.values(), lines, strict=True))


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


def test_zb_v_has_its_bubble_and_its_causes() -> None:
    explanation = explained("NNG")
    found = ask(explanation, "why-not-zb-v")
    (each,) = found.alternatives
    assert each.found.plan.schedule.name == "zb-v"
    text = " ".join(found.sentences)
    causes = text.partition("averaged over the pipeline ranks: ")[2].partition(". ")[0]
    largest, value = max(each.causes.items(), key=lambda item: abs(item[1]))
    assert causes.startswith(f"{signed_seconds(value)} {largest}, ")
    shares = [sum(own.bubble for own in every) / sum(own.total for own in every) for every in (
        each.found.breakdown, each.base.breakdown)]  # fmt: skip
    assert f"{100 * shares[0]:.1f} % of the step, that of 1f1b is {100 * shares[1]:.1f} %" in text


def test_another_node_keeps_the_pipeline_and_the_groups() -> None:
    found = ask(explained(), "another-node")
    same, more = found.alternatives[:2]
    assert same.prediction is None, "64 samples over 12 data-parallel ranks"
    assert more.found.plan.mesh.world == 24
    assert more.found.plan.global_batch == 96
    assert "24, 2 more nodes, 1.50 times the devices" in found.sentences[0]


def test_another_link_is_as_much_faster_as_its_prediction() -> None:
    explanation = explained()
    faster = [each for each in ask(explanation, "another-node").alternatives if each.value.endswith("twice as fast")]
    assert [each.value.split()[0] for each in faster] == ["node.link", "network"]
    for each in faster:
        assert each.found.plan is explanation.plan
        assert each.seconds < 0
        assert f"With the {each.value} it takes " in " ".join(ask(explanation, "another-node").sentences)
    assert faster[1].found.given.network == explanation.prediction.given.network.times(2)  # type: ignore[union-attr]


def test_what_binds_is_the_section_of_the_explanation_with_links_and_bubble() -> None:
    explanation = explained("NNG")
    found = ask(explanation, "bottleneck")
    own = tuple(bottleneck(explanation))
    assert found.sentences[: len(own)] == own
    text = " ".join(found.sentences[len(own) :])
    busy = max(sum(use.seconds for use in explanation.links(rank) if use.axis == "inter") for rank in range(2))
    assert f"is busy for {format_seconds(busy)}" in text
    assert format_seconds(explanation.prediction.breakdown[explanation.busiest].bubble) in text
    assert found.alternatives == explanation.better[:6]


def test_stages_and_messages_of_zb_v_are_told() -> None:
    """Two stages a rank double a rank's sends."""
    explanation = explained("NNG")
    (each,) = ask(explanation, "why-not-zb-v").alternatives
    text = " ".join(ask(explanation, "why-not-zb-v").sentences)
    sends = [sum(bool(step.do.sends) for step in own.ranks.programs.ranks[0].instructions)
             for own in (each.base, each.found)]  # fmt: skip
    assert sends == [8, 16]
    assert "Rank 0 sends 16 messages per step instead of 8." in text
    found = each.found
    parts = [[sum(found.durations.parts(found.ranks.works[block])) for block in run] for run in found.ranks.runs]
    stages = [sum(own) for own in parts]
    assert f"into 4 stages, which take {format_seconds(min(stages))} to {format_seconds(max(stages))} per" in text
