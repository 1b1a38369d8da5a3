"""Whom an action communicates with, and which sends a step that begins again leaves behind: from the rows alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from atoll.plans import schedules
from atoll.plans.ir import Action, Op, insert_vocabulary, lower
from atoll.plans.plan import MeshShape
from atoll.program import Do, Instruction
from atoll.runtime.assemble.describe import Nowhere
from atoll.runtime.pipeline.waits import Waits
from atoll.runtime.plays import INSTEAD, PLAYS, call_of

RANKS = 4


def waits(rank: int, *, vocabulary: bool = False) -> Waits:
    """The waits of a pipeline rank of two data-parallel ones: world rank 2 * rank."""
    schedule = schedules.build("1f1b", ranks=RANKS, microbatches=4)
    schedule = lower(insert_vocabulary(schedule) if vocabulary else schedule)
    mesh = MeshShape(pipeline=RANKS, intra=2)
    return Waits(Nowhere(mesh.place(2 * rank), torch.device("meta")), schedule)


@pytest.mark.parametrize(
    ("action", "peer"),
    [
        ("1F0", 0),
        ("1B0", 4),
        ("1SEND_F0", 4),
        ("1RECV_F0", 0),
        ("1SEND_B0", 0),
        ("1RECV_B0", 4),
        ("0F0", None),
        ("3SEND_F0", None),
        ("1I0", None),
        ("1W0", None),
        ("1UNSHARD", None),
        # Of a split vocabulary: look-ups go to the first stage and come back from it, scores to and from the last.
        ("1SEND_L0", 0),
        ("1RECV_G0", 0),
        ("1RECV_S0", 6),
        ("1SEND_S0", 6),
        ("1RECV_T0", 6),
        ("3SEND_T0", None),
        ("1L0", None),
    ],
)
def test_peers(action: str, peer: int | None) -> None:
    assert waits(1).peer_of(Action.parse(action)) == peer


def test_sends_that_a_false_start_leaves_behind() -> None:
    """Of receives after TAKE_BACK, those whose senders have sent them before their own first backward."""
    own = waits(1)
    assert own.stale([Action.parse("1RECV_F0"), Action.parse("1RECV_B0")]) == [(Action.parse("1RECV_F0"), 0)]
    # Rank 0 of 1F1B computes four forwards before its first backward, and all microbatches are four.
    assert [peer for _, peer in own.stale([Action(1, Op.RECV_F, at) for at in range(4)])] == [0, 0, 0, 0]
    # Rank 1 computes three.
    assert [receive.microbatch for receive, _ in waits(2).stale([Action(2, Op.RECV_F, at) for at in range(4)])] == [
        0,
        1,
        2,
    ]


def test_the_first_stage_takes_the_look_ups_of_all_ranks() -> None:
    found = waits(0, vocabulary=True).stale([Action.parse("0RECV_F0")])
    assert found == [(Action.parse("0RECV_F0"), peer) for peer in (2, 4, 6)]
    assert waits(1, vocabulary=True).stale([Action.parse("1RECV_S0")]) == [(Action.parse("1RECV_S0"), 6)]


def test_an_extension_takes_the_place_of_the_core_where_it_applies() -> None:
    """And nowhere else: it is asked when a program is bound, so its absence costs nothing in a step."""
    on: Any = SimpleNamespace(extensions=())
    one, other = (Instruction(Do.FINISH_F, Action(stage, Op.F, 0)) for stage in (0, 1))
    core, instead = object(), object()

    def nobody(on: Any, step: Instruction) -> None:
        return None

    with (
        patch.dict(PLAYS, {Do.FINISH_F: lambda on, step: core}),
        patch.dict(INSTEAD, {Do.FINISH_F: [nobody, lambda on, step: instead if step.action.stage == 1 else None]}),
    ):
        assert (call_of(on, one), call_of(on, other)) == (core, instead)
    assert {Do.RECV_F, Do.SEND_B, Do.FINISH_F, Do.SEND_F, Do.RECV_B} <= set(INSTEAD)
    assert all(each(on, one) is None for several in INSTEAD.values() for each in several), "there are no extensions"


@pytest.mark.parametrize(
    ("mesh", "along", "peers"),
    [
        (MeshShape(inter=2, intra=2), "inter, intra", (0, 1, 2, 3)),
        (MeshShape(intra=2, pipeline=2), "intra", (0, 1)),
        (MeshShape(inter=2, pipeline=2), "inter", (0, 1)),
        (MeshShape(pipeline=2), None, ()),
    ],
)
def test_a_gather_waits_along_the_axes_that_have_other_ranks(
    mesh: MeshShape, along: str | None, peers: tuple[int, ...]
) -> None:
    schedule = lower(schedules.build("1f1b", ranks=mesh.pipeline, microbatches=2))
    found = Waits(Nowhere(mesh.place(0), torch.device("meta")), schedule).describe(
        Instruction(Do.WHOLE, Action.parse("0F0"), 1)
    )
    assert found.waits_for == peers
    assert ("along" in found.what) == (along is not None)
    assert along is None or f" along {along} on the " in found.what
