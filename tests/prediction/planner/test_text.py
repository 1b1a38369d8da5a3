"""The sentences of an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.prediction.planner import text
from atoll.prediction.planner.answer import Answer
from atoll.prediction.planner.search import Found
from atoll.prediction.planner.space import Made, Order
from tests.prediction.planner.test_search import narrow


@pytest.fixture(scope="module")
def answer() -> Answer:
    return Answer.of(narrow())


def line(answer: Answer, name: str) -> str:
    return next(each for each in text.describe_answer(answer) if each.split()[:1] == [name])


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (1.0, "no plan is faster: 7 plans simulated, of 3 meshes with microbatches, bounds exclude the rest"),
        (1.1, "no plan is faster: 7 plans simulated, of 3 meshes with microbatches, bounds exclude the rest"),
        (0.75, "another plan is at most 25.0% faster: 7 plans simulated, of 3 meshes with microbatches, bounds exclude "
               "slower ones"),
        (0.999, "another plan is at most 0.1% faster: 7 plans simulated, of 3 meshes with microbatches, bounds exclude "
                "slower ones"),
    ],
)  # fmt: skip
def test_the_proof_is_what_the_bounds_leave(answer: Answer, bound: float, words: str) -> None:
    found = Found(answer.found.fitting, None, bound * answer.best.seconds, frames=3, predicted=7)
    assert line(replace(answer, found=found), "proof") == f"proof   {words}"


def test_of_a_searched_order_no_bound_is_known(answer: Answer) -> None:
    best = answer.best
    made = Made(answer.search.predict(best).plan.schedule, (2, 2, 2, 2))
    own = best._replace(order=Order("joint", made=made))
    found = Found((own,), None, best.seconds, frames=3, predicted=7)
    assert line(replace(answer, found=found), "proof") == (
        "proof   the order was searched for this plan, after 7 plans simulated, of 3 meshes with microbatches; no "
        "bound on faster plans is known"
    )
    assert line(replace(answer, found=found), "schedule") == "schedule           joint on a line"


def test_another_choice_costs_a_share_of_the_best_step_or_does_not_fit(answer: Answer) -> None:
    assert line(answer, "layout") == "layout             NNN"
    rows = [each for each in text.describe_answer(answer) if each.endswith(" found none that fits")]
    assert [row.split("  ")[0] for row in rows] == ["layout"]
    (other,) = (each for each in answer.alternatives if each.seconds is not None)
    assert other.choice == "post-validation"
    cost = f"+{100 * (other.seconds / answer.best.seconds - 1):.1f}%"
    assert f"post-validation  no         {cost}" in text.describe_answer(answer)


def test_where_no_plan_fits_the_memory_that_the_nearest_lacks_is_said(answer: Answer) -> None:
    """Of 16 GiB without headroom: three times as much is 48 GiB, 32 too much."""
    search = replace(answer.search, goal=replace(answer.search.goal, headroom=0.0))
    assert search.limit == 16 * 2**30
    nearest = answer.best._replace(peak=3 * search.limit)
    said = Answer(search, Found((), nearest, answer.best.seconds, frames=1, predicted=1)).shortfall
    assert said.startswith("no plan fits 4 devices of 16.00 GiB, of which 0% stay free: the nearest (mesh pp 4, ")
    assert "holds 48.00 GiB on its fullest rank, 32.00 GiB too much. Use devices of 48.00 GiB, more devices" in said
