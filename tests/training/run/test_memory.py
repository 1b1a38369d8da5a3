"""Runs that keep the states of their ranks in host memory, lose ranks or hosts, and continue from there."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from atoll.base.errors import RankError
from atoll.plans.layouts import kept_bytes
from atoll.runtime.checkpoint import Archive, Generation, MemoryCheckpoints, Piece, load_pieces, memory
from atoll.runtime.checkpoint.generation import size_of_body
from atoll.testing import run_ranks
from atoll.training.config.load import from_dict
from atoll.training.output.display import Display
from atoll.training.output.folder import RunFolder, Start
from atoll.training.run.checkpoints import RunCheckpoints
from atoll.training.run.session import run_session
from atoll.training.run.signals import StopRequest
from atoll.training.setup.prediction import predict_plan
from tests.pages import ROOT, blocks
from tests.training.run import test_bad_steps
from tests.training.run.test_train import TEXT, assert_same_run, settings

LENGTH = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    # Ranks 0 and 2 hold the same, and 1 and 3.
    "groups": {"ranks": 4, "intra": 2, "layout": "III"},
    # Stages of one group each: ranks 0 and 1 hold the same, and 2 and 3.
    "stages": {"ranks": 4, "pipeline": 2, "layout": "NNN", "schedule": "zb-h1"},
    # Islands hold anchors alike, and nothing else.
    "islands": {"ranks": 4, "intra": 2, "layout": "IIG", "outer": {"every": 3, "delay": 1, "codec": "int8"}},
    "none": {"ranks": 4, "intra": 2, "layout": "IIG"},
}


class KilledError(Exception):
    """What ends the ranks of a test in the middle of a run."""


class Ended(NamedTuple):
    """step: that the run reached.  said: what rank 0 has said."""

    step: int
    said: list[str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(TEXT)
    return path


def values_of(folder: Path, corpus: Path, layout: str = "groups", **changes: Any) -> dict[str, dict[str, Any]]:
    """A run with a checkpoint at the end, and states in memory after 2, 4 and 6."""
    train = {"steps": LENGTH, "eval_every": 0, "prompt": None, **changes.pop("train", {})}
    saves = {"every": 0, "memory": 2, **changes.pop("checkpoint", {})}
    return settings(folder, corpus, parallel=LAYOUTS[layout], train=train, checkpoint=saves, **changes)


def session(
    values: dict[str, dict[str, Any]], hosts: Sequence[Path], start: Start, dies: tuple[int, int], left: int | None
) -> Ended:
    """One rank of a run. hosts: the memory of each rank's host.  dies: this rank, or all if it is -1, dies once it has
    kept the state of this step.  left: bytes of memory that its host says are left."""
    config, rank, said = from_dict(values), torch.distributed.get_rank(), []
    keep = RunCheckpoints.keep

    def keep_and_die(own: RunCheckpoints) -> None:
        keep(own)
        if own._engine.step_number == dies[1] and dies[0] in (-1, rank):
            raise KilledError

    def say(own: Display, text: str) -> None:
        said.append(text)

    with ExitStack() as patched:
        patched.enter_context(patch.dict(os.environ, ATOLL_MEMORY=str(hosts[rank])))
        patched.enter_context(patch.object(RunCheckpoints, "keep", keep_and_die))
        patched.enter_context(patch.object(Display, "say", say))
        if left is not None:
            patched.enter_context(patch.object(memory, "free_memory", lambda: left))
        ended = run_session(config, config.to_plan(), device=torch.device("cpu"), start=start, stop=StopRequest())
    return Ended(ended.step, said)


class Play:
    """A run on ranks whose hosts have folders for their memory."""

    def __init__(self, root: Path, corpus: Path, layout: str = "groups", hosts: Sequence[int] = (0, 0, 1, 1)) -> None:
        self.folder, self.corpus, self.layout = root / "run", corpus, layout
        self.hosts = [root / f"host-{host}" for host in hosts]
        for host in self.hosts:
            host.mkdir(exist_ok=True)

    def go(
        self,
        *,
        start: Start = Start.AUTO,
        dies: tuple[int, int] = (-1, 0),
        left: int | None = None,
        **changes: Any,
    ) -> Ended:
        values = values_of(self.folder, self.corpus, changes.pop("layout", self.layout), **changes)
        RunFolder(self.folder).check(start)
        ranks = values["parallel"]["ranks"]
        return run_ranks(session, ranks, values, self.hosts, start, dies, left)[0]

    def die(self, after: int, rank: int = -1, **changes: Any) -> None:
        with pytest.raises(RankError):
            self.go(dies=(rank, after), **changes)

    def kept(self) -> list[str]:
        """The files in the memory of all hosts, as host, rank and step."""
        hosts = dict.fromkeys(self.hosts)
        found = [(host, path) for host in hosts for path in host.glob("*/*/rank-*/step-*")]
        return sorted(f"{host.name}/{path.parent.name}/{path.name}" for host, path in found)

    def lose(self, *names: str) -> None:
        for name in names:
            host, rank, step = name.split("/")
            (path,) = (self.folder.parent / host).glob(f"*/*/{rank}/{step}")
            path.unlink()


@pytest.fixture
def play(tmp_path: Path, corpus: Path) -> Callable[..., Play]:
    return lambda *args, **kwargs: Play(tmp_path, corpus, *args, **kwargs)


def last_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint: parameters and the state of the optimizer."""
    path = folder / "checkpoints" / f"step-{LENGTH:06d}"
    stored = Archive(path).contents.tensors
    found = {name: torch.zeros(each.size, dtype=each.properties.dtype) for name, each in stored.items()}
    load_pieces(path, [Piece((name,), tuple(t.shape), 0, t.numel(), t.view(-1)) for name, t in found.items()])
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], Path]:
    """The undisturbed run of a layout."""
    made: dict[str, Path] = {}

    def of(layout: str) -> Path:
        if layout not in made:
            found = Play(tmp_path_factory.mktemp(layout), corpus, layout)
            found.go(checkpoint={"memory": 0})
            assert found.kept() == []
            assert not any(list(host.iterdir()) for host in found.hosts), "nothing is made without the key"
            made[layout] = found.folder
        return made[layout]

    return of


def assert_equal(got: Path, wanted: Path) -> None:
    """To the last bit."""
    assert_same_run(got, wanted)
    mine, other = last_of(got), last_of(wanted)
    assert mine.keys() == other.keys()
    assert len(mine) > 20
    assert [name for name in mine if not torch.equal(mine[name], other[name])] == []


def said_of(found: Ended, *words: str) -> list[str]:
    """What was said of states in memory; each of the words has to be there."""
    lines = [line for line in found.said if any(word in line for word in ("memory", "received", "digest", "resumed"))]
    for word in words:
        assert any(word in line for line in lines), (word, found.said)
    return lines


def of_all(step: int, hosts: Sequence[int] = (0, 0, 1, 1)) -> list[str]:
    return [f"host-{host}/rank-{rank}/step-{step:06d}" for rank, host in enumerate(hosts)]


def test_a_run_that_was_killed_continues_from_memory_to_the_same_bits(
    play: Callable[..., Play], whole: Callable[[str], Path]
) -> None:
    found = play()
    found.die(4)
    assert found.kept() == sorted([*of_all(2), *of_all(4)])
    assert not (found.folder / "checkpoints" / "latest").exists(), "there is nothing else to continue from"
    ended = found.go()
    assert said_of(ended) == ["resumed from the memory of this host: step 4, 32 samples"]
    assert ended.step == LENGTH
    assert_equal(found.folder, whole("groups"))
    assert found.kept() == [], "nothing is left of a run that has ended"
    assert {path.name for host in found.hosts for path in host.glob("*/*")} == set()


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["groups", "stages"])
def test_a_host_that_was_lost_receives_the_states_of_its_ranks(
    play: Callable[..., Play], whole: Callable[[str], Path], layout: str
) -> None:
    hosts = (0, 0, 1, 1) if layout == "groups" else (0, 1, 0, 1)
    found = play(layout, hosts)
    found.die(6)
    lost = [rank for rank, host in enumerate(hosts) if host == 1]
    shutil.rmtree(found.hosts[lost[0]])
    found.hosts[lost[0]].mkdir()
    ended = found.go()
    other = {2: 0, 3: 1} if layout == "groups" else {1: 0, 3: 2}
    assert said_of(ended) == [
        *(f"rank {rank} received its state from rank {other[rank]}" for rank in lost),
        "resumed from the memory of this host: step 6, 48 samples",
    ]
    page = next(text for text in blocks(ROOT / "docs" / "checkpoints.md", "text") if text.startswith("rank 2 "))
    shown = [re.sub(r"step \d+, \d+ samples", "step 6, 48 samples", line) for line in page.splitlines()]
    assert layout != "groups" or [said_of(ended)[0], said_of(ended)[-1]] == shown
    assert_equal(found.folder, whole(layout))


@pytest.mark.slow
def test_one_rank_that_dies_before_the_others_leaves_a_step_that_all_have(
    play: Callable[..., Play], whole: Callable[[str], Path]
) -> None:
    found = play()
    found.die(4, rank=1)
    ended = found.go()
    assert said_of(ended, "resumed from the memory of this host: step 4,")
    assert_equal(found.folder, whole("groups"))


@pytest.mark.slow
def test_without_replicas_a_lost_state_is_that_of_the_disk(
    play: Callable[..., Play], whole: Callable[[str], Path]
) -> None:
    found = play("none")
    found.die(6, checkpoint={"every": 5})
    found.lose("host-1/rank-3/step-000006")
    ended = found.go(checkpoint={"every": 5})
    words = "in host memory is not whole: there is none of rank 3 or of a rank that holds the same"
    first, second = said_of(ended)
    assert first == f"note: the state of step 6 {words}"
    assert second.startswith(f"resumed {found.folder}/checkpoints/step-000005: 5 steps, ")
    assert_equal(found.folder, whole("none"))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["none", "islands"])
def test_without_replicas_each_rank_continues_from_its_own_state(
    play: Callable[..., Play], whole: Callable[[str], Path], layout: str
) -> None:
    found = play(layout)
    found.die(6, checkpoint={"every": 5})
    assert said_of(found.go(checkpoint={"every": 5})) == ["resumed from the memory of this host: step 6, 48 samples"]
    assert_equal(found.folder, whole(layout))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_a_damaged_state_is_taken_from_a_replica_or_is_an_older_one(
    play: Callable[..., Play], whole: Callable[[str], Path]
) -> None:
    found = play()
    found.die(6)
    (damaged,) = found.hosts[1].glob("*/*/rank-1/step-000006")
    flip(damaged)
    (other,) = found.hosts[3].glob("*/*/rank-3/step-000006")
    flip(other)
    ended = found.go()
    first, second, third, fourth = said_of(ended)
    assert first == f"note: {damaged}: the digest does not match; its bytes were changed after they were written"
    assert second == first.replace(str(damaged), str(other))
    assert third.startswith("note: the state of step 6 in host memory is not whole: there is none of ranks 1, 3 or")
    assert fourth == "resumed from the memory of this host: step 4, 32 samples"
    assert_equal(found.folder, whole("groups"))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_has_the_bytes_that_are_predicted(play: Callable[..., Play], corpus: Path, layout: str) -> None:
    found = play(layout)
    found.die(4)
    config = from_dict(values_of(found.folder, corpus, layout))
    prediction = predict_plan(config, config.to_plan(), None, vocabulary=256)
    for rank, host in enumerate(found.hosts):
        (path,) = host.glob(f"*/*/rank-{rank}/step-000004")
        units = prediction.ranks.of(config.to_plan().mesh.place(rank).pp).units.values()
        predicted = sum(
            kept_bytes([segment], sharding) for unit in units for segment, sharding in unit.sharded_segments
        )
        pieces = Generation(path).claims
        # Without step counters, and but for padding: of flat buffers to 8 elements, of segments to all ranks.
        held = sum(claim.nbytes for claim in pieces if claim.path[-1] != "step")
        assert 0 <= predicted - held <= 0.05 * held
        assert path.stat().st_size >= size_of_body(pieces) >= held


@pytest.mark.slow
def test_a_newer_checkpoint_comes_before_memory(play: Callable[..., Play]) -> None:
    found = play()
    found.die(4)
    # As if the run had saved a checkpoint since, and another start had gone on without memory.
    ended = found.go(train={"steps": 5}, checkpoint={"memory": 0})
    assert ended.step == 5
    (only,) = said_of(found.go())
    assert only.startswith(f"resumed {found.folder}/checkpoints/step-000005")


@pytest.mark.slow
def test_another_plan_continues_from_the_disk(play: Callable[..., Play]) -> None:
    found = play()
    found.die(6, checkpoint={"every": 5})
    ended = found.go(layout="none", checkpoint={"every": 5})
    first, *others = said_of(ended)
    assert first.startswith("note: the state of step ")
    assert first.endswith("in host memory is of another plan")
    assert others[-1].startswith(f"resumed {found.folder}/checkpoints/step-000005")
    assert ended.step == LENGTH


def test_without_room_the_run_says_so_once_and_goes_on(play: Callable[..., Play], whole: Callable[[str], Path]) -> None:
    found = play()
    ended = found.go(left=1000)
    (said,) = said_of(ended)
    assert said.startswith(
        "note: checkpoint.memory is off for the rest of this run: the state in host memory: 4 problems"
    )
    assert "rank 2 needs " in said
    assert f"in {found.hosts[2]}/atoll-{os.getuid()}, and 1000 B are left" in said
    assert found.kept() == []
    assert_equal(found.folder, whole("groups"))


def test_a_run_that_begins_anew_removes_what_was_kept(play: Callable[..., Play]) -> None:
    found = play()
    found.die(4)
    before = json.loads((found.folder / "run.json").read_text())["content"]["run"]
    found.die(2, start=Start.OVERWRITE)
    assert found.kept() == of_all(2)
    assert before not in {path.name for host in found.hosts for path in host.glob("*/*")}


@pytest.mark.slow
def test_a_state_of_another_corpus_is_refused_as_a_checkpoint_is(
    play: Callable[..., Play], tmp_path: Path, corpus: Path
) -> None:
    found = play()
    found.die(4)
    found.corpus = tmp_path / "other.txt"
    found.corpus.write_text(TEXT.replace("fox", "cat"))
    with pytest.raises(RankError, match="step-000004 was trained on another corpus"):
        found.go()


def test_a_rollback_drops_newer_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 6 is bad: back to the checkpoint of step 4, with nothing of step 5 left to continue from."""
    monkeypatch.setenv("ATOLL_MEMORY", str(tmp_path))
    seen, drop = [], MemoryCheckpoints.drop_after

    def drop_and_look(own: MemoryCheckpoints, step: int) -> None:
        before = sorted(path.name for path in tmp_path.glob("*/*/rank-0/step-*"))
        drop(own, step)
        seen.append((step, before, sorted(path.name for path in tmp_path.glob("*/*/rank-0/step-*"))))

    monkeypatch.setattr(MemoryCheckpoints, "drop_after", drop_and_look)
    values = test_bad_steps.settings(tmp_path / "run", "rollback 2")
    values["checkpoint"]["memory"] = 1
    (tmp_path / "run").mkdir()
    assert test_bad_steps.in_rank(values, (5 * test_bad_steps.BATCH,)) == (8, "")
    assert seen == [(4, ["step-000004", "step-000005"], ["step-000004"])]
