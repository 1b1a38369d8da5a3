"""The memory that ranks of one host share."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from atoll.runtime.transport import GlooTransport, Peers, Tag, shared_memory
from atoll.runtime.transport.host_memory import HostMemory
from atoll.runtime.transport.shared_memory import Arena, SharedMemory
from atoll.testing import run_ranks
from atoll.testing.parity import Case, train_case
from atoll.testing.tiny import TinyConfig
from tests.drawn import drawn

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files")


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory()


def seen(memory: SharedMemory) -> torch.Tensor:
    return shared_memory.mapped(os.getpid(), memory.descriptor, memory.nbytes)


def test_what_is_written_is_seen_at_its_place(memory: SharedMemory) -> None:
    first, second = memory.allocate(10, torch.float32), memory.allocate(5000, torch.float64)
    assert not first.any()
    assert not second.any()
    other = seen(memory)
    memory.close()
    first.copy_(torch.arange(10.0))
    second[3000:].fill_(7.0)
    assert torch.equal(shared_memory.view(other, memory.place(first), first), first)
    part = second[2999:3002]
    assert shared_memory.view(other, memory.place(part), part).tolist() == [0.0, 7.0, 7.0]
    assert memory.place(torch.zeros(3)) == -1


def test_what_is_held_is_what_was_asked_for(memory: SharedMemory) -> None:
    assert memory.allocate(10, torch.bfloat16).untyped_storage().nbytes() == 20


def test_a_file_that_is_closed_is_not_seen(memory: SharedMemory) -> None:
    memory.allocate(10, torch.float32)
    memory.close()
    with pytest.raises(OSError):
        seen(memory)


def test_a_part_is_lent_again_when_all_ranks_are_done_with_it(memory: SharedMemory) -> None:
    arena = Arena(memory.allocate(4096, torch.uint8), ranks=2)
    other = seen(memory)
    parts = [arena.lend(240, torch.float32, range(2)) for _ in range(4)]  # 960 bytes and a header: four do fill it
    assert all(part is not None for part in parts)
    assert arena.lend(1, torch.float32, range(2)) is None
    for at, part in enumerate(parts):
        assert part is not None
        part.fill_(float(at))

    def done(at: int, rank: int) -> None:
        part = parts[at]
        assert part is not None
        flags = arena.done(part)
        assert flags is not None
        other[memory.place(flags) + rank] = 1  # as another process does

    done(1, 0)
    assert arena.lend(240, torch.float32, range(2)) is None, "rank 1 still reads it"
    done(1, 1)
    again = arena.lend(200, torch.float32, range(2))
    assert again is not None
    assert parts[1] is not None
    assert again.data_ptr() == parts[1].data_ptr(), "in whatever order they are given back"
    again.fill_(9.0)
    for at in (0, 2, 3):
        part = parts[at]
        assert part is not None
        assert (part == at).all()


def test_what_is_larger_than_the_arena_finds_no_room(memory: SharedMemory) -> None:
    assert Arena(memory.allocate(4096, torch.uint8), ranks=2).lend(4096, torch.uint8, range(2)) is None


def trained_with(case: Case, nbytes: int) -> tuple[list[float], bool, int]:
    """Train with an arena of at most `nbytes`; also whether memory was shared, and the bytes sent in the group."""
    share, close = HostMemory.share, GlooTransport.close
    found: list[tuple[bool, int]] = []

    def less(memory: HostMemory, wanted: int) -> None:
        share(memory, min(wanted, nbytes))

    def look(transport: GlooTransport) -> None:
        found.append((bool(transport.memory.others), transport.sent["intra"]))
        close(transport)

    with patch.object(HostMemory, "share", less), patch.object(GlooTransport, "close", look):
        losses = train_case(case).losses
    return losses, *found[0]


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "groups"), drawn(6, ["NNN", "NNG", "III", "IIG", "NIG", "GGG"], [(1, 4), (2, 2)]), ids=str
)
def test_shared_memory_changes_no_bit(layout: str, groups: tuple[int, int]) -> None:
    """With room for all that is lent, for some of it, for nothing, and without shared memory."""
    inter, intra = groups
    case = Case(layout=layout, inter=inter, intra=intra, microbatches=8, model=TinyConfig.everything())
    wanted = run_ranks(trained_with, case.ranks, replace(case, reads_in_place=False, prefetch=0), 0)
    assert not any(sees for _, sees, _ in wanted)
    for nbytes, prefetch in ((1 << 20, None), (1 << 20, 0), (40_000, None), (0, 0)):
        results = run_ranks(trained_with, case.ranks, replace(case, prefetch=prefetch), nbytes)
        needs = layout != "GGG" or inter == 1 or nbytes
        assert all(sees for _, sees, _ in results) or not needs
        assert [losses for losses, _, _ in results] == [losses for losses, _, _ in wanted]
        if prefetch == 0:  # else what a row turns round with does not travel
            assert [sent for *_, sent in results] == [sent for *_, sent in wanted], "bytes are counted alike"


def test_a_host_without_a_number_shares_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is the one answer that ranks have in common and that says no."""
    assert shared_memory.host() > 0
    monkeypatch.setattr(shared_memory, "Path", lambda _: Path("/no/such/place"))
    assert shared_memory.host() == 0


def rooms_taken(case: Case) -> dict[str, int]:
    """How often a step takes room for what other ranks send, by axis."""
    engine = case.engine()
    swap = GlooTransport._swap
    taken: Counter[str] = Counter()

    def counting(transport: GlooTransport, out: Any, peers: Peers, tag: Tag, *, into: Any) -> Any:
        def room(at: int) -> torch.Tensor:
            taken[peers.axis] += 1
            return into(at)

        return swap(transport, out, peers, tag, into=room)

    with patch.object(GlooTransport, "_swap", counting):
        engine.step(case.share(engine, 0))
    engine.close()
    return taken


def test_what_is_read_in_place_takes_no_room_of_its_own() -> None:
    case = Case(layout="IIG", inter=2, intra=2, microbatches=4)
    for taken in run_ranks(rooms_taken, case.ranks, case):
        assert taken["inter"] > 0
        assert taken["intra"] == 0
    for taken in run_ranks(rooms_taken, case.ranks, replace(case, reads_in_place=False)):
        assert taken["intra"] > 0
