"""What a difference between predicted and measured seconds is likely to come from."""

from __future__ import annotations

import pytest

from atoll.prediction.cost.comparison import LATE, Difference, Taken, by_part, compare, taken
from atoll.program import Do
from tests.prediction.explain.plans import predicted


def of(do: Do, predicted: Taken, measured: Taken) -> Difference:
    return Difference(0, do, 1, predicted, measured)


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (Do.F, "kernels take 1.50 times as long as the device's constants predict"),
        (Do.I, "kernels take 1.50 times"),
        (Do.W, "kernels take 1.50 times"),
        (Do.STEP, "the optimizer takes 1.50 times as long as device.efficiency.update predicts"),
        (Do.WHOLE, "data-parallel links are slower, their other ranks later, or computation hides less"),
    ],
)
def test_what_takes_longer_has_a_cause_by_its_part(do: Do, words: str) -> None:
    found = of(do, Taken(4, 2.0, 0.5), Taken(4, 3.0, 0.75))
    assert found.seconds == 1.0
    assert found.cause.startswith(words)


@pytest.mark.parametrize("do", [Do.F, Do.STEP])
def test_what_was_not_predicted_is_the_hosts(do: Do) -> None:
    assert (
        of(do, Taken(0, 0.0, 0.0), Taken(4, 3.0, 0.75)).cause == "the host, or kernels that have no predicted seconds"
    )


def test_what_takes_less_waits_less() -> None:
    assert of(Do.RECV_F, Taken(2, 3.0, 1.0), Taken(2, 1.0, 0.5)).cause == "waits less for other pipeline ranks"
    assert of(Do.WHOLE, Taken(2, 3.0, 1.0), Taken(2, 1.0, 0.5)).cause.startswith("data-parallel links are faster")


@pytest.mark.parametrize(
    ("predicted", "measured", "is_late"),
    [
        (Taken(4, 2.0, 0.5), Taken(4, 6.0, 1.5), True),  # all of them by one second
        (Taken(4, 2.0, 0.5), Taken(4, 6.0, 0.5), False),  # one of them by four
        (Taken(4, 2.0, 0.5), Taken(4, 6.0, 0.5 + LATE), False),  # half of it by all: not more
        (Taken(4, 2.0, 0.5), Taken(4, 6.0, 0.51 + LATE), True),
        (Taken(4, 4.4, 1.1), Taken(4, 8.4, 1.2), False),
        (Taken(1, 1.0, 1.0), Taken(1, 9.0, 9.0), False),  # of one message nothing is known
    ],
)
def test_a_link_is_to_blame_if_every_message_is_late(predicted: Taken, measured: Taken, is_late: bool) -> None:
    words = "every message is late: the link" if is_late else "waits longer for other pipeline ranks"
    assert of(Do.RECV_F, predicted, measured).cause.startswith(words)


def test_parts_of_a_rank_add_up() -> None:
    found = by_part(
        [
            of(Do.F, Taken(1, 1.0, 1.0), Taken(1, 2.0, 2.0)),
            of(Do.F, Taken(1, 0.5, 0.5), Taken(1, 0.25, 0.25)),
            of(Do.STEP, Taken(0, 0.0, 0.0), Taken(1, 4.0, 4.0)),
            Difference(1, Do.F, 1, Taken(1, 8.0, 8.0), Taken(1, 8.0, 8.0)),
        ],
        0,
    )
    assert found == {"forward": (1.5, 2.25), "optimizer": (0.0, 4.0)}


def test_what_takes_time_in_either_is_compared() -> None:
    """An instruction that was not measured is in the differences, and one that was not predicted."""
    prediction = predicted()
    measured = [dict(taken(prediction, rank)) for rank in range(2)]
    forward, idle = (Do.F, 1), (Do.F, 99)
    missing = measured[0].pop(forward)
    measured[1] |= {(Do.FETCH, 3): Taken(1, 9.0, 9.0), idle: Taken(1, 0.0, 0.0)}
    first, second, *others = compare(prediction, measured)
    assert (first.rank, first.do, first.of, first.seconds) == (1, Do.FETCH, 3, 9.0)
    assert (second.rank, second.do, second.of, second.seconds) == (0, *forward, -missing.seconds)
    assert others
    assert all(each.seconds == 0 and each.predicted.seconds > 0 for each in others)
