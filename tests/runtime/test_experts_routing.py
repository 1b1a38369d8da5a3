"""Routers that send tokens unevenly, and folders of weights: divided experts give one process's result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from atoll import Engine
from atoll.runtime.checkpoint.archive import read_state
from atoll.runtime.models.weights import Weights
from atoll.runtime.sharding.optimizer import decay_matrices
from atoll.testing import run_ranks
from atoll.testing.parity import Case, History, assert_parity, reference, whole_parameters, worst_difference
from atoll.training.models.interchange import export_folder, import_folder
from tests.families import Family, quietly

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers looks at whatever else is installed

EXPERTS = 8
PAIR = Case(layout="GGG", intra=2, expert=2, microbatches=4, steps=3)
BIAS, STACKED = "e_score_correction_bias", "experts.gate_up_proj"


@lru_cache(maxsize=4)
def values_of(folder: str) -> dict[str, Tensor]:
    with quietly():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return dict(model.state_dict())


@dataclass(frozen=True, slots=True)
class Stored(Family):
    """A model that starts from a folder of weights."""

    folder: str = ""

    def initialise(self, name: str, module: nn.Module) -> None:
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if f"{name}.{key}" in values_of(self.folder):
                tensor.copy_(values_of(self.folder)[f"{name}.{key}"])


def stored(folder: Path, *, taken: int = 2, to: int | None = None, large: bool = False) -> Stored:
    """DeepSeek-V3 in a folder. taken: experts of a token.  to: the first of `taken` experts that all tokens take; any,
    unless it is given.  large: the last expert has large weights."""
    torch.manual_seed(0)
    options = (("n_routed_experts", EXPERTS), ("num_experts_per_tok", taken))
    model: Any = Family("deepseek_v3", options).build()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith(BIAS):
            tensor.copy_(torch.randn(EXPERTS) / 100 if to is None else torch.zeros(EXPERTS))
            if to is not None:
                tensor[to : to + taken] = 100
        if large and name.endswith("experts.down_proj"):
            tensor.detach()[-1] *= 1e5
    transformers.utils.logging.disable_progress_bar()
    with quietly():
        model.save_pretrained(folder)
    return Stored("deepseek_v3", options, folder=str(folder))


@contextmanager
def counted(elements: dict[str, int]) -> Iterator[None]:
    """Count the elements of each parameter that this rank reads."""
    read = Weights.read_into

    def count(self: Weights, target: Tensor, name: str, *args: Any, **kwargs: Any) -> None:
        elements[name] = elements.get(name, 0) + target.numel()
        read(self, target, name, *args, **kwargs)

    with patch.object(Weights, "read_into", count):
        yield


def engine_of(case: Case) -> Engine:
    assert isinstance(case.model, Stored)
    with torch.device("meta"):
        model = case.model.build()
    return Engine(
        model,
        case.plan,
        optimizer=case.make_optimizer,
        groups=decay_matrices(0.1),
        clip=case.clip,
        seed=case.seed,
        weights=Path(case.model.folder),
    )


def train(case: Case, checkpoint: Path | None = None, told: str = "") -> tuple[History, dict[str, int]]:
    """Start from the folder, save if there is a path for it, and train. Also return the elements read."""
    elements: dict[str, int] = {}
    with counted(elements):
        engine = engine_of(case)
    if checkpoint is not None:
        engine.save(checkpoint, {"config": told})
    history = History()

    def note() -> None:
        history.gradients = history.gradients or engine.full_gradients("*")

    for step in range(case.steps):
        result = engine.step(case.share(engine, step), before_update=note)
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.parameters = whole_parameters(engine)
    engine.close()
    return history, elements


def train_each(cases: list[Case]) -> list[History]:
    return [train(case)[0] for case in cases]


def assert_all(cases: list[Case]) -> History:
    """Train each in one session of ranks. Return the history of one process."""
    for case, *histories in zip(cases, *run_ranks(train_each, cases[0].ranks, cases), strict=True):
        for history in histories:
            worst, where = worst_difference(history, reference(case))
            assert worst <= 1e-10, f"{case}: {where}"
    return reference(cases[0])


WAYS: list[dict[str, Any]] = [
    {"intra": 4, "expert": 4},
    {"pipeline": 2, "schedule": "zb-v", "layout": "NNG"},
    {"tensor": 2, "layout": "IIG"},
]


@pytest.mark.slow
def test_experts_from_a_folder_and_back(tmp_path: Path) -> None:
    """Files name experts one by one. Each rank reads its own; what it has is exported to the same files."""
    model = stored(tmp_path / "given")
    import_folder(tmp_path / "given", tmp_path / "imported")
    told = read_state(tmp_path / "imported")["caller"]["config"]
    case = replace(PAIR, model=model, layout="NNG", tensor=2)
    for history, elements in run_ranks(train, 4, case, tmp_path / "saved", told):
        assert worst_difference(history, reference(case))[0] <= 1e-10
        stacks = [name for name in elements if STACKED in name]
        assert len(stacks) == 3
        for name in stacks:  # the fourth part, as parameters and as masters
            assert elements[name] == 2 * history.parameters[name].numel() / 4
    export_folder(tmp_path / "saved", tmp_path / "back")
    files = sorted(file.name for file in (tmp_path / "given").glob("*.safetensors"))
    assert files
    for file in files:
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "given" / file).read_bytes()


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("taken", [1, 2])
def test_experts_without_tokens(taken: int, tmp_path: Path) -> None:
    """All tokens take the same one or two experts: the others' gradients are zero, and AdamW decays them."""
    model = stored(tmp_path, taken=taken, to=2)
    alone = assert_all([replace(PAIR, model=model, **way) for way in WAYS])
    for name, gradient in alone.gradients.items():
        if name.endswith(STACKED):
            used = [bool(each.any()) for each in gradient]
            assert used == [2 <= at < 2 + taken for at in range(EXPERTS)]
            assert not torch.equal(alone.parameters[name][0], values_of(model.folder)[name][0].double())


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "ways"), [("block", WAYS[:2]), ("selective", WAYS[1:])])
def test_a_second_forward_routes_as_the_first(recompute: str, ways: list[dict[str, Any]], tmp_path: Path) -> None:
    model = stored(tmp_path)
    assert_all([replace(PAIR, model=model, recompute=recompute, steps=2, **way) for way in ways])


@pytest.mark.slow
def test_a_router_that_draws_random_numbers() -> None:
    """Mixtral's jitter, again in a second forward."""
    noisy = Family("mixtral", (("num_local_experts", EXPERTS), ("router_jitter_noise", 0.2)))
    assert_parity(replace(PAIR, model=noisy, pipeline=2, recompute="block"))


@dataclass(frozen=True, slots=True)
class Shorter(Family):
    """Every second sample ends after three tokens: of the others no label counts, and none looks at them."""

    def batch(self, step: int, samples: int, sequence: int = 6) -> dict[str, Any]:
        batch = Family.batch(self, step, samples, sequence)
        batch["labels"][1::2, 3:] = -100
        return batch


def train_shorter(case: Case) -> History:
    """On every second rank with sequences of three tokens, and not of six."""
    engine = case.engine()
    history = History()
    for step in range(case.steps):
        share = case.share(engine, step)
        length = 3 if engine.place.data % 2 else 6
        result = engine.step({name: value[:, :length] for name, value in share.items()})
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.parameters = whole_parameters(engine)
    engine.close()
    return history


def test_ranks_with_other_numbers_of_tokens() -> None:
    case = replace(PAIR, model=Shorter("qwen3_moe", (("num_experts", EXPERTS),)), microbatches=2)
    for history in run_ranks(train_shorter, 2, case):
        worst, where = worst_difference(history, reference(case))
        assert worst <= 1e-10, where


def first_step(case: Case) -> tuple[bool, bool]:
    """Whether it was skipped, and whether it changed the parameters."""
    engine = engine_of(case)
    before = whole_parameters(engine)
    result = engine.step(case.share(engine, 0))
    after = whole_parameters(engine)
    engine.close()
    return result.skipped, any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("large", [False, True])
def test_an_overflow_in_one_expert_refuses_the_step_on_every_rank(large: bool, tmp_path: Path) -> None:
    """In fp16, of the last rank's last expert, whose gradient is multiplied by its large weights."""
    model = stored(tmp_path, to=EXPERTS - 2, large=large)
    case = replace(PAIR, model=model, intra=4, expert=4, precision="fp16")
    for skipped, changed in run_ranks(first_step, 4, case):
        assert (skipped, changed) == (large, not large)
