"""Names of messages, and who carries them."""

from __future__ import annotations

import pytest
import torch

from atoll.base.errors import RunError
from atoll.plans.plan import MeshShape
from atoll.runtime.transport import Channel, GlooTransport, Tag, connect, world_rank
from atoll.testing import run_ranks


def test_messages_of_one_channel_unit_and_part_share_a_tag_and_no_others_do() -> None:
    edges = (0, 1, Tag.LIMIT // 2, Tag.LIMIT - 2, Tag.LAST)
    channels = Channel.__members__.values()  # with those that have the number of another
    tags = [Tag(channel, index, part) for channel in channels for index in edges for part in edges]
    assert len({int(tag) for tag in tags}) == len(tags)
    assert all(0 <= int(tag) < 1 << 31 for tag in tags)


@pytest.mark.parametrize(("index", "part"), [(Tag.LIMIT, 0), (0, Tag.LIMIT), (-1, 0), (0, -1)])
def test_what_does_not_fit_a_tag_is_refused(index: int, part: int) -> None:
    with pytest.raises(RunError, match=f"FORWARD {index}, {part}: a message's tag counts to {Tag.LAST}"):
        int(Tag(Channel.FORWARD, index, part))


def transport_of_two() -> str:
    transport = connect(MeshShape(1, 2, 1).place(world_rank()), torch.device("cpu"))
    transport.close()
    return type(transport).__name__


def test_on_a_cpu_nothing_goes_by_way_of_a_copy() -> None:
    assert type(connect(MeshShape().place(0), torch.device("cpu"))) is GlooTransport
    assert run_ranks(transport_of_two, 2) == ["GlooTransport", "GlooTransport"]
