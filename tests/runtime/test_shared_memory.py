"""The ring that ranks of one host share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.runtime import shared_memory
from atoll.runtime.shared_memory import Arena
from atoll.runtime.transport import GlooTransport
from atoll.testing import run_ranks
from atoll.testing.parity import Case, train
from atoll.testing.tiny import TinyConfig

pytestmark = pytest.mark.skipif(not shared_memory.FOLDER.is_dir(), reason="needs /dev/shm")


@pytest.fixture
def arena() -> Arena:
    return Arena(4096)


def seen(arena: Arena) -> torch.Tensor:
    return shared_memory.mapped(arena.token, arena.nbytes)


def test_a_block_is_seen_where_it_was_put(arena: Arena) -> None:
    block = torch.arange(10, dtype=torch.float64)
    place = arena.put(block, 2)
    other = seen(arena)
    arena.unlink()
    assert torch.equal(shared_memory.view(other, place, block), block)


def test_what_was_read_by_all_is_written_over_and_nothing_else(arena: Arena) -> None:
    other = seen(arena)
    arena.unlink()
    blocks = [torch.full((240,), float(at)) for at in range(4)]  # 960 bytes and a header: four do fill it
    places = [arena.put(block, 2) for block in blocks]
    assert min(places) >= 0
    assert arena.put(blocks[0], 2) == -1
    shared_memory.mark_read(other, places[0], 2, 0)
    assert arena.put(blocks[0], 2) == -1
    shared_memory.mark_read(other, places[1], 2, 0)
    shared_memory.mark_read(other, places[1], 2, 1)
    assert arena.put(blocks[0], 2) == -1, "a ring gives back in order"
    shared_memory.mark_read(other, places[0], 2, 1)
    again = arena.put(torch.full((240,), 9.0), 1)
    assert again >= 0
    for at in (2, 3):
        assert torch.equal(shared_memory.view(other, places[at], blocks[at]), blocks[at])


def test_what_is_larger_than_the_ring_finds_no_room(arena: Arena) -> None:
    arena.unlink()
    assert arena.put(torch.zeros(4096), 1) == -1


def test_a_ring_that_is_not_seen_is_not_made(arena: Arena) -> None:
    arena.unlink()
    with pytest.raises(FileNotFoundError):
        seen(arena)


def trained_with(case: Case, nbytes: int) -> tuple[list[float], bool]:
    share = GlooTransport.share_memory
    used: list[bool] = []

    def shared(transport: GlooTransport, _: int) -> None:
        if nbytes:
            share(transport, nbytes)
        used.append(transport._arena is not None)

    GlooTransport.share_memory = shared  # type: ignore[method-assign, assignment]
    try:
        return train(case).losses, used[0]
    finally:
        GlooTransport.share_memory = share  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", ["III", "IIG", "NIG", "GGG"])
def test_shared_memory_changes_no_bit(layout: str) -> None:
    """With room for all, for some blocks, and without any."""
    case = Case(layout=layout, inter=1, intra=4, microbatches=8, model=TinyConfig.everything())
    wanted = run_ranks(trained_with, case.ranks, case, 0)
    assert not any(used for _, used in wanted)
    for nbytes in (1 << 20, 512):
        results = run_ranks(trained_with, case.ranks, case, nbytes)
        assert all(used for _, used in results)
        assert [losses for losses, _ in results] == [losses for losses, _ in wanted]
    assert not list(Path(shared_memory.FOLDER).glob("atoll-*"))
