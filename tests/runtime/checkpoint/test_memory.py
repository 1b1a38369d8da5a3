"""States in host memory: which one ranks continue from, who sends what, and what there is no room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from atoll.base.digests import seal, unseal
from atoll.base.errors import CheckpointError
from atoll.runtime.checkpoint import Generation, MemoryCheckpoints, Piece, meeting, memory
from atoll.runtime.checkpoint.memory import KeptFile, StateSource, choose_sources
from atoll.testing import run_ranks

# ---- which step, and from where


def seen(*hosts: dict[int, tuple[int, ...]], copies: Sequence[Sequence[int]] = ()) -> list[list[KeptFile]]:
    """Files in the memory of hosts, as ranks see them. hosts: of each rank, rank -> steps.  copies: who holds the
    same."""
    of = {rank: each for each in copies for rank in each}
    return [[KeptFile(r, s, 10 * r + s, of.get(r, (r,))) for r, steps in each.items() for s in steps] for each in hosts]


def test_the_newest_step_that_all_ranks_have_is_taken_and_torn_ones_are_named() -> None:
    step, sources, missing = choose_sources(seen({0: (4, 6)}, {1: (4, 6)}, {2: (4,)}), after=3)
    assert step == 4
    assert sources == [StateSource(0, 0, 4), StateSource(1, 1, 14), StateSource(2, 2, 24)]
    assert missing == {6: [2]}


@pytest.mark.parametrize("after", [4, 5])
def test_a_step_that_is_no_newer_than_the_disk_is_not_taken(after: int) -> None:
    assert choose_sources(seen({0: (2, 4)}, {1: (2, 4)}), after=after) == (None, [], {})


def test_a_lost_state_is_sent_by_a_replica_and_by_nobody_else() -> None:
    hosts = ({0: (4,)}, {1: (4,)}, {2: (4,)}, dict[int, tuple[int, ...]]())
    step, sources, missing = choose_sources(seen(*hosts, copies=[(0, 2), (1, 3)]), after=0)
    assert (step, sources[3], missing) == (4, StateSource(1, 1, 14), {})
    assert choose_sources(seen(*hosts, copies=[(0, 2)]), after=0) == (None, [], {4: [3]})


def test_a_replica_of_the_same_host_comes_before_another_host() -> None:
    pair = {1: (4,), 2: (4,)}
    hosts = ({0: (4,), 3: (4,)}, pair, pair, dict[int, tuple[int, ...]](pair))
    # Rank 3's own file is on the host of rank 0, and a replica's on that of rank 3.
    _, sources, _ = choose_sources(seen(*hosts, copies=[(2, 3)]), after=0)
    assert sources == [StateSource(0, 0, 4), StateSource(1, 1, 14), StateSource(2, 2, 24), StateSource(3, 2, 24)]
    # Its own file is as good as any, where it is not read but sent.
    _, sources, _ = choose_sources(seen(*hosts[:3], {}, copies=[(2, 3)]), after=0)
    assert sources[3] == StateSource(0, 3, 34)


def test_replicas_share_what_is_to_be_sent() -> None:
    full, empty = [{0: (4,)}, {1: (4,)}], [dict[int, tuple[int, ...]]()] * 4
    _, sources, _ = choose_sources(seen(*full, *empty, copies=[range(6)]), after=0)
    assert [source.by for source in sources] == [0, 1, 0, 1, 0, 1]


# ---- ranks of several hosts

RUN = "0123456789abcdef"


class Found(NamedTuple):
    """State that a rank found at a restart, or why it kept or found none."""

    step: int
    values: list[float]
    received: dict[int, int]
    notes: tuple[str, ...]
    own: list[str]


def state_of(rank: int, step: int) -> list[Piece]:
    """Ranks 0 and 2 hold the same, and 1 and 3: as two groups of layout III."""
    half = rank % 2
    values = torch.arange(5.0, dtype=torch.float64) + 10 * half + 100 * step
    return [Piece(("model", "w"), (10,), 5 * half, 5 * half + 5, values)]


def open_on(host: Path, folder: Path, plan: str = "a plan") -> MemoryCheckpoints:
    host.mkdir(exist_ok=True)
    opened = MemoryCheckpoints(host, plan=plan)
    opened.open(RUN if dist.get_rank() == 0 else None, folder / "run.json")
    return opened


def keep(folder: str, hosts: Sequence[int], steps: Sequence[int]) -> list[str]:
    rank = dist.get_rank()
    kept = open_on(Path(folder) / f"host-{hosts[rank]}", Path(folder))
    for step in steps:
        kept.keep(Path(f"step-{step:06d}"), state_of(rank, step), {"step": step, "of": rank}, identity={"step": step})
    kept.close()
    return names(Path(folder) / f"host-{hosts[rank]}", rank)


def names(host: Path, rank: int) -> list[str]:
    return sorted(path.name for path in (host / RUN / f"rank-{rank}").glob("*"))


def find(folder: str, hosts: Sequence[int], after: int = 0, plan: str = "a plan", part: int = 8) -> Found:
    rank, host = dist.get_rank(), Path(folder) / f"host-{hosts[dist.get_rank()]}"
    meeting.PART = part  # several messages
    kept = open_on(host, Path(folder), plan)
    try:
        found = kept.recover(after)
        asked = [Piece(each.path, each.shape, each.start, each.stop, each.tensor * 0) for each in state_of(rank, 0)]
        if found.path is not None:
            # The first rank's state is that of all.
            first = found.received.get(0, 0)
            assert Generation(found.path).fill(found.path, asked) == {"step": found.step, "of": first}
        return Found(found.step, asked[0].tensor.tolist(), dict(found.received), found.notes, names(host, rank))
    finally:
        kept.close()
        meeting.PART = 1 << 26


def kept_by_four(folder: Path, hosts: Sequence[int], steps: Sequence[int] = (2, 4, 6)) -> None:
    each = run_ranks(keep, 4, str(folder), hosts, steps)
    assert each == [[f"step-{step:06d}" for step in sorted(steps)[-2:]]] * 4


def check(found: Sequence[Found], step: int) -> None:
    assert [each.step for each in found] == [step] * 4
    assert [each.values for each in found] == [state_of(rank, step)[0].tensor.tolist() for rank in range(4)]


def lose(folder: Path, host: int, *ranks: int, step: int | None = None) -> None:
    for rank in ranks:
        for path in (folder / f"host-{host}" / RUN / f"rank-{rank}").glob(f"step-{step:06d}" if step else "*"):
            path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(0, 0, 0, 0), (0, 0, 1, 1)])
def test_two_generations_are_kept_and_the_newer_one_comes_back(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    kept_by_four(tmp_path, hosts)
    found = run_ranks(find, 4, str(tmp_path), hosts)
    check(found, 6)
    assert {each.received == {} and each.notes == () for each in found} == {True}
    assert all(each.step == 0 and each.notes == () for each in run_ranks(find, 4, str(tmp_path), hosts, 6))


def test_a_host_that_was_replaced_receives_its_states_from_the_other(tmp_path: Path) -> None:
    kept_by_four(tmp_path, (0, 0, 1, 1))
    lose(tmp_path, 1, 2, 3)
    found = run_ranks(find, 4, str(tmp_path), (0, 0, 1, 1))
    check(found, 6)
    assert found[0].received == {2: 0, 3: 1}
    assert [each.own for each in found] == [["step-000004", "step-000006"]] * 2 + [["step-000006"]] * 2
    # It is theirs now.
    again = run_ranks(find, 4, str(tmp_path), (0, 0, 1, 1))
    check(again, 6)
    assert again[0].received == {}


def test_hosts_that_come_back_in_another_order_send_what_they_have(tmp_path: Path) -> None:
    kept_by_four(tmp_path, (0, 0, 1, 1))
    lose(tmp_path, 0, 0)
    found = run_ranks(find, 4, str(tmp_path), (1, 1, 0, 0))
    check(found, 6)
    # Ranks 0 and 1 read the files of 2 and 3 on their new host, rank 2 has only rank 0's, which is lost.
    assert found[0].received == {0: 2, 1: 3, 3: 1}
    assert found[2].own == ["step-000006"]


def test_a_state_without_replica_is_lost_with_its_host(tmp_path: Path) -> None:
    kept_by_four(tmp_path, (0, 0, 1, 1))
    lose(tmp_path, 0, 1)
    lose(tmp_path, 1, 3, step=6)
    found = run_ranks(find, 4, str(tmp_path), (0, 0, 1, 1))
    check(found, 4)
    words = (
        "the state of step 6 in host memory is not whole: there is none of ranks 1, 3 or of a rank that holds the same"
    )
    assert {each.notes for each in found} == {(words,)}
    assert found[0].received == {1: 3}
    assert found[2].own == ["step-000004"], "a newer one would be that of a run that has gone another way"


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def test_a_damaged_state_is_that_of_a_replica_or_an_older_one(tmp_path: Path) -> None:
    kept_by_four(tmp_path, (0, 0, 1, 1))
    damage(tmp_path / "host-0" / RUN / "rank-1" / "step-000006")
    found = run_ranks(find, 4, str(tmp_path), (0, 0, 1, 1))
    check(found, 6)
    assert found[0].received == {1: 3}
    (note,) = found[3].notes
    assert "rank-1/step-000006: the digest does not match" in note
    # Rank 1 had no older one beside it any more: it takes that of rank 3.
    for host, rank in ((0, 1), (1, 3)):
        damage(tmp_path / f"host-{host}" / RUN / f"rank-{rank}" / "step-000006")
    found = run_ranks(find, 4, str(tmp_path), (0, 0, 1, 1))
    check(found, 4)
    assert len(found[0].notes) == 3
    assert found[0].notes[2].startswith("the state of step 6 in host memory is not whole: there is none of ranks 1, 3")


@pytest.mark.parametrize("plan", ["another plan", "a plan"])
def test_the_state_of_another_plan_or_run_is_removed_and_named(tmp_path: Path, plan: str) -> None:
    kept_by_four(tmp_path, (0, 0, 0, 0))
    words = "the state of step 6 in host memory is of another plan"
    if plan == "a plan":
        for rank in range(4):
            rename_run(tmp_path / "host-0" / RUN / f"rank-{rank}" / "step-000006")
            lose(tmp_path, 0, rank, step=4)
        words = "step-000006 is step 6 of rank 0 of the run fedcba9876543210"
    found = run_ranks(find, 4, str(tmp_path), (0, 0, 0, 0), 0, plan)
    assert [(each.step, each.own) for each in found] == [(0, [])] * 4
    assert any(words in note for note in found[0].notes)


def rename_run(path: Path) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[-8:], "little")
    header = seal(unseal(content[-8 - length : -8]) | {"run": "fedcba9876543210"})
    path.write_bytes(content[: -8 - length] + header + len(header).to_bytes(8, "little"))


# ---- room, and the end


def keep_without_room(folder: str, left: Sequence[int]) -> list[str]:
    """left: bytes of memory that each rank finds."""
    rank, host = dist.get_rank(), Path(folder) / "host-0"
    kept, free = open_on(host, Path(folder)), memory.free_memory
    memory.free_memory = lambda: left[rank]  # type: ignore[assignment]
    said = []
    try:
        for step in (2, 4):
            try:
                kept.keep(Path(f"step-{step:06d}"), state_of(rank, step), {}, identity={"step": step})
            except CheckpointError as error:
                said.append(str(error))
        return [*said, *names(host, rank)]
    finally:
        memory.free_memory = free
        kept.close()


def test_where_one_rank_has_no_room_none_writes(tmp_path: Path) -> None:
    found = run_ranks(keep_without_room, 2, str(tmp_path), (1 << 40, 100))
    for each in found:
        assert [*each[:2]] == [
            f"the state in host memory: rank 1 needs 128 B in {tmp_path}/host-0, and 100 B are left"
        ] * 2
        assert not any(name.startswith("step") for name in each[2:])


def fail_to_write(folder: str) -> list[str]:
    rank, host, said = dist.get_rank(), Path(folder) / "host-0", []
    kept, write = open_on(host, Path(folder)), memory.write_generation

    def fails(path: Path, *others: Any) -> None:
        raise OSError(28, "No space left on device")

    if rank == 1:
        memory.write_generation = fails  # type: ignore[assignment]
    try:
        for step in (2, 4):
            try:
                kept.keep(Path(f"step-{step:06d}"), state_of(rank, step), {}, identity={"step": step})
            except CheckpointError as error:
                said.append(f"{step}: {error}")
    finally:
        memory.write_generation = write
        kept.clear()
    return said


def test_a_write_that_fails_is_told_to_all_with_the_next_one(tmp_path: Path) -> None:
    first, second = run_ranks(fail_to_write, 2, str(tmp_path))
    assert first == second
    (words,) = first
    assert words.startswith("4: the state in host memory: rank 1 could not write")
    assert "No space left on device" in words
    assert list((tmp_path / "host-0").iterdir()) == []


@pytest.fixture
def alone(tmp_path: Path) -> Callable[..., MemoryCheckpoints]:
    """The generations of one rank, of a run whose folder is beside them."""

    def make(run: str, folder: Path) -> MemoryCheckpoints:
        folder.mkdir(exist_ok=True)
        kept = MemoryCheckpoints(tmp_path, plan="a plan")
        kept.open(run, folder / "run.json")
        return kept

    return make


def test_what_is_left_of_runs_that_are_gone_is_removed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, alone: Callable[..., MemoryCheckpoints]
) -> None:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("here", "gone", "again", "busy", "new")}
    opened = {name: alone(f"id-{name}", folder) for name, folder in folders.items() if name != "new"}
    (folders["here"] / "run.json").write_text('{"run": "id-here"}')
    (folders["again"] / "run.json").write_text('{"run": "id-another"}')
    for name in ("here", "gone", "again"):
        opened[name].close()
    (tmp_path / "of something else").mkdir()
    last = alone("id-new", folders["new"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["id-busy", "id-here", "id-new", "of something else"]
    last.clear()
    opened["busy"].clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["id-here", "of something else"]


def test_a_host_without_memory_folder_is_an_error_for_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="this host has no folder in memory: /dev/shm, or the one that ATOLL_M"):
        MemoryCheckpoints(None, plan="a plan").open("run", tmp_path / "run.json")


def test_newer_states_are_dropped(tmp_path: Path, alone: Callable[..., MemoryCheckpoints]) -> None:
    kept = alone("run", tmp_path / "folder")
    for step in (2, 4):
        kept.keep(Path(f"step-{step:06d}"), state_of(0, step), {}, identity={"step": step})
    kept.drop_after(4)
    assert sorted(path.name for path in (tmp_path / "run" / "rank-0").iterdir()) == ["step-000002", "step-000004"]
    kept.drop_after(2)
    assert sorted(path.name for path in (tmp_path / "run" / "rank-0").iterdir()) == ["step-000002"]
    kept.clear()
