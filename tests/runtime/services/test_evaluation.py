"""Sums of evaluations."""

from __future__ import annotations

from atoll.runtime.services.evaluation import Evaluation


def test_evaluations_add_up() -> None:
    nothing, some, more = Evaluation(0.0, 0, 0.0), Evaluation(6.0, 4, 3.0), Evaluation(10.0, 2, 5.0)
    total = sum([some, more], nothing)
    assert total == Evaluation(16.0, 6, 8.0)
    assert (nothing.loss, some.loss, total.loss) == (0.0, 2.0, 2.0)
