"""A checkpoint taken anywhere continues anywhere else as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from atoll.base.errors import CheckpointError, DamageError, RankError, RunError
from atoll.plans import schedules
from atoll.plans.layouts import Codec, Codecs, Layout
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.models import Adapter
from atoll.runtime.models.adapter import SequentialAdapter
from atoll.runtime.pipeline.step_end import LossScaler
from atoll.runtime.sharding.state import SCALER
from atoll.testing import run_ranks
from atoll.testing.parity import Case, History, reference, whole_parameters, worst_difference
from atoll.testing.tiny import TinyConfig

EVERYTHING = TinyConfig.everything()
CASE = Case(steps=13, model=EVERYTHING)
SAVED_AT = 3


def train_and_save(case: Case, folder: str) -> None:
    engine = case.engine()
    for step in range(SAVED_AT):
        engine.step(case.share(engine, step))
    engine.save(folder, {"position": SAVED_AT * case.samples})
    engine.close()


def load_and_train(case: Case, folder: str) -> History:
    engine = case.engine()
    state = engine.load(folder)
    assert state == {"position": SAVED_AT * case.samples}
    assert engine.step_number == SAVED_AT
    history = History()
    for step in range(SAVED_AT, case.steps):
        result = engine.step(case.share(engine, step))
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.parameters = whole_parameters(engine)
    engine.close()
    return history


PAIRS = {
    "one rank -> GGG on 2x2": ({}, {"layout": "GGG", "inter": 2, "intra": 2}),
    "GGG on 2x2 -> one rank": ({"layout": "GGG", "inter": 2, "intra": 2}, {}),
    "IIG on 2x2 -> NNG on 1x2": ({"layout": "IIG", "inter": 2, "intra": 2}, {"layout": "NNG", "intra": 2}),
    "NNN on 2x1 -> III on 1x4": ({"layout": "NNN", "inter": 2}, {"layout": "III", "intra": 4}),
    "NIG on 2x2 -> ING on 1x2": ({"layout": "NIG", "inter": 2, "intra": 2}, {"layout": "ING", "intra": 2}),
    "pipeline 2 -> none": ({"pipeline": 2, "schedule": "gpipe"}, {"layout": "NGG", "inter": 2}),
    "none -> pipeline 2": ({"layout": "GGG", "intra": 2}, {"pipeline": 2, "layout": "IGG", "intra": 2}),
    "pipeline 2 -> pipeline 4": ({"pipeline": 2, "layout": "GGG", "inter": 2}, {"pipeline": 4, "layout": "NNN"}),
    "pipeline 4 -> one rank": ({"pipeline": 4}, {}),
    "1x4 -> 4x1": ({"layout": "GIG", "intra": 4}, {"layout": "GNG", "inter": 4}),
    "a layout that is not effective": ({"layout": "GNN", "inter": 2}, {"layout": "NGI", "intra": 2}),
}


@pytest.mark.wide(3)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_next_ten_steps_equal_the_uninterrupted_run(pair: str, tmp_path: Path) -> None:
    before, after = (replace(CASE, **changes) for changes in PAIRS[pair])
    folder = str(tmp_path / "step-3")
    run_ranks(train_and_save, before.ranks, before, folder)
    wanted = reference(CASE)
    wanted = History(wanted.losses[SAVED_AT:], wanted.norms[SAVED_AT:], wanted.parameters)
    for rank, history in enumerate(run_ranks(load_and_train, after.ranks, after, folder)):
        assert len(history.losses) == 10
        worst, where = worst_difference(history, wanted)
        assert worst <= 1e-10, f"rank {rank} differs by {worst:.3g} at {where}"


@pytest.mark.slow
def test_a_bf16_checkpoint_keeps_the_master(tmp_path: Path) -> None:
    case = Case(layout="IIG", intra=2, precision="bf16", steps=6, model=TinyConfig())
    folder = str(tmp_path / "half")
    run_ranks(train_and_save, 2, case, folder)
    uninterrupted = run_ranks(train_here, 2, case)
    for resumed, straight in zip(run_ranks(load_and_train, 2, case, folder), uninterrupted, strict=True):
        assert resumed.losses == straight.losses[SAVED_AT:]
        for name, value in resumed.parameters.items():
            assert torch.equal(value, straight.parameters[name]), name


def test_what_codecs_owe_is_the_same_beside_a_loss_scale(tmp_path: Path) -> None:
    """Their residuals are saved as gradients, without the factor that the loss has in fp16."""
    codecs = Codecs(Codec("int8", 8), Codec("int4", 4))
    case = Case(layout="NNG", inter=2, precision="fp16", steps=6, model=TinyConfig(), codecs=codecs)
    folder = str(tmp_path / "owed")
    uninterrupted = run_ranks(train_here, 2, case)
    run_ranks(train_and_save, 2, case, folder)
    for resumed, straight in zip(run_ranks(load_and_train, 2, case, folder), uninterrupted, strict=True):
        assert resumed.losses == straight.losses[SAVED_AT:]
        assert all(torch.equal(value, straight.parameters[name]) for name, value in resumed.parameters.items())


def train_here(case: Case) -> History:
    engine = case.engine()
    history = History()
    for step in range(case.steps):
        history.losses.append(engine.step(case.share(engine, step)).loss)
    history.parameters = whole_parameters(engine)
    engine.close()
    return history


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_reads_it_with_its_own_tools(tmp_path: Path) -> None:
    case = replace(CASE, layout="GGG", inter=2, intra=2, pipeline=1)
    folder = str(tmp_path / "step-3")
    run_ranks(train_and_save, case.ranks, case, folder)
    wanted = reference(replace(CASE, steps=SAVED_AT)).parameters
    state = {"model": {name: torch.full_like(value, torch.nan) for name, value in wanted.items()}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for name, value in wanted.items():
        assert torch.allclose(state["model"][name], value, rtol=0, atol=1e-10), name


class Scaled(nn.Module):
    """A linear whose output is scaled by what lies in a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(2, 3))

    def forward(self, hidden: Tensor) -> Tensor:
        scaled: Tensor = self.linear(hidden) * self.scale.sum()
        return scaled


class Scaling(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Scaled(), Scaled())

    def atoll_adapter(self) -> Adapter:
        return SequentialAdapter(self, lambda outputs, batch: outputs.square().sum())


def scaling(pipeline: int) -> tuple[Scaling, Engine]:
    torch.manual_seed(0)  # a model with values has the same ones on every rank
    model = Scaling()
    schedule = schedules.build("1f1b", ranks=pipeline, microbatches=2)
    plan = Plan(MeshShape(pipeline=pipeline), Layout("NNN"), schedule, 1)
    return model, Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))


def save_scaled(folder: str) -> None:
    model, engine = scaling(1)
    for at, block in enumerate(model):
        assert isinstance(block, Scaled)
        block.scale.copy_(torch.arange(6).view(2, 3) + 10 * at)
    engine.save(folder)
    engine.close()


def load_scaled(folder: str) -> dict[str, Tensor]:
    _, engine = scaling(2)
    engine.load(folder)
    found = {name: value for name, value in engine.state_dict().items() if name.endswith("scale")}
    engine.close()
    return found  # type: ignore[return-value]


def test_persistent_buffers_are_saved_and_read_on_another_mesh(tmp_path: Path) -> None:
    folder = str(tmp_path / "scaled")
    run_ranks(save_scaled, 1, folder)
    for rank, found in enumerate(run_ranks(load_scaled, 2, folder)):
        assert list(found) == [f"{rank}.scale"]
        assert torch.equal(found[f"{rank}.scale"], torch.arange(6.0).view(2, 3) + 10 * rank)


def test_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    folder = str(tmp_path / "step-3")
    run_ranks(train_and_save, 1, Case(model=TinyConfig()), folder)
    with pytest.raises(RankError, match=r"layers|shape|5") as caught:
        run_ranks(load_and_train, 2, Case(intra=2, model=TinyConfig(layers=5)), folder)
    assert isinstance(caught.value.__cause__, CheckpointError)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="no checkpoint at"):
        run_ranks(load_and_train, 2, Case(intra=2), str(tmp_path / "nowhere"))


def load_the_good_one(case: Case, damaged: str, good: str) -> tuple[str, str, History]:
    """What a rank says of a damaged checkpoint and of a step after it; and the run that goes on from a good one."""
    engine = case.engine()
    with pytest.raises(DamageError) as refused:
        engine.load(damaged)
    with pytest.raises(RunError) as stopped:
        engine.step(case.share(engine, 0))
    engine.load(good)
    history = History()
    for step in range(SAVED_AT, case.steps):
        result = engine.step(case.share(engine, step))
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.parameters = whole_parameters(engine)
    engine.close()
    return str(refused.value), str(stopped.value), history


@pytest.mark.slow
def test_after_a_damaged_checkpoint_every_rank_can_load_another(tmp_path: Path) -> None:
    """The damage is in a box that one rank reads: all raise the same, and a good checkpoint fills everything anew."""
    case = replace(CASE, layout="GGG", inter=2)
    run_ranks(train_and_save, case.ranks, case, str(tmp_path / "good"))
    shutil.copytree(tmp_path / "good", tmp_path / "damaged")
    file = tmp_path / "damaged" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    results = run_ranks(load_the_good_one, case.ranks, case, str(tmp_path / "damaged"), str(tmp_path / "good"))
    assert len({refused for refused, _, _ in results}) == 1
    assert "__1_0.distcp" in results[0][0]
    assert all("load a complete checkpoint first" in stopped for _, stopped, _ in results)
    wanted = reference(CASE)
    wanted = History(wanted.losses[SAVED_AT:], wanted.norms[SAVED_AT:], wanted.parameters)
    for _, _, history in results:
        assert worst_difference(history, wanted)[0] <= 1e-10


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": 10**18}, "step is 1000000000000000000"),
        ({"groups": None}, "groups is None"),
        ({"caller": []}, r"caller is \[\]"),
        ({"scaler": {"scale": -2.0}}, "scaler is"),
    ],
)
def test_a_state_that_no_engine_has_written_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """A checkpoint without digests, whose state was edited."""
    train_and_save(CASE, str(tmp_path / "c"))
    document = json.loads((tmp_path / "c" / "state.json").read_text())
    document["state"].update(changes)
    (tmp_path / "c" / "state.json").write_text(json.dumps({**document, "version": 1}))
    (tmp_path / "c" / "manifest.json").unlink()
    engine = CASE.engine()
    with pytest.raises(DamageError, match=words):
        engine.load(tmp_path / "c")
    engine.close()


def test_the_names_of_a_loss_scaler_are_those_that_a_checkpoint_knows() -> None:
    assert tuple(field.name for field in fields(LossScaler)) == SCALER
