"""Runs that lose ranks or nodes go on, and ranks that would not run the same do not begin.

Here a short run of each mechanism loses something once; `make chaos` disturbs long ones, also under torchrun.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from atoll.testing.progress import finish, wait_until
from tests.cli.test_train import (
    ATOLL,
    atoll,
    config,
    free_port,
    has_taken,
    losses_of,
    nobody_is_left,
    ranks_of,
    sets,
)

__all__ = ["config"]

pytestmark = pytest.mark.usefixtures("warm")

LENGTH = 12
"""Steps of a run, which waits after some of them until the test has killed what it kills."""
STEPS = (f"train.steps={LENGTH}", "train.precision=fp64", "train.eval_every=0", "checkpoint.every=4")


WAITS = """
import os, pathlib, sys, time
from atoll.cli.main import main
from atoll.base.errors import RunError
from atoll.runtime.models.decoder import Attention
from atoll.training import process

folder, left = pathlib.Path(FOLDER), LEFT
attend, was_here = Attention.forward, process.has_gpus

def waiting(*arguments):
    while taken() > 5 and not (folder / "goes on").exists():
        time.sleep(0.01)
    return attend(*arguments)

def taken():
    try:
        return (folder / "run" / "metrics.jsonl").read_text().count("\\n")
    except OSError:
        return 0

def has_gpus(config, ranks):
    # What a machine says that had a device for each rank, and has lost some.
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and ranks > left:
        raise RunError(f"this machine has {left} GPUs for {ranks} ranks")
    return was_here(config, ranks)

Attention.forward = waiting
if left:
    process.has_gpus = has_gpus
main()
"""


def program_of(config: Path, *, left: int = 0) -> Path:
    """`atoll`, which waits after 5 steps until `go_on`. left: the devices that the machine has after the first start, 0
    for all."""
    program = config.parent / "program.py"
    program.write_text(WAITS.replace("FOLDER", repr(str(config.parent))).replace("LEFT", str(left)))
    return program


def is_waiting(folder: Path) -> bool:
    """True once a run has taken its 5 steps and written the checkpoint from which it will resume."""
    return has_taken(folder, 5) and (folder / "checkpoints" / "latest").exists()


def go_on(config: Path) -> None:
    (config.parent / "goes on").touch()


@contextmanager
def agent(config: Path, *overrides: str, port: int, nodes: str = "1") -> Iterator[subprocess.Popen[str]]:
    """A node of torchrun with one rank; it and its ranks are gone behind it."""
    # On a busy machine heartbeats come late: a node is not lost for that. One that comes late itself joins later.
    conf = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=20"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-id", "run"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", "--rdzv-conf", conf]
    command += [str(program_of(config)), "train", str(config), *sets(*STEPS, *overrides)]
    # Without it a node that is late finds nobody: torch does not tell it where the shared store is.
    own = environment({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    with subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """A node is lost: everything on it at once."""
    if process.poll() is None:
        node = psutil.Process(process.pid)
        for each in [*node.children(recursive=True), node]:
            each.kill()


def losses_without(config: Path, *overrides: str) -> list[float]:
    """Those of a run that nobody disturbs."""
    folder = config.parent / "other"
    result = atoll(*ATOLL, "train", config, *sets(*STEPS, *overrides, f"run.folder={folder}"))
    assert result.returncode == 0, result.stderr
    return losses_of(folder)


def world_of(folder: Path) -> int:
    mesh = json.loads((folder / "plan.json").read_text())["mesh"]
    return int(mesh["pp"] * mesh["inter"] * mesh["intra"] * mesh["tp"])


@pytest.mark.wide(0)
def test_a_lost_node_leaves_a_run_of_fewer_ranks(config: Path) -> None:
    overrides = ("parallel.pipeline=2", "parallel.schedule=zb-h1", "parallel.min_ranks=1")
    folder, port = config.parent / "run", free_port()
    with (
        agent(config, *overrides, port=port, nodes="1:2") as one,
        agent(config, *overrides, port=port, nodes="1:2") as other,
    ):
        wait_until(lambda: is_waiting(folder) and world_of(folder) == 2)
        # One of them hosts the rendezvous: the other is lost.
        left, lost = (one, other) if listens(one, port) else (other, one)
        kill(lost)
        go_on(config)
        words, _ = finish(left)
        assert left.returncode == 0, words
    assert "note: world size 1: parallel.pipeline=1 (parallel.min_ranks)" in words
    assert world_of(folder) == 1
    assert losses_of(folder) == pytest.approx(losses_without(config, "parallel.ranks=1"), abs=1e-10)
    wait_until(lambda: nobody_is_left(config))


def listens(process: subprocess.Popen[str], port: int) -> bool:
    connections = psutil.Process(process.pid).net_connections()
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)


@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again(config: Path) -> None:
    folder = config.parent / "run"
    with agent(config, port=free_port()) as process:
        wait_until(partial(is_waiting, folder), process)
        (rank,) = ranks_of(process.pid)
        rank.kill()
        go_on(config)
        words, _ = finish(process)
        assert process.returncode == 0, words
    assert "resumed" in words
    assert losses_of(folder) == losses_without(config, "parallel.ranks=1")
    wait_until(lambda: nobody_is_left(config))


def losing_a_rank(
    config: Path, *overrides: str, left: int = 0, until: Callable[[Path], bool] = is_waiting
) -> tuple[int, str]:
    """Exit code and words of a run whose rank 1 is killed after some steps.

    left: as of `program_of`.  until: what holds of the run's folder by then.
    """
    program = program_of(config, left=left)
    command = [sys.executable, str(program), "train", str(config), *sets(*STEPS, *overrides, "run.restarts=3")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(partial(until, config.parent / "run"), process)
        ranks_of(process.pid)[1].kill()
        go_on(config)
        _, words = finish(process)
        return process.returncode, words


@pytest.mark.slow
def test_local_ranks_that_do_not_come_back_are_left_out(config: Path) -> None:
    folder = config.parent / "run"
    code, words = losing_a_rank(config, "parallel.ranks=2", "parallel.pipeline=2", "parallel.min_ranks=1", left=1)
    assert code == 0, words
    assert "note: 2 ranks did not return, so 1 go on from step-" in words
    assert world_of(folder) == 1
    assert losses_of(folder) == pytest.approx(losses_without(config, "parallel.ranks=1"), abs=1e-10)
    wait_until(lambda: nobody_is_left(config))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_killed_rank_goes_on_from_the_memory_of_its_host(
    config: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Nothing is on the disk yet. is_lost: neither is anything of the rank in memory, but its replica has the same."""
    memory, folder = config.parent / "memory", config.parent / "run"
    memory.mkdir()
    monkeypatch.setenv("ATOLL_MEMORY", str(memory))

    def is_kept(folder: Path) -> bool:
        if len(list(memory.glob("*/*/rank-*/step-000006"))) < 2:
            return False
        if is_lost:
            (own,) = memory.glob("*/*/rank-1")
            shutil.rmtree(own)
        return True

    sizes = ("parallel.ranks=2", "parallel.layout=NNN")
    code, words = losing_a_rank(config, *sizes, "checkpoint.every=0", "checkpoint.memory=1", until=is_kept)
    assert code == 0, words
    assert (
        "note: the ranks are started again from step 6 in host memory, or if that is damaged from the beginning"
        in words
    )
    assert "resumed from the memory of this host: step 6, 48 samples" in words
    assert ("rank 1 received its state from rank 0" in words) == is_lost
    assert losses_of(folder) == losses_without(config, *sizes)
    assert list(memory.glob("*/*")) == []


# ---- islands

ISLANDS = """
[parallel.outer]
every = 4
fragments = 2
delay = 1
"""


@pytest.fixture
def islands(config: Path) -> Path:
    """A config whose groups take outer steps."""
    config.write_text(config.read_text() + ISLANDS)
    return config


@pytest.mark.slow
def test_an_island_that_was_killed_takes_part_again(islands: Path) -> None:
    """The run is to the last bit the one that nobody disturbs: anchors, residuals and each island's state are saved."""
    overrides = ("parallel.outer.codec=int8", "parallel.codecs.rounding=stochastic")
    code, words = losing_a_rank(islands, *overrides)
    assert code == 0, words
    assert "note: the ranks are started again from step-" in words
    losses = losses_of(islands.parent / "run")
    assert len(losses) == LENGTH
    assert losses == losses_without(islands, *overrides)
    wait_until(lambda: nobody_is_left(islands))


@pytest.mark.slow
def test_islands_go_on_with_fewer_ranks_in_each(islands: Path) -> None:
    sizes = ("parallel.ranks=4", "parallel.intra=2", "parallel.layout=IIG", "parallel.min_ranks=2")
    code, words = losing_a_rank(islands, *sizes, left=2)
    assert code == 0, words
    assert "note: 4 ranks did not return, so 2 go on from step-" in words
    folder = islands.parent / "run"
    mesh = json.loads((folder / "plan.json").read_text())["mesh"]
    assert (mesh["inter"], mesh["intra"]) == (2, 1)
    assert losses_of(folder) == pytest.approx(losses_without(islands, "parallel.ranks=2"), abs=1e-10)


@pytest.mark.slow
def test_the_islands_that_are_left_go_on_from_the_anchors(islands: Path) -> None:
    sizes = ("parallel.ranks=3", "parallel.min_ranks=2", "train.global_batch=12", "parallel.outer.codec=int8")
    code, words = losing_a_rank(islands, *sizes, left=2)
    assert code == 0, words
    assert "note: 3 ranks did not return, so 2 go on from step-" in words
    folder = islands.parent / "run"
    assert json.loads((folder / "plan.json").read_text())["mesh"]["inter"] == 2
    losses = losses_of(folder)
    assert len(losses) == LENGTH
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_one_island_that_is_left_does_not_go_on(islands: Path) -> None:
    """Without outer steps it would be another run: the error of the lost device ends it."""
    code, words = losing_a_rank(islands, "parallel.min_ranks=1", left=1)
    assert code == 1
    assert "this machine has 1 GPUs for 2 ranks" in words
    assert "go on from step-" not in words
    alone = atoll(*ATOLL, "train", islands, *sets("parallel.ranks=1", "parallel.min_ranks=1"))
    assert alone.returncode == 2
    assert "parallel.outer: outer steps are between groups, and with parallel.intra = 1 there is one" in alone.stderr


# ---- ranks that are not the same


def two_ranks(config: Path, *others: str, program: tuple[str, ...] = ATOLL) -> list[subprocess.Popen[str]]:
    """Ranks of a launcher that starts them anyhow; rank 1 is told `others` too."""
    from_launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [*program, "train", str(config), *sets(*(others if rank else ()))],
            env=environment({**from_launcher, "RANK": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def environment(given: dict[str, str]) -> dict[str, str]:
    return psutil.Process().environ() | given | {"GLOO_SOCKET_IFNAME": "lo"}


ANOTHER_VERSION = """
import os
from atoll.cli.main import main
from atoll.runtime import same

if os.environ["RANK"] == "1":
    same.__version__ = "7.0.0"  # and not that of atoll: in a fork of a warm process it has been read
main()
"""


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "text", "words"),
    [
        (
            ("train.lr=0.5", "parallel.timeout=500.0"),
            "",
            "the ranks are not the same:\n  train.lr = 0.003 on rank 0, 0.5 on rank 1\n"
            "  parallel.timeout = not set on rank 0, 500.0 on rank 1\nstart every rank with the same config",
        ),
        (("train.lr=0.5",), ANOTHER_VERSION, "the ranks are not the same: atoll 0.1.0 on rank 0, 7.0.0 on rank 1;"),
        (
            ("data.source=OTHER",),
            "",
            "the corpus with its tokenizer differs between rank 0 and rank 1; put data.source",
        ),
    ],
)
def test_ranks_that_are_not_the_same_do_not_begin(config: Path, others: tuple[str, ...], text: str, words: str) -> None:
    other, script = config.parent / "other.txt", config.parent / "program.py"
    other.write_text((config.parent / "text.txt").read_text().replace("line 77 ", "line 78 "))
    script.write_text(text)
    ranks = two_ranks(
        config,
        *(each.replace("OTHER", str(other)) for each in others),
        program=(sys.executable, str(script)) if text else ATOLL,
    )
    said = [finish(rank)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert sum(each.count("error:") for each in said) == 1
    assert words in "".join(said)
    assert not (config.parent / "run" / "metrics.jsonl").exists()


def test_a_mistake_is_not_started_again(config: Path) -> None:
    result = atoll(*ATOLL, "train", config, *sets("parallel.min_ranks=3", "run.restarts=3"))
    assert result.returncode == 2
    assert result.stderr.count("error:") == 1
    assert "parallel.ranks = 2 is fewer than parallel.min_ranks = 3" in result.stderr
