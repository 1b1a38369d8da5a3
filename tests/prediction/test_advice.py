"""What is said of plans that cost more than they have to."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.plans import schedules
from atoll.plans.layouts import Layout
from atoll.plans.plan import MeshShape, Plan
from atoll.prediction.advice import StageSize, advice


def said(layout: str, schedule: str, *, pipeline: int = 2, intra: int = 4, **options: Any) -> tuple[str, ...]:
    built = schedules.build(schedule, ranks=pipeline, microbatches=8)
    plan = Plan(MeshShape(pipeline=pipeline, intra=intra), Layout(layout), built, 1, **options)
    return advice(plan, [StageSize(1_000_000, 1_000_000)] * built.stages)


def test_reductions_each_microbatch_have_a_price() -> None:
    (line,) = said("NGG", "1f1b")
    # 3/4 of 4 MB, eight times or once, and once to bring the parameters back.
    assert line == (
        "layout NGG reduces gradients in each of 8 microbatches: 27 MB sent per rank and step,  6 MB with "
        "parallel.reduction = 'step', which keeps 4 MB of whole gradients"
    )
    assert not said("NGG", "1f1b", reduction="step")
    assert not said("NNG", "1f1b")


def test_a_v_forgets_what_a_run_would_keep() -> None:
    (line,) = said("GNG", "zb-v", residency="run")
    assert "schedule zb-v alternates between its stages, so residency 'run' gathers them" in line
    assert "with parallel.residency = 'step', which keeps 8 MB of whole parameters" in line
    assert not said("GNG", "breadth-first", residency="run")
    assert not said("GNG", "zb-v", residency="step")


@pytest.mark.parametrize("sizes", [{"pipeline": 1}, {"intra": 1}])
def test_without_pipeline_or_data_parallel_there_is_nothing_to_say(sizes: dict[str, int]) -> None:
    assert not said("GGG", "1f1b", **sizes)
