"""Muon on flat shards equals one process: layouts, schedules, kinds of models, checkpoints, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll import Engine
from atoll.base.errors import CheckpointError, PlanError, RankError
from atoll.plans.layouts import EFFECTIVE, Codec, Codecs
from atoll.plans.outer import Outer
from atoll.program import Do, way_of
from atoll.runtime.sharding.muon import orthogonalize
from atoll.testing import run_ranks
from atoll.testing.parity import (
    Case,
    assert_checkpoint_parity,
    assert_parity,
)
from atoll.testing.tiny import TinyConfig, tiny_model
from tests.families import Family

ADAMW = ("adamw", (("lr", 3e-3), ("betas", (0.8, 0.95))))
MODELS = (
    TinyConfig(layers=5, odd=True, dropout=0.2),
    TinyConfig(layers=5, tied=True, vocabulary=17, small=True, odd=True),
    TinyConfig(layers=5, frozen=True, unused=True),
)
SCHEDULES = ("1f1b", "zb-v", "breadth-first")


def muon(**options: Any) -> Case:
    chosen = {"optimizer": "Muon", "options": (ADAMW,), "steps": 2}
    return Case(**{**chosen, **options})


# ---- the same result


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_layout_equals_one_process(schedule: str) -> None:
    for at, layout in enumerate(EFFECTIVE):
        inter, intra = ((1, 2), (2, 1))[at % 2]
        model = MODELS[at % len(MODELS)]
        spread = {"pipeline": 2, "inter": inter, "intra": intra, "microbatches": 8}
        assert_parity(muon(layout=layout.name, schedule=schedule, model=model, **spread))


@pytest.mark.parametrize("layout", ["NNG", "III", "GGG"])
def test_matrices_lie_across_three_shards(layout: str) -> None:
    """A matrix of 13 x 8 in three parts, at places that divide no row."""
    assert_parity(muon(layout=layout, intra=3, microbatches=6, model=MODELS[0]))


def sent_between_islands(case: Case) -> tuple[int, int, int]:
    """Bytes over the slow link: as measured, as the program says, and those of slices of matrices among them."""
    engine = case.engine()
    before = engine.transport.sent["inter"]
    engine.step(case.share(engine, 0))
    engine.close()  # the parameters' way back may go on after the step
    steps = [each for each in engine.program.instructions if each.do in (Do.COLLECT, Do.TRANSFORM)]
    slices = sum(dict(way_of(each, engine.program.shape)).get("inter", 0) for each in steps)
    return engine.transport.sent["inter"] - before, engine.program.sent["inter"], slices


@pytest.mark.parametrize("layout", ["NII", "INI", "III", "IIG"])
def test_nothing_crosses_between_islands_where_states_rest_inside(layout: str) -> None:
    model = TinyConfig(odd=True)
    sent = run_ranks(sent_between_islands, 4, muon(layout=layout, inter=2, intra=2, microbatches=4, model=model))
    assert all(measured == said for measured, said, _ in sent)
    # At G each of 4 x 2 matrices of 13 x 8 elements of 8 bytes crosses for half of its slices, there and back.
    assert sum(slices for *_, slices in sent) == (2 * 8 * 13 * 8 * 8 // 2 if layout == "IIG" else 0)


@pytest.mark.parametrize("layout", ["NNG", "III", "IIG"])
def test_two_islands_equal_one_process(layout: str) -> None:
    assert_parity(muon(layout=layout, inter=2, intra=2, microbatches=4, model=MODELS[0], steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NNG", "IIG", "GGG"])
def test_gradients_and_parameters_with_codecs(layout: str) -> None:
    """Gradients of matrices are decoded before their slices travel; updates are encoded as any others."""
    codecs = Codecs(Codec("int8", 8, "stochastic"), Codec("int4", 8))
    assert_parity(muon(layout=layout, inter=2, intra=2, microbatches=4, model=MODELS[0], steps=3, codecs=codecs))


@pytest.mark.slow
def test_outer_steps_with_a_codec() -> None:
    outer = Outer(2, fragments=2, delay=1, codec=Codec("int4", 8))
    assert_parity(muon(layout="IIG", inter=2, intra=2, microbatches=4, model=MODELS[0], steps=5, outer=outer))


OPTIONS: tuple[tuple[tuple[str, Any], ...], ...] = (
    (("nesterov", False), ("momentum", 0.7)),
    (("adjust_lr_fn", "match_rms_adamw"), ("ns_steps", 3), ("ns_coefficients", (2.0, -1.5, 0.5))),
    (("split", (("*.up.weight", (5, 8)), ("*.down.weight", 4))), ("eps", 1e-3)),
)


@pytest.mark.parametrize("options", OPTIONS)
def test_options_and_splits(options: tuple[tuple[str, Any], ...]) -> None:
    """Fused weights by their rows, and heads as equal parts."""
    case = muon(layout="IIG", pipeline=2, intra=2, microbatches=4, options=(ADAMW, *options), model=MODELS[0])
    assert_parity(case)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.05, None])
@pytest.mark.parametrize("model", MODELS[1:])
def test_a_post_validated_step_exchanges_ahead(clip: float | None, model: TinyConfig) -> None:
    """Clipped, the step ahead is always wrong; else its results are taken for good."""
    spread = {"pipeline": 2, "inter": 2, "schedule": "zb-h1", "microbatches": 8}
    assert_parity(muon(layout="GGG", post_validation=True, clip=clip, model=model, steps=4, **spread))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NNN", "IIG"])
def test_tensor_parallel_parts_are_transformed_whole(layout: str) -> None:
    model = TinyConfig(layers=2, hidden=10, unused=True)
    assert_parity(muon(layout=layout, intra=2, tensor=2, microbatches=2, microbatch=2, model=model))


def test_a_split_vocabulary_is_left_to_adamw() -> None:
    model = TinyConfig(layers=3, tied=True, vocabulary=17)
    assert_parity(muon(layout="NNG", pipeline=2, intra=2, microbatches=4, vocabulary_parallel=True, model=model))


@pytest.mark.slow
def test_a_shared_layer_has_equal_copies_on_two_stages() -> None:
    """Copies of a hidden matrix are transformed on both stages, and stay equal bit by bit."""
    case = muon(layout="IIG", pipeline=2, intra=2, microbatches=4, model=SharedLayer(), steps=3)
    assert_parity(case)
    run_ranks(check_copies, 4, case)


class SharedLayer:
    """Five linear layers, of which the second and the fourth have one weight."""

    def build(self) -> nn.Module:
        layers = [nn.Linear(8, 8) for _ in range(5)]
        layers[3].weight = layers[1].weight
        return nn.Sequential(nn.Embedding(16, 8), *layers, nn.Linear(8, 16))

    def batch(self, step: int, samples: int) -> dict[str, Any]:
        return TinyConfig().batch(step, samples)


def check_copies(case: Case) -> None:
    engine = case.engine()
    for step in range(case.steps):
        engine.step(case.share(engine, step))
    engine.check_replicas()
    engine.close()


# ---- torch's own


class Hidden(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Embedding(16, 24), nn.Linear(24, 40), nn.Linear(40, 24), nn.Linear(24, 24), nn.Linear(24, 16)
        )


def step_with_torch(steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Hidden()
    matrices = [model[at].weight for at in (1, 2, 3)]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]
    for step in range(steps):
        batch = TinyConfig().batch(step, 4)
        logits = model(batch["input_ids"])
        (nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())).backward()
        for each in both:
            each.step()
            each.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def step_with_atoll(case: Case) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    engine = Engine(Hidden(), case.plan, optimizer=atoll.Muon(lr=0.02, adamw={"lr": 1e-3}), device="cpu")
    for step in range(case.steps):
        engine.step(case.share(engine, step))
    with engine.full_parameters() as values:
        found = {name: value.clone() for name, value in values.items()}
    engine.close()
    return found


def test_a_step_has_the_bits_of_torch() -> None:
    """fp32, and orthogonalized in bf16, alone and on two ranks that exchange slices."""
    (wanted,) = run_ranks(step_with_torch, 1, 1)
    alone = Case(precision="fp32", microbatches=1, microbatch=4, steps=1)
    for case in (alone, replace(alone, layout="NNG", intra=2, microbatches=2, microbatch=2)):
        for found in run_ranks(step_with_atoll, case.ranks, case):
            for name in ("1.weight", "2.weight", "3.weight"):
                if case.ranks == 1:
                    assert torch.equal(found[name], wanted[name]), name
                else:  # another order of sums in the gradient, before it is rounded to bf16
                    assert torch.allclose(found[name], wanted[name], rtol=0, atol=2e-3), name


def test_matrices_of_one_shape_are_orthogonalized_together() -> None:
    torch.manual_seed(1)
    found = [torch.randn(3, *shape) for shape in ((12, 20), (20, 12), (7, 7))]
    options = {"coefficients": (3.4445, -4.7750, 2.0315), "steps": 5, "eps": 1e-7}
    for matrices in found:
        together = orthogonalize(matrices.bfloat16(), **options)
        for each, one in zip(matrices, together, strict=True):
            parameter = nn.Parameter(torch.zeros_like(each))
            parameter.grad = each
            torch.optim.Muon([parameter], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
            ratio = max(1.0, each.shape[0] / each.shape[1]) ** 0.5
            assert torch.equal(parameter.detach(), torch.zeros_like(each).add(one, alpha=-ratio))
        values = torch.linalg.svdvals(together.float())
        assert float(values.min()) > 0.3
        assert float(values.max()) < 1.4


# ---- what else a run does


@pytest.mark.slow
def test_checkpoints_load_under_another_layout(tmp_path: Path) -> None:
    first = muon(layout="IIG", inter=2, intra=2, microbatches=8, model=MODELS[0], steps=3)
    second = replace(first, layout="NNG", pipeline=2, inter=1, intra=1)
    assert_checkpoint_parity(first, second, tmp_path)


def load_another_kind(case: Case, folder: Path) -> None:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    engine.save(folder)
    engine.close()
    other = replace(case, options=(ADAMW, ("matrices", ("*.up.weight",)))).engine()
    try:
        other.load(folder)
    finally:
        other.close()


def test_a_checkpoint_with_other_matrices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"down\.weight is no matrix for the optimizer.*momentum_buffer") as caught:
        run_ranks(load_another_kind, 1, muon(), tmp_path)
    assert isinstance(caught.value.__cause__, CheckpointError)


def held(case: Case) -> tuple[Any, Any, int]:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    found = engine.memory(), engine.footprint().at_rest(case.plan.layout), engine.working_memory().matrices
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NNN", "III", "IIG"])
def test_bytes_at_rest_equal_the_footprint(layout: str) -> None:
    """One state of an element of a matrix, two of every other."""
    case = muon(layout=layout, inter=2, intra=2, precision="bf16", microbatches=4, model=TinyConfig(odd=True))
    adamw = replace(case, optimizer="AdamW", options=())
    pairs = zip(run_ranks(held, 4, case), run_ranks(held, 4, adamw), strict=True)
    for (stored, predicted, matrices), (more, _, none) in pairs:
        assert stored == predicted
        assert stored.optimizer < more.optimizer
        assert matrices > none == 0


def overflow(case: Case) -> list[tuple[bool, int]]:
    engine = case.engine()
    found = []
    for step in range(case.steps):
        result = engine.step(case.share(engine, step))
        found.append((result.skipped, result.step))
    engine.check_replicas()
    engine.close()
    return found


def test_a_step_that_overflows_changes_nothing() -> None:
    """fp16: the first scale is too large for some steps, which exchange no matrices."""
    case = muon(layout="IIG", inter=2, intra=2, precision="fp16", microbatches=4, steps=4, lr=1e-3)
    for found in run_ranks(overflow, 4, case):
        assert [step for _, step in found] == [1, 2, 3, 4]


# ---- refusals


def build(case: Case) -> None:
    case.engine().close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"matrices": ("*.upp.weight",)}, r"'\*\.upp\.weight' matches none of the trained parameters"),
        ({"matrices": ("*.bias",)}, r"'\*\.bias' matches none with two dimensions, but"),
        ({"split": (("*.up.weight", 5),)}, r"'\*\.up\.weight' = 5 does not divide the 12 rows of 1\.up\.weight"),
        ({"split": (("*.up.weight", (5, 5)),)}, r"= \[5, 5\] does not divide the 12 rows"),
        ({"split": (("0.*", 2),)}, r"split: '0\.\*' matches no matrix"),
        ({"split": (("*", -1),)}, "a number of equal parts, or the rows of each part"),
        ({"momentum": -1.0}, "momentum should be >= 0"),
        ({"ns_steps": 0}, "1 to 99 steps"),
        ({"adjust_lr_fn": "much"}, "much is not supported"),
        ({"adamw": (("betas", (0.9, 2.0)),)}, "Invalid beta parameter"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RankError, match=says) as caught:
        run_ranks(build, 1, muon(options=tuple(options.items())))
    assert isinstance(caught.value.__cause__, PlanError)


def refusal(case: Case) -> str:
    try:
        case.engine().close()
    except PlanError as error:
        return str(error)
    return "it did not raise"


def test_every_rank_refuses_a_split_for_itself() -> None:
    """Also the stage that does not have the matrix: each can say what is wrong, whichever rank a user looks at."""
    case = muon(pipeline=2, microbatches=2, options=(("split", (("1.up.weight", 5),)),))
    for said in run_ranks(refusal, 2, case):
        assert "'1.up.weight' = 5 does not divide the 12 rows of 1.up.weight" in said


def test_a_model_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(RankError, match="no trained parameter is a hidden matrix"):
        run_ranks(build, 1, muon(model=TinyConfig(trained=(0,))))


def test_low_rank_adapters_are_refused() -> None:
    pytest.importorskip("peft")
    with pytest.raises(RankError, match=r"low-rank adapters such as .*lora_A.*Use AdamW"):
        run_ranks(build, 1, muon(model=Family("llama", lora=True)))


def test_it_is_given_to_the_engine_itself() -> None:
    case = Case()
    with torch.device("meta"):
        model = tiny_model(TinyConfig())
    with pytest.raises(PlanError, match="give it to the engine itself"):
        Engine(model, case.plan, optimizer=lambda groups: atoll.Muon()(groups), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["IIG", "NII"])
def test_islands_have_owners_of_their_own(layout: str) -> None:
    outer = Outer(2, fragments=2, delay=1)
    assert_parity(muon(layout=layout, inter=2, intra=3, microbatches=6, model=MODELS[0], steps=5, outer=outer))
