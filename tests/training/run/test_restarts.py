"""After which failures ranks are started again, and how often."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from atoll.base.errors import RankError
from atoll.runtime.launch import LaunchResult
from atoll.testing.clock import Clock
from atoll.training.output.folder import RunFolder
from atoll.training.run.restarts import start_ranks

RUN = "0123456789abcdef"
KILLED = RankError("rank 1 was ended by SIGKILL", rank=1)


class Play:
    """Attempts that take steps, save and end as the test says."""

    def __init__(self, root: Path, attempts: Sequence[tuple[int, int, LaunchResult]]) -> None:
        self.folder = RunFolder(root)
        self.folder.checkpoints.mkdir(parents=True)
        self.left = list(attempts)
        self.said: list[str] = []
        self.told: list[int] = []
        self.worlds: list[int] = []
        self.clock = Clock()
        self.memory = root / "memory"
        self.kept: dict[int, Sequence[Sequence[int]]] = {}

    def start(self, ranks: int, attempt: int) -> LaunchResult:
        self.told.append(attempt)
        for rank, steps in enumerate(self.kept.get(attempt, ())):
            for step in steps:
                path = self.memory / RUN / f"rank-{rank}" / f"step-{step:06d}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        self.worlds.append(ranks)
        step, saved, ending = self.left.pop(0)
        if step:
            lines = (json.dumps({"step": each}) for each in range(1, step + 1))
            self.folder.metrics.write_text("\n".join(lines))
        if saved:
            (self.folder.checkpoints / "latest").write_text(f"step-{saved:06d}\n")
        return ending

    def run(self, most: int = 3, least: int = 4) -> int:
        def fewer(ranks: int) -> int | None:
            return ranks // 2 if ranks // 2 >= least else None

        return start_ranks(
            self.start,
            self.folder,
            ranks=4,
            most=most,
            fewer=fewer,
            memory=self.memory if self.kept else None,
            say=self.said.append,
            sleep=self.clock.sleep,
        )


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Play]:
    return lambda *attempts: Play(tmp_path, attempts)


def killed(rank: int = 1) -> LaunchResult:
    return LaunchResult(1, rank, was_lost=True, error=KILLED)


def test_killed_ranks_are_started_again_from_the_newest_checkpoint(play: Callable[..., Play]) -> None:
    found = play((5, 4, killed()), (9, 8, killed(0)), (12, 12, LaunchResult(0)))
    assert found.run() == 0
    assert found.told == [0, 1, 2]
    assert found.said == [
        "note: rank 1 was ended by SIGKILL",
        "note: the ranks are started again from step-000004 (1 of 3 without a new checkpoint)",
        "note: rank 1 was ended by SIGKILL",
        "note: the ranks are started again from step-000008 (1 of 3 without a new checkpoint)",
    ]


def test_a_silent_rank_is_started_again_and_has_been_spoken_of(play: Callable[..., Play]) -> None:
    found = play((5, 0, LaunchResult(1, 2, was_lost=True)), (12, 12, LaunchResult(0)))
    assert found.run() == 0
    assert found.said == ["note: the ranks are started again from the beginning (1 of 3 without a new checkpoint)"]


@pytest.mark.parametrize(
    "ending",
    [LaunchResult(0), LaunchResult(143), LaunchResult(130), LaunchResult(2, 1), LaunchResult(2, 1, was_lost=True)],
)
def test_neither_ends_nor_signals_nor_mistakes_start_anything(play: Callable[..., Play], ending: LaunchResult) -> None:
    found = play((5, 4, ending))
    assert found.run() == ending.code
    assert not found.said


def test_an_error_before_the_first_step_would_come_back(play: Callable[..., Play]) -> None:
    assert play((0, 0, LaunchResult(1, 1))).run() == 1


def test_an_error_after_steps_is_tried_again_and_ends_the_run_in_the_same_step(play: Callable[..., Play]) -> None:
    found = play((5, 4, LaunchResult(1, 1)), (5, 4, LaunchResult(1, 1)))
    assert found.run() == 1
    assert found.said[-1].startswith("error: not started again: rank 1 failed in step 6 twice in a row")


def test_the_same_step_of_another_rank_is_another_failure(play: Callable[..., Play]) -> None:
    assert play((5, 4, killed(0)), (5, 4, killed(1)), (5, 4, killed(0)), (7, 7, LaunchResult(0))).run() == 0


def test_a_failure_before_the_first_step_is_not_one_in_the_step_of_the_attempt_before(
    play: Callable[..., Play],
) -> None:
    assert play((5, 4, killed()), (0, 0, killed()), (7, 7, LaunchResult(0))).run() == 0


def test_starts_are_counted_until_there_is_a_new_checkpoint(play: Callable[..., Play]) -> None:
    found = play((5, 4, killed(0)), (6, 4, killed(1)), (7, 4, killed(0)), (8, 4, killed(1)))
    with pytest.raises(RankError, match=r"SIGKILL\nnot started again: 3 starts in a row brought no new checkpoint"):
        found.run()
    assert found.told == [0, 1, 2, 3]


def test_only_starts_after_attempts_without_a_step_wait(play: Callable[..., Play]) -> None:
    taken, idle = [(5, 4, killed(at)) for at in range(3)], [(0, 0, killed(at)) for at in range(6)]
    found = play(*taken, *idle, (6, 4, killed()), (7, 7, LaunchResult(0)))
    assert found.run(most=12) == 0
    assert found.clock.slept == [0.0, 0.0, 0.0, 1.0, 5.0, 15.0, 30.0, 30.0, 30.0, 0.0]


@pytest.mark.alone
@pytest.mark.slow
def test_a_start_waits_in_real_time(play: Callable[..., Play]) -> None:
    found = play((0, 0, killed(0)), (7, 7, LaunchResult(0)))
    begin = time.monotonic()
    assert start_ranks(found.start, found.folder, ranks=4, most=3) == 0
    assert time.monotonic() - begin >= 1.0


def test_without_restarts_the_error_is_raised_as_it_is(play: Callable[..., Play]) -> None:
    with pytest.raises(RankError, match=r"^rank 1 was ended by SIGKILL$"):
        play((5, 4, killed())).run(most=0)


# ---- states in host memory


def test_a_newer_state_in_memory_is_progress_and_is_named(play: Callable[..., Play]) -> None:
    found = play((5, 4, killed()), (9, 4, killed(0)), (10, 4, killed()), (12, 12, LaunchResult(0)))
    found.folder.write_run_id(RUN)
    # When it is killed, rank 0 has written one that rank 1 has not.
    found.kept = {0: [(4, 6), (4,)], 1: [(6, 8), (6, 8)], 2: []}
    assert found.run() == 0
    assert [line for line in found.said if "started again" in line] == [
        "note: the ranks are started again from step-000004 (1 of 3 without a new checkpoint)",
        "note: the ranks are started again from step 8 in host memory, or if that is damaged from step-000004 "
        "(1 of 3 without a new checkpoint)",
        "note: the ranks are started again from step 8 in host memory, or if that is damaged from step-000004 "
        "(2 of 3 without a new checkpoint)",
    ]


def test_a_state_in_memory_without_a_checkpoint_is_named(play: Callable[..., Play]) -> None:
    found = play((5, 0, killed()), (12, 12, LaunchResult(0)))
    found.folder.write_run_id(RUN)
    found.kept = {0: [(2, 4), (), (2, 4)]}
    (found.memory / RUN / "rank-1").mkdir(parents=True)  # whose files are lost: it will receive them
    assert found.run() == 0
    assert "from step 4 in host memory, or if that is damaged from the beginning (1 of" in found.said[-1]


def test_the_state_of_another_run_is_not_named(play: Callable[..., Play]) -> None:
    found = play((5, 4, killed()), (12, 12, LaunchResult(0)))
    found.folder.write_run_id(RUN[::-1])
    found.kept = {0: [(6,), (6,)]}
    assert found.run() == 0
    assert "started again from step-000004 (" in found.said[-1]


def test_fewer_ranks_do_not_continue_from_memory(play: Callable[..., Play]) -> None:
    found = play((5, 4, killed(3)), (0, 0, LaunchResult(1, 3)), (12, 12, LaunchResult(0)))
    found.folder.write_run_id(RUN)
    found.kept = {0: [(6,)] * 4}
    assert found.run(least=1) == 0
    assert "from step 6 in host memory" in found.said[1]
    assert found.said[-1] == (
        "note: 4 ranks did not return, so 2 go on from step-000004 (2 of 3 without a new checkpoint)"
    )


# ---- fewer ranks


LOST, BROKEN = LaunchResult(1, 3, was_lost=True), LaunchResult(1, 3)


@pytest.mark.parametrize("again", [LOST, BROKEN])
def test_ranks_that_do_not_come_back_are_left_out(play: Callable[..., Play], again: LaunchResult) -> None:
    found = play((5, 4, killed(3)), (0, 0, again), (12, 12, LaunchResult(0)))
    assert found.run(least=1) == 0
    assert found.worlds == [4, 4, 2]
    assert found.said[-1] == (
        "note: 4 ranks did not return, so 2 go on from step-000004 (2 of 3 without a new checkpoint)"
    )


def test_no_fewer_than_the_fewest(play: Callable[..., Play]) -> None:
    found = play((5, 4, killed(3)), (0, 0, LOST), (0, 0, LOST), (0, 0, LOST))
    assert found.run(least=2) == 1
    assert found.worlds == [4, 4, 2, 2]


def test_without_word_of_fewer_all_are_started(play: Callable[..., Play]) -> None:
    found = play((5, 4, killed(3)), (0, 0, LOST), (0, 0, BROKEN))
    assert found.run() == 1
    assert found.worlds == [4, 4, 4]


def test_a_first_start_that_fails_is_no_matter_of_ranks(play: Callable[..., Play]) -> None:
    found = play((0, 0, BROKEN))
    assert found.run(least=1) == 1
    assert found.worlds == [4]


def test_a_step_that_fails_twice_ends_the_run_on_any_ranks(play: Callable[..., Play]) -> None:
    found = play((5, 4, killed(3)), (0, 0, LOST), (5, 4, killed(1)), (5, 4, killed(1)))
    with pytest.raises(RankError, match="rank 1 failed in step 6 twice in a row"):
        found.run(least=1)
    assert found.worlds == [4, 4, 2, 2]
