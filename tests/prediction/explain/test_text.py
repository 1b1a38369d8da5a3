"""The sentences: one example as a whole, and `atoll explain` on the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.base.errors import ConfigError
from atoll.base.units import format_bytes
from atoll.cli.main import app
from atoll.plans.plan import MeshShape
from atoll.prediction.cost import Cluster
from atoll.prediction.explain import Explanation, Measured, phrases, text
from atoll.training.config import load
from atoll.training.setup.prediction import predict_plan
from tests.prediction.explain.plans import PLANS, explained

ROOT = Path(__file__).parents[3]
CONFIG, CLUSTER = ROOT / "configs" / "llama-3-8b.toml", ROOT / "configs" / "clusters" / "h100.toml"


def lines(explanation: Explanation) -> str:
    return "\n".join(text.describe_explanation(explanation))


@pytest.mark.wide(1)
@pytest.mark.parametrize("explanation", PLANS.values(), ids=PLANS)
def test_every_plan_is_described(explanation: Explanation) -> None:
    found = lines(explanation)
    assert "Peak memory" in found
    assert "Bottleneck" in found
    assert "None" not in found
    assert max(map(len, found.splitlines())) < 140


def test_the_words_for_a_peak() -> None:
    explanation = explained()
    before = takewhile(lambda line: "has the highest peak" not in line, text.describe_explanation(explanation))
    found = [words for words in " ".join(" ".join(before).split()).split("Rank ") if " peaks " in words]
    assert len(found) == 2
    for each, words in zip(explanation.holdings, found, strict=True):
        (flight,) = each.in_flight
        several = "es" if flight.microbatches > 1 else ""
        assert words.startswith(
            f"{each.rank} peaks at {each.during}, with {flight.microbatches} microbatch{several} of stage {each.rank} "
            f"in flight, {format_bytes(flight.nbytes)} each. Its largest component is context, "
            f"{format_bytes(each.held.context)} of {format_bytes(each.held.total)}."
        )
    (idle,) = (replace(each, during=None, in_flight=()) for each in PLANS["one rank"].holdings)
    assert text._peak(idle).startswith("Rank 0 peaks between steps. Its largest component is context, ")


@pytest.mark.slow
def test_the_words_for_a_plan() -> None:
    explanation = explained()
    found = lines(explanation)
    most, busiest = explanation.fullest, explanation.busiest
    for sentence in (
        "llama on 16 ranks: pp 2 x inter 2 x intra 4",
        "layout GGG, 1f1b with 8 microbatches of 1 x 1024 tokens a rank, bfloat16",
        f"Rank {most.rank} has the highest peak and leaves",
        f"Rank {busiest} is the bottleneck of the pipeline: it waits least",
        "Memory is not the bottleneck: rank",
        "* marks the plan's layout. Bytes are per step, of the rank that sends most;",
        "These fit and are faster: ",
    ):
        assert sentence in found, sentence


def test_what_was_measured_stands_beside_what_was_predicted() -> None:
    explanation = explained()
    seconds = explanation.prediction.seconds
    parts = ({"forward": (1.0, 1.5)}, {"forward": (1.0, 1.25)})
    measured = Measured(1.25 * seconds, parts, (10**9, 2 * 10**9), "allocated")
    found = "\n".join(text.measured(explanation, measured))
    assert "predicted, +25.0 %." in found
    assert "The largest difference is on rank 0, forward (F): +500 ms." in found
    assert "Rank 1: 1.86 GiB measured (allocated)," in found


@pytest.mark.slow
def test_json_has_the_figures_of_the_prediction() -> None:
    prediction = predict_plan(config := load(CONFIG), config.to_plan(), Cluster.read(CLUSTER))
    result = CliRunner().invoke(app, ["explain", str(CONFIG), "--cluster", str(CLUSTER), "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["prediction"]["seconds"] == prediction.seconds
    assert [rank["peak"]["total"] for rank in found["ranks"]] == [prediction.peak(rank).total for rank in range(4)]
    assert len(found["layouts"]) == 14
    zb_v = next(each for each in found["alternatives"] if (each["choice"], each["value"]) == ("schedule", "zb-v"))
    assert zb_v["difference"]["seconds"] == pytest.approx(zb_v["seconds"] - prediction.seconds)
    assert sum(zb_v["difference"]["parts"].values()) == pytest.approx(zb_v["difference"]["seconds"], abs=1e-6)
    assert found["measured"] is None


@pytest.mark.slow
def test_questions_on_the_command_line() -> None:
    listed = CliRunner().invoke(app, ["explain", str(CONFIG), "--ask"])
    assert listed.exit_code == 0
    assert "fullest-rank" in listed.stdout
    words = ["explain", str(CONFIG), "--cluster", str(CLUSTER), "--ask"]
    answered = CliRunner().invoke(app, [*words, "fullest-rank"])
    assert answered.stdout.startswith("Why does this rank use more memory than the others?\n  The peak of rank")
    found = json.loads(CliRunner().invoke(app, [*words, "fullest-rank", "fit", "--json"]).stdout)
    assert [each["key"] for each in found["answers"]] == ["fullest-rank", "fit"]


def test_a_question_without_ask_is_refused() -> None:
    with pytest.raises(ConfigError, match="keys of questions follow --ask, as in --ask fit"):
        CliRunner().invoke(app, ["explain", str(CONFIG), "fit"], catch_exceptions=False)


def test_a_mesh_is_its_axes_with_more_than_one_rank() -> None:
    assert phrases.mesh(MeshShape(2, 1, 4)) == "8 ranks: pp 2 x intra 4"
    assert phrases.mesh(MeshShape(1, 2, 4, 2, expert=4)) == "16 ranks: inter 2 x intra 4 x tp 2, experts over 4"
    assert phrases.mesh(MeshShape(intra=2, sequence=2)) == "2 ranks: intra 2, sequences over 2"
    assert phrases.mesh(MeshShape()) == "1 rank"


def test_at_most_five_faster_alternatives_are_named() -> None:
    explanation = PLANS["GGG 1f1b"]
    said = " ".join(text._alternatives(explanation)).partition("These fit and are faster: ")[2]
    assert len(explanation.better) > 5
    assert re.findall(r"\((\d+\.\d{3}) x\)", said) == [f"{each.speed:.3f}" for each in explanation.better[:5]]
