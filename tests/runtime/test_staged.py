"""The transport of ranks that share a GPU: the same results by way of copies on the host.

Here the copies are made of tensors of the CPU, so that its messages are tested where there is no GPU. Streams and
events are tested by `make gpu`.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from atoll.plans.plan import Place
from atoll.runtime import engine
from atoll.runtime.transport import StagedTransport, Tag, gloo
from atoll.testing import run_ranks
from atoll.testing.parity import Case, History, train_case
from atoll.testing.tiny import TinyConfig


class Everything(StagedTransport):
    """Copies tensors of the CPU too."""

    def is_far(self, tensor: torch.Tensor) -> bool:
        return True


def train_staged(case: Case) -> tuple[History, int]:
    """Train with copies; also how many were made."""
    made = 0
    copied = gloo._host_copy_of

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal made
        made += 1
        return copied(tensor)

    def connect(place: Place, device: torch.device, *, has_islands: bool) -> StagedTransport:
        return Everything(place, device, has_islands=has_islands)

    with patch.object(engine, "connect", connect), patch.object(gloo, "_host_copy_of", counted):
        return train_case(case), made


@pytest.mark.wide(2)
@pytest.mark.parametrize("layout", ["NNN", "NIG", "IIG", "GGG"])
def test_copies_on_the_host_change_no_bit(layout: str) -> None:
    case = Case(layout, pipeline=2, inter=2, model=TinyConfig.everything(), schedule="zb-h1", reads_in_place=False)
    wanted = run_ranks(train_case, case.ranks, case)
    for (got, made), one in zip(run_ranks(train_staged, case.ranks, case), wanted, strict=True):
        assert made > 0
        assert got.losses == one.losses
        assert all(torch.equal(got.parameters[name], one.parameters[name]) for name in one.parameters)


def test_a_message_arrives_in_its_tensor() -> None:
    assert run_ranks(pass_on, 2) == [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]


def pass_on() -> list[float]:
    from atoll.plans.plan import MeshShape
    from atoll.runtime.transport import Channel, world_rank

    rank = world_rank()
    staged = Everything(MeshShape(intra=2).place(rank), torch.device("cpu"))
    value = torch.arange(1.0, 101.0) if rank == 0 else torch.zeros(100)
    tag = Tag(Channel.FORWARD, 0)
    (staged.send(value, 1, tag) if rank == 0 else staged.receive(value, 0, tag)).wait()
    return value[:3].tolist()
