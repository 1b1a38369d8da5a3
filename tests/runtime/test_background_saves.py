"""Saves that go on while training does: what is saved, what waits, and what a save that fails costs."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.base.errors import CheckpointError, RankError
from atoll.runtime.checkpoint import Background, Piece, background, folders, is_complete, load_pieces, verify
from atoll.testing import run_ranks
from atoll.testing.parity import Case, History, reference, whole_parameters, worst_difference
from atoll.testing.tiny import TinyConfig

CASE = Case(steps=6, model=TinyConfig.everything())
SAVED_AT = 3


def train_on_while_it_is_saved(case: Case, folder: str) -> bool:
    """Whether the file system was slow enough that steps were taken beside the save."""
    publish = folders.publish
    goes_on = threading.Event()

    def wait_and_publish(*args: Any) -> None:
        goes_on.wait()
        publish(*args)

    folders.publish = wait_and_publish  # type: ignore[assignment]
    try:
        engine = case.engine()
        for step in range(case.steps):
            if step == SAVED_AT:
                engine.save(folder, {"position": 7}, background=True)
            engine.step(case.share(engine, step))
        was_beside = not is_complete(Path(folder))
        goes_on.set()
        engine.finish_saving()
        engine.close()
    finally:
        folders.publish = publish
    return was_beside


def load_and_train(case: Case, folder: str) -> History:
    engine = case.engine()
    assert engine.load(folder) == {"position": 7}
    history = History()
    for step in range(SAVED_AT, case.steps):
        result = engine.step(case.share(engine, step))
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.parameters = whole_parameters(engine)
    engine.close()
    return history


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": "NNN", "inter": 2},
        {"layout": "IIG", "inter": 2, "intra": 2},
        {"layout": "GGG", "intra": 2, "pipeline": 2, "schedule": "zb-v"},
        {"layout": "NII", "intra": 2, "tensor": 2, "model": TinyConfig()},
    ],
    ids=["one rank", "NNN", "IIG", "GGG, pipeline", "NII, tensor"],
)
def test_steps_beside_a_save_change_nothing_in_it(changes: dict[str, Any], tmp_path: Path) -> None:
    case, folder = replace(CASE, **changes), str(tmp_path / "step-3")
    assert run_ranks(train_on_while_it_is_saved, case.ranks, case, folder, timeout=180)[0], "rank 0 publishes"
    assert not verify(Path(folder)).problems
    wanted = reference(replace(CASE, model=case.model))
    wanted = History(wanted.losses[SAVED_AT:], wanted.norms[SAVED_AT:], wanted.parameters)
    for history in run_ranks(load_and_train, 2, replace(CASE, layout="GGG", intra=2, model=case.model), folder):
        worst, where = worst_difference(history, wanted)
        assert worst <= 1e-10, f"{worst:.3g} at {where}"


def fail_and_go_on(case: Case, folder: str, failures: int) -> tuple[list[str | None], str]:
    """What was told of a save that fails so often, and what `finish_saving` raised. The engine steps and saves on."""
    background.PAUSES = (0.01, 0.01)
    publish, count = folders.publish, [0]

    def fail(*args: Any) -> None:
        count[0] += 1
        if count[0] <= failures:
            raise OSError(28, "No space left on device")
        publish(*args)

    folders.publish = fail  # type: ignore[assignment]
    told: list[str | None] = []
    try:
        engine = case.engine()
        engine.step(case.share(engine, 0))
        engine.save(f"{folder}/step-1", background=True, told=told.append)
        engine.step(case.share(engine, 1))
        raised = ""
        try:
            engine.finish_saving()
        except (CheckpointError, RankError) as error:
            raised = str(error)
        engine.step(case.share(engine, 2))
        engine.save(f"{folder}/step-3", background=True)
        engine.finish_saving()
        engine.close()
    finally:
        folders.publish = publish
    return told, raised


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_save_that_fails_is_tried_again_and_ends_nothing(failures: int, tmp_path: Path) -> None:
    for told, raised in run_ranks(fail_and_go_on, 2, replace(CASE, layout="NNG", intra=2), str(tmp_path), failures):
        assert len(told) == min(failures + 1, 3)
        assert "step-1 was not saved: rank 0 failed: OSError: [Errno 28] No space left on device" in str(told[0])
        assert "tried again" in str(told[0])
        assert (told[-1] is None) == (failures < 3) == (raised == "")
    assert is_complete(tmp_path / "step-1") == (failures < 3)
    assert is_complete(tmp_path / "step-3")
    assert not list(tmp_path.glob(".saving-*"))


def piece(value: float, numel: int = 1000) -> Piece:
    return Piece(("model", "w"), (numel,), 0, stop=numel, tensor=torch.full((numel,), float(value)))


def test_a_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, at_once, most = folders.publish, [0], [0]

    def slowly(*args: Any) -> None:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        time.sleep(0.2)
        publish(*args)
        at_once[0] -= 1

    monkeypatch.setattr(folders, "publish", slowly)
    saver = Background()
    for step in range(3):
        saver.begin(tmp_path / f"step-{step}", [piece(step)], {}, identity=None)
    assert is_complete(tmp_path / "step-1")
    saver.finish()
    assert most == [1]
    for step in range(3):
        found = piece(math.nan)
        load_pieces(tmp_path / f"step-{step}", [found])
        assert found.tensor.eq(step).all()


def test_the_copy_is_kept_for_the_next_save(tmp_path: Path) -> None:
    saver = Background()
    places = set()
    for step in range(3):
        saver.begin(tmp_path / f"step-{step}", [piece(step)], {}, identity=None)
        places.add(saver._buffer.data_ptr())
    saver.finish()
    assert len(places) == 1
    assert saver._buffer.numel() < 1000 * 4 + 64


def test_what_cannot_be_saved_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    saver = Background()
    with pytest.raises(CheckpointError, match="must be JSON"):
        saver.begin(tmp_path / "one", [piece(1)], {"loss": math.nan}, identity=None)
    saver.begin(tmp_path / "one", [piece(1)], {}, identity=None)
    saver.finish()
    assert is_complete(tmp_path / "one")


def test_who_does_not_listen_is_warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSES", ())

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "publish", fail)
    saver = Background()

    def save_and_wait() -> None:
        saver.begin(tmp_path / "one", [piece(1)], {}, identity=None)
        saver.wait()

    with pytest.warns(RuntimeWarning, match="given up after 1 attempt"):
        save_and_wait()
    with pytest.raises(RankError, match="No space left"):
        saver.finish()
