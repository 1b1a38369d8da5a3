"""The warm pool: results in order, first errors quickly, stuck ranks named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from atoll.base.errors import LayoutError, RankError
from atoll.testing import RankPool, pool, run_ranks, worker
from atoll.testing.parity import Case, train_case
from atoll.testing.progress import run, wait_until


def rank_times(factor: int, *, offset: int = 0) -> int:
    return dist.get_rank() * factor + offset


def total_and_process(start: int) -> tuple[int, int]:
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return int(value.item()), os.getpid()


def fail_on_one(failing: int) -> None:
    if dist.get_rank() == failing:
        raise LayoutError("no level Q")
    dist.barrier()


def catch_nothing_and_hang() -> None:
    while True:
        try:
            time.sleep(0.1)
        except BaseException:
            continue


def fail_while_others_hang() -> None:
    if dist.get_rank() == 1:
        raise ValueError("one of two")
    catch_nothing_and_hang()


def die() -> None:
    if dist.get_rank() == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def warn() -> None:
    warnings.warn("old ways", DeprecationWarning, stacklevel=1)


def random_number() -> float:
    return torch.rand(()).item()


def set_wrong_state() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    os.chdir("/")


def state() -> tuple[torch.dtype, int, str]:
    return torch.get_default_dtype(), torch.get_num_threads(), os.getcwd()


def threads() -> int:
    """How many threads look after gloo's connections: each group has one, for ever if somebody keeps the group."""
    names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
    return sum("gloo_tcp" in name for name in names)


def process_and_threads() -> tuple[int, int]:
    return os.getpid(), worker.threads(os.getpid())


def tensors() -> torch.Tensor:
    return torch.full((2,), float(dist.get_rank()), requires_grad=True)


def test_results_come_in_rank_order_with_arguments() -> None:
    assert run_ranks(rank_times, 3, 10, offset=1) == [1, 11, 21]


def test_processes_stay_warm_and_groups_are_new() -> None:
    two = run_ranks(total_and_process, 2, 1)
    three = run_ranks(total_and_process, 3, 1)
    again = run_ranks(total_and_process, 2, 5)

    assert [value for value, _ in two + three + again] == [3, 3, 6, 6, 6, 11, 11]
    assert [process for _, process in three][:2] == [process for _, process in two]
    assert [process for _, process in again] == [process for _, process in two]


def leave_threads(count: int) -> int:
    for _ in range(count):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def test_processes_are_replaced_that_have_many_threads() -> None:
    with RankPool() as ranks:
        few = ranks.run(leave_threads, 2, 1)
        many = ranks.run(leave_threads, 2, pool.AT_MOST)
        assert ranks.run(leave_threads, 2, 0) != many
    assert few == many


def test_tensors_travel_back() -> None:
    first, second = run_ranks(tensors, 2)
    assert first.tolist() == [0.0, 0.0]
    assert second.tolist() == [1.0, 1.0]
    assert second.requires_grad


@pytest.mark.parametrize("failing", [0, 2])
def test_the_first_error_comes_with_rank_traceback_and_cause(failing: int) -> None:
    run_ranks(rank_times, 3, 1)
    with pytest.raises(RankError, match="no level Q") as caught:
        run_ranks(fail_on_one, 3, failing)

    assert caught.value.rank == failing
    assert "fail_on_one" in str(caught.value)
    assert isinstance(caught.value.__cause__, LayoutError)
    assert run_ranks(rank_times, 3, 1) == [0, 1, 2]


def fail_while_others_wait(note: Path) -> None:
    if dist.get_rank() == 1:
        raise ValueError("one of two")
    time.sleep(120)
    note.touch()


@pytest.mark.slow
def test_a_failure_ends_a_case_before_the_others_have_waited_to_the_end(tmp_path: Path) -> None:
    note = tmp_path / "waited"
    with RankPool() as pool, pytest.raises(RankError, match="one of two"):
        pool.run(fail_while_others_wait, 2, note, timeout=300)
    assert not note.exists()


@pytest.mark.slow
def test_ranks_that_hang_after_a_failure_are_replaced() -> None:
    with RankPool() as pool:
        before = pool.run(total_and_process, 2, 0)
        with pytest.raises(RankError, match="one of two"):
            pool.run(fail_while_others_hang, 2, timeout=30)
        after = pool.run(total_and_process, 2, 0)

    assert {process for _, process in before}.isdisjoint(process for _, process in after)


def test_a_timeout_names_the_stuck_ranks_and_shows_where_they_are() -> None:
    """Rank 1 has nothing to do. On a busy machine it may take its time: then both are named, and are given more."""
    with RankPool() as pool:
        for seconds in (0.5, 5.0, 50.0):
            pool.run(rank_times, 2, 1)
            with pytest.raises(
                RankError, match=rf"after {seconds:g} s without progress these ranks still ran: 0"
            ) as caught:
                pool.run(stuck_on_zero, 2, timeout=seconds)
            said = str(caught.value)
            if "still ran: 0\n" in said and "in stuck_on_zero" in said:
                break
        assert "still ran: 0\n" in said
        assert "in stuck_on_zero" in said
        assert pool.run(rank_times, 2, 1) == [0, 1]


def stuck_on_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


def test_a_rank_that_dies_is_told_with_its_last_words() -> None:
    with RankPool() as pool:
        with pytest.raises(RankError, match="SIGKILL") as caught:
            pool.run(die, 2, timeout=20)
        assert caught.value.rank == 1
        assert "last words" in str(caught.value)
        assert pool.run(rank_times, 2, 1) == [0, 1]


def test_warnings_are_treated_as_in_the_parent() -> None:
    with pytest.raises(RankError, match="old ways"):
        run_ranks(warn, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert run_ranks(warn, 1) == [None]


def test_a_case_leaves_nothing_behind() -> None:
    numbers = run_ranks(random_number, 2)
    run_ranks(set_wrong_state, 2)
    assert run_ranks(random_number, 2) == numbers
    assert run_ranks(state, 1) == [(torch.float32, 1, os.getcwd())]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_a_trained_case_leaves_no_group_behind() -> None:
    """One group may still wait for the garbage collector."""
    before = max(run_ranks(threads, 2))
    for _ in range(4):
        run_ranks(train_case, 2, Case(layout="GGG", intra=2, microbatches=2, steps=1))
    assert max(run_ranks(threads, 2)) <= before + 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_threads_do_not_grow_with_the_cases() -> None:
    """Past bug: DTensor's caches kept each case's mesh, which kept its group, which kept three threads."""
    with RankPool() as ranks:
        first = [process for process, _ in ranks.run(process_and_threads, 2)]
        for _ in range(10):
            ranks.run(train_case, 2, Case(tensor=2, microbatches=1, steps=1))
        last = ranks.run(process_and_threads, 2)
    assert [process for process, _ in last] == first
    assert max(threads for _, threads in last) <= worker.FEW + 3  # and those of the group of this case


def shared_maps() -> int:
    """Rings of other ranks, and of this one, that are still mapped."""
    return Path("/proc/self/maps").read_text().count("/atoll-")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mapped files")
def test_a_trained_case_leaves_no_shared_memory_behind() -> None:
    for _ in range(4):
        run_ranks(train_case, 2, Case(layout="GGG", intra=2, microbatches=2, steps=1))
    assert max(run_ranks(shared_maps, 2)) <= 4


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match="top of a module"):
        run_ranks(lambda: None, 2)


SCRIPT = """
from dataclasses import dataclass
import torch
from torch import nn
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_parity

@dataclass(frozen=True)
class Chain:
    def build(self):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        return nn.Sequential(nn.Embedding(16, 8), *layers, nn.Linear(8, 16))

    def batch(self, step, samples):
        ids = torch.randint(16, (samples, 6), generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids, "labels": ids.roll(-1, dims=1)}

def made(chain):
    return chain, torch.distributed.get_rank()

if __name__ == "__main__":
    print(run_ranks(made, 2, Chain()) == [(Chain(), 0), (Chain(), 1)])
    print(assert_parity(Case(layout="GGG", intra=2, model=Chain())))
"""


@pytest.mark.slow
def test_a_script_may_define_what_its_ranks_run(tmp_path: Path) -> None:
    """A model in the script that tests it was refused as a class that no rank can find."""
    script = tmp_path / "chain.py"
    script.write_text(SCRIPT)
    done = run([sys.executable, script])
    assert done.returncode == 0, done.stderr
    same, said = done.stdout.splitlines()
    assert same == "True"
    assert said.startswith("2 ranks against one process: loss and gradient norm of 3 steps, and 7 parameters after")


def test_what_an_interpreter_defines_is_refused() -> None:
    program = "from atoll.testing import run_ranks\ndef f(): pass\nrun_ranks(f, 1)"
    done = run([sys.executable, "-c", program])
    assert "define them at the top of a module or script" in done.stderr


PARENT = """
import os, sys
from atoll.testing import run_ranks
print(*run_ranks(os.getpid, 2), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_processes_die_with_their_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        processes = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()

    assert len(processes) == 2
    wait_until(lambda: not any(is_alive(process) for process in processes))


def is_alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
