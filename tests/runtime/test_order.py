"""Messages of a link are received in the order in which they are sent, which is all that NCCL matches them by."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.base.errors import PlanError
from atoll.plans.ir import Action, Op, Placement
from atoll.plans.schedules import CATALOGUE
from atoll.runtime.mail import Mail
from atoll.runtime.outline import _check_false_starts
from atoll.runtime.transport import Channel, Tag
from atoll.testing import run_ranks
from atoll.testing.ordered import in_order
from atoll.testing.parity import Case, History, reference, train_case, worst_difference
from atoll.testing.tiny import TinyConfig

BASE = Case(pipeline=4, microbatches=8, steps=3, model=TinyConfig(layers=6))
SCHEDULES = sorted(CATALOGUE)


def trained(case: Case) -> History:
    with in_order():
        return train_case(case)


def assert_ordered(case: Case) -> None:
    for history in run_ranks(trained, case.ranks, case):
        worst, where = worst_difference(history, reference(case))
        assert worst <= 1e-10, where


@pytest.mark.wide(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str) -> None:
    """The first step too, in which ranks do not know the shapes of their messages yet."""
    assert_ordered(replace(BASE, schedule=schedule))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2", "zb-v", "dualpipe-v"])
def test_verdicts_of_post_validated_steps(schedule: str) -> None:
    """A verdict is not behind forwards that its receiver takes later; a step that begins again meets no old receive."""
    case = replace(BASE, schedule=schedule, post_validation=True, clip=1e-3, steps=5)
    assert_ordered(case)
    assert_ordered(replace(case, clip=1.0))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_split_vocabulary(schedule: str) -> None:
    assert_ordered(replace(BASE, schedule=schedule, vocabulary_parallel=True))


def test_copies_of_a_parameter_on_the_first_and_the_last_rank() -> None:
    model = TinyConfig(layers=6, tied=True)
    assert_ordered(replace(BASE, model=model, pipeline=3, schedule="interleaved"))


class Recorder:
    """The transport of a receiving rank, which notes what is posted."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.posted: list[Tag] = []

    def receive(self, tensor: torch.Tensor, peer: int, tag: Tag) -> Recorder:
        self.posted.append(tag)
        if tag.channel is Channel.SHAPE:
            tensor[:5] = torch.tensor([0, 1, 2, 3, 4])  # float32, with a gradient, of two dims
        return self

    def wait(self) -> None:
        """It has come."""


def test_what_cannot_be_posted_yet_holds_up_what_is_behind_it() -> None:
    """Two kinds of microbatches, whose shapes come in headers: receives are posted in the order of the sends."""
    on: Any = Recorder()
    mail = Mail(on, lambda stage: stage)
    row = [Action(1, Op.RECV_F, microbatch) for microbatch in range(6)]
    batches = [{"input_ids": torch.zeros(1, 4 if microbatch < 4 else 5)} for microbatch in range(6)]
    for _ in range(2):
        on.posted.clear()
        mail.begin(row, batches, training=True)
        for action in row[:2]:
            mail.post(action)
        for _, later in zip_longest(row, row[2:]):
            if later is not None:
                mail.post(later)
            mail.receive(Op.RECV_F, 1)
        sent = [(tag.channel, tag.part) for tag in on.posted]
        headers = [(Channel.SHAPE, 0), (Channel.SHAPE, 4)]
        forwards = [(Channel.FORWARD, microbatch) for microbatch in range(6)]
        first = [headers[0], *forwards[:4], headers[1], *forwards[4:]]
        assert sent in (first, forwards)
    assert sent == forwards


def test_a_step_that_could_not_begin_again_is_refused() -> None:
    """Rank 1 takes a forward before its first backward that rank 0 sends after its own."""
    early = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    late = "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1"
    second = "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    right, wrong = (
        SimpleNamespace(
            placement=Placement("line", 2, 1),
            actions=[tuple(map(Action.parse, row.split())) for row in (first, second)],
        )
        for first in (early, late)
    )
    checked: Any = _check_false_starts
    checked(right)
    with pytest.raises(PlanError, match=r"rank 1 waits for 1RECV_F1 before its first backward, and rank 0 sends"):
        checked(wrong)
