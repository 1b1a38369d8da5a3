"""A vocabulary split over the pipeline: every schedule, layout and kind of model gives one process's result.

What meets is drawn: on two pipeline ranks, any two settings meet in `test_matrix.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from atoll.base.errors import PlanError, RankError
from atoll.plans import schedules
from atoll.plans.layouts import Layout
from atoll.plans.plan import MeshShape, Plan
from atoll.program import Instruction, Sliced
from atoll.runtime.engine import Engine
from atoll.runtime.models import Decoder, DecoderConfig, SequentialAdapter, Vocabulary
from atoll.runtime.pipeline.executor import Executor
from atoll.runtime.plays import PLAYS
from atoll.testing import RankPool, run_ranks
from atoll.testing.parity import (
    Case,
    assert_checkpoint_parity,
    assert_parity,
    difference,
    reference,
    train_case,
    whole_parameters,
    worst_difference,
)
from atoll.testing.tiny import TinyConfig
from tests.drawn import drawn

EVERYTHING = TinyConfig(layers=8, vocabulary=17, tied=True, frozen=True, odd=True, small=True, unused=True, dropout=0.2)
SPLIT = Case(pipeline=2, vocabulary_parallel=True, microbatches=4, steps=2, model=EVERYTHING)
EVEN = replace(EVERYTHING, odd=False)
BOTH = replace(SPLIT, tensor=2, model=EVEN)
"""Rows that are split over two pipeline ranks and the two ranks of each one's tensor-parallel group."""


NAMES = list(schedules.CATALOGUE)
KINDS = ["1f1b", "interleaved", "zb-h2", "zb-v", "dualpipe-v", "auto"]
"""A schedule of each placement, with whole and split backwards, by rule and searched."""


@pytest.mark.wide(3)
@pytest.mark.parametrize(("name", "pipeline"), drawn(len(NAMES), NAMES, [3, 4, 2]))
def test_every_schedule(name: str, pipeline: int) -> None:
    assert_parity(replace(SPLIT, schedule=name, pipeline=pipeline, microbatches=2 * pipeline))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_schedules_beside_tensor_parallelism(name: str) -> None:
    assert_parity(replace(BOTH, schedule=name))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NNG", "IIG", "GGG"])
def test_layouts_beside_tensor_parallelism(layout: str) -> None:
    assert_parity(replace(BOTH, layout=layout, intra=2, schedule="zb-v", microbatches=8, recompute="block"))


@pytest.mark.wide(0)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo reads of what is no leaf
def test_compiled_blocks_beside_tensor_parallelism() -> None:
    model = TinyConfig(layers=3, vocabulary=17, tied=True)
    assert_parity(replace(BOTH, model=model, schedule="zb-h1", layout="GGG", compile="block-eager"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_engine_after_one_whose_groups_are_gone() -> None:
    """The specs that DTensor keeps of the first engine name its mesh, whose process group is gone."""
    frozen = TinyConfig(layers=5, vocabulary=16, trained=(1,))
    model = TinyConfig(layers=5, tied=True, frozen=True)
    second = Case(layout="IIG", tensor=2, compile="block-eager", model=model)
    with RankPool() as pool:
        pool.run(train_case, 4, replace(BOTH, model=frozen, schedule="zb-2p", layout="GGG", microbatches=8))
        histories = pool.run(train_case, 2, second, timeout=180)
    wanted = reference(Case(model=model))
    for history in histories:
        worst, where = worst_difference(history, wanted)
        assert worst <= 1e-10, where


LAYOUTS = ["NNN", "NNG", "IIG", "GGG", "ING", "INI", "IGG"]


@pytest.mark.wide(3)
@pytest.mark.parametrize(("layout", "schedule"), drawn(len(LAYOUTS), LAYOUTS, ["1f1b", "zb-v"]))
def test_every_kind_of_layout(layout: str, schedule: str) -> None:
    assert_parity(replace(SPLIT, layout=layout, schedule=schedule, intra=2, microbatches=8))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["IIG", "GGG"])
def test_on_two_levels(layout: str) -> None:
    assert_parity(replace(SPLIT, layout=layout, inter=2, intra=2, microbatches=16, schedule="zb-h1"))


@pytest.mark.parametrize(("residency", "reduction"), [("run", "step"), ("step", "run")])
def test_residency_and_reduction(residency: Any, reduction: Any) -> None:
    case = replace(SPLIT, layout="GGG", intra=2, microbatches=8, schedule="interleaved")
    assert_parity(replace(case, residency=residency, reduction=reduction))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "recompute"), drawn(3, ["1f1b", "zb-h2", "dualpipe-v"], ["block", "selective"]))
def test_recompute(schedule: str, recompute: str) -> None:
    assert_parity(replace(SPLIT, schedule=schedule, recompute=recompute, layout="IIG", intra=2, microbatches=8))


MODELS = {
    "untied": TinyConfig(vocabulary=17),
    "tied": TinyConfig(vocabulary=17, tied=True),
    "only the head trained": TinyConfig(vocabulary=17, trained=(5,)),
    "only the embedding trained": TinyConfig(vocabulary=17, trained=(0,)),
    "both ends frozen": TinyConfig(vocabulary=17, trained=(1, 3)),
}


SPLITS = {"pipeline": replace(SPLIT, intra=2), "both": BOTH}


@pytest.mark.wide(3)
@pytest.mark.parametrize(("ends", "schedule"), drawn(10, list(product(MODELS, SPLITS)), ["gpipe", "v-half"]), ids=str)
def test_which_ends_are_trained(ends: tuple[str, str], schedule: str) -> None:
    model, split = ends
    assert_parity(replace(SPLITS[split], model=MODELS[model], schedule=schedule, layout="GGG", microbatches=8))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS[::2])
def test_post_validation_gives_the_same_bits(name: str) -> None:
    case = replace(SPLIT, layout="IIG", intra=2, schedule=name, clip=1.0, steps=4, microbatches=8)
    waiting = run_ranks(train_case, case.ranks, case)
    ahead = run_ranks(train_case, case.ranks, replace(case, post_validation=True))
    for one, other in zip(waiting, ahead, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        assert all(torch.equal(one.parameters[key], other.parameters[key]) for key in one.parameters)


TAKEN_BACK = ["1f1b", "gpipe", "interleaved", "zb-h2", "zb-v", "dualpipe-v"]


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "pipeline"), drawn(len(TAKEN_BACK), TAKEN_BACK, [3, 4]))
def test_post_validated_steps_that_are_taken_back(schedule: str, pipeline: int) -> None:
    case = replace(SPLIT, pipeline=pipeline, schedule=schedule, microbatches=3 * pipeline)
    assert_parity(replace(case, post_validation=True, clip=0.05, steps=4))


class Small:
    """The built-in decoder as a recipe."""

    def __init__(self, *, tied: bool) -> None:
        self.tied = tied

    def build(self) -> Decoder:
        sizes = {"vocabulary": 19, "layers": 3, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24}
        return Decoder(DecoderConfig(**sizes, tie_embeddings=self.tied))

    def batch(self, step: int, samples: int) -> dict[str, torch.Tensor]:
        return TinyConfig(vocabulary=19).batch(step, samples)

    def initialise(self, name: str, module: nn.Module) -> None:
        residual = name.endswith((".attention.output", ".feed_forward.down"))
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02 / 6**0.5 if residual else 0.02)  # three layers, two branches each


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "case",
    [replace(SPLIT, intra=2), BOTH, replace(BOTH, sequence_parallel=True)],
    ids=["pipeline", "both", "sequence"],
)
def test_the_decoder(case: Case, tied: bool) -> None:
    assert_parity(replace(case, schedule="zb-h1", model=Small(tied=tied), layout="IIG", microbatches=8))


# ---- evaluation and logits


def evaluate(case: Case) -> tuple[float, torch.Tensor | None]:
    engine = case.engine()
    share = case.share(engine, 0)
    engine.step(share)
    loss = engine.evaluate({name: value[:2] for name, value in share.items()}).loss
    logits = engine.logits({"input_ids": share["input_ids"][:2]})
    engine.close()
    return loss, logits


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("case", [replace(SPLIT, pipeline=3), BOTH], ids=["pipeline", "both"])
def test_evaluation_and_logits(case: Case, schedule: str) -> None:
    case = replace(case, schedule=schedule, microbatches=6)
    whole = run_ranks(evaluate, case.ranks, replace(case, vocabulary_parallel=False))
    split = run_ranks(evaluate, case.ranks, case)
    for (loss, logits), (wanted_loss, wanted) in zip(split, whole, strict=True):
        assert abs(loss - wanted_loss) < 1e-12
        assert (logits is None) == (wanted is None)
        if logits is not None and wanted is not None:
            assert difference(logits, wanted) < 1e-12


# ---- checkpoints, reads and edits


WHOLE = replace(SPLIT, vocabulary_parallel=False, layout="IIG", intra=2)
DEEP = replace(SPLIT, pipeline=3, layout="GGG", schedule="zb-v", microbatches=4)


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (WHOLE, DEEP),
        (DEEP, WHOLE),
        (DEEP, SPLIT),
        (replace(WHOLE, model=EVEN), BOTH),
        (BOTH, replace(DEEP, model=EVEN)),
    ],
    ids=["to", "from", "fewer", "to both", "from both"],
)
def test_checkpoints_go_from_and_to_any_split(first: Case, second: Case, tmp_path: Path) -> None:
    assert_checkpoint_parity(first, second, tmp_path / "one")


def read_and_edit(case: Case) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    engine = case.engine()
    gradients: dict[str, Any] = {}
    with engine.full_parameters("*") as values:
        before = {name: value.clone() for name, value in values.items()}
        values["0.table.weight"].mul_(2.0)
    after = whole_parameters(engine)
    engine.step(case.share(engine, 0), before_update=lambda: gradients.update(engine.full_gradients("0.table.*")))
    engine.close()
    return before, after, gradients


@pytest.mark.parametrize("case", [replace(SPLIT, intra=2), BOTH], ids=["pipeline", "both"])
def test_whole_parameters_and_gradients_are_read_and_edited_on_every_rank(case: Case) -> None:
    for before, after, gradients in run_ranks(read_and_edit, 4, replace(case, layout="GGG")):
        assert before["0.table.weight"].shape == gradients["0.table.weight"].shape == (17, 8)
        for name, value in after.items():
            assert torch.equal(value, before[name] * (2.0 if name == "0.table.weight" else 1.0)), name


class Llama:
    """A family of transformers as a recipe of a model without values."""

    def build(self) -> nn.Module:
        from tests.families import Family

        return Family("llama").build()


def started(folder: Path, *, is_split: bool) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Llama().build()
    plan = replace(SPLIT, vocabulary_parallel=is_split, layout="IGG", intra=2).plan
    engine = Engine(model, plan, optimizer=torch.optim.SGD, weights=folder, device="cpu")
    values = whole_parameters(engine)
    engine.close()
    return values


@pytest.mark.slow
def test_weights_are_read_by_range(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model: Any = Llama().build()
    model.save_pretrained(tmp_path)
    wanted = dict(model.named_parameters())
    seen = set()
    for values in run_ranks(started, 4, tmp_path, is_split=True):
        for name, value in values.items():
            assert torch.equal(value.float(), wanted[name].detach().float()), name
            seen.add(name)
    assert seen == set(wanted)


# ---- precision


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_near_what_it_is_without(precision: str) -> None:
    model = TinyConfig(vocabulary=17, tied=True)
    case = replace(SPLIT, precision=precision, layout="IIG", intra=2, microbatches=8, schedule="zb-h1", model=model)
    split = run_ranks(train_case, 4, case)
    whole = run_ranks(train_case, 4, replace(case, vocabulary_parallel=False))
    assert split[0].losses == pytest.approx(whole[0].losses, rel=2e-3)
    assert split[0].norms == pytest.approx(whole[0].norms, rel=2e-2)


# ---- what is held


def held(case: Case) -> tuple[int, int, int]:
    engine = case.engine()
    engine.step(case.share(engine, 0))
    footprint = engine.footprint()
    found = engine.memory(), footprint
    engine.close()
    assert found[0] == footprint.at_rest(case.plan.layout)
    return footprint.parameters, footprint.gradients, footprint.optimizer


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NNN", "IIG", "GGG"])
@pytest.mark.parametrize("case", [replace(SPLIT, pipeline=4), replace(BOTH, pipeline=4)], ids=["pipeline", "both"])
def test_footprint_is_what_is_held_and_the_ends_are_spread(case: Case, layout: str) -> None:
    case = replace(case, model=TinyConfig(layers=4, vocabulary=400), layout=layout, precision="fp32")
    whole = run_ranks(held, case.ranks, replace(case, vocabulary_parallel=False))
    split = run_ranks(held, case.ranks, case)
    assert max(map(sum, split)) < 0.7 * max(map(sum, whole))
    assert max(map(sum, split)) < 1.2 * min(map(sum, split))


# ---- what cannot be


class Silent(nn.Sequential):
    """A Sequential that names no ends."""


class Strange(Silent):
    """One with another loss, or ends that are none."""

    ends: Vocabulary | None = Vocabulary("0", "2")
    has_loss = False

    def atoll_adapter(self) -> SequentialAdapter:
        options: dict[str, Any] = {"loss": lambda logits, batch: logits.sum()} if self.has_loss else {}
        return SequentialAdapter(self, vocabulary=self.ends, **options)


class Cause:
    """A recipe of a model that is refused."""

    def __init__(self, kind: type[nn.Sequential], *, rows: int = 8, **changes: Any) -> None:
        self.kind, self.rows, self.changes = kind, rows, changes

    def build(self) -> nn.Module:
        model = self.kind(nn.Embedding(self.rows, 4), nn.Linear(4, 4), nn.Linear(4, self.rows, bias=False))
        for name, value in self.changes.items():
            setattr(model, name, value)
        return model

    def batch(self, step: int, samples: int) -> dict[str, torch.Tensor]:
        return TinyConfig(vocabulary=self.rows).batch(step, samples)


def build_only(case: Case) -> None:
    case.engine().close()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Cause(Silent), "it is not defined which modules of this nn.Sequential are embedding and head"),
        (Cause(Strange, has_loss=True), "vocabulary_parallel: it computes token cross-entropy"),
        (Cause(Strange, ends=Vocabulary("1", "2")), "1 is a Linear, not an nn.Embedding"),
        (Cause(Strange, ends=Vocabulary("0", "1")), r"embedding \(8, 4\) and head \(4, 4\) differ"),
        (Cause(Strange, rows=1), "1 rows leave one of 2 ranks without any"),
    ],
)
def test_models_that_cannot_be_split_are_refused(model: Cause, words: str) -> None:
    with pytest.raises(RankError, match=words):
        run_ranks(build_only, 2, replace(SPLIT, model=model))


@pytest.mark.parametrize("tensor", [1, 2])
def test_meshes_that_do_not_fit_are_refused(tensor: int) -> None:
    mesh = MeshShape(tensor=tensor)
    schedule = schedules.build("1f1b", ranks=1, microbatches=2)
    with pytest.raises(PlanError, match="vocabulary_parallel splits embedding and head over two or more"):
        Plan(mesh, Layout("NNN"), schedule, 1, vocabulary_parallel=True)


def with_a_strange_label(case: Case) -> None:
    engine = case.engine()
    share = case.share(engine, 0)
    share["labels"][0, 5] = 17
    with pytest.raises(PlanError, match=r"labels from .* to 17: the vocabulary has 17 rows"):
        engine.step(share)
    engine.step(case.share(engine, 0))
    engine.close()


def test_labels_outside_of_the_vocabulary_are_refused_and_the_engine_goes_on() -> None:
    run_ranks(with_a_strange_label, 2, SPLIT)


def ask_with_a_strange_id(case: Case) -> None:
    engine = case.engine()
    ids = case.share(engine, 0)["input_ids"][:1]
    wrong = ids.clone()
    wrong[0, 0] = 17
    with pytest.raises((PlanError, RankError), match=r"input_ids from .* to 17: the vocabulary has 17 rows"):
        engine.logits({"input_ids": wrong if engine.place.rank == 1 else ids})
    logits = engine.logits({"input_ids": ids})
    assert (logits is None) == (engine.place.pp != 1)
    engine.close()


def test_logits_of_an_id_outside_of_the_vocabulary_are_refused_on_every_rank() -> None:
    """Before anything is sent: the engine goes on."""
    run_ranks(ask_with_a_strange_id, 2, SPLIT, timeout=60.0)


def break_before_sending(case: Case) -> None:
    sent = PLAYS[Sliced.SEND_L]

    def broken(on: Executor, step: Instruction) -> Callable[[], None]:
        def fail() -> None:
            raise ValueError("a defect")

        return fail if (step.action.stage, step.action.microbatch) == (1, 2) else sent(on, step)

    with patch.dict(PLAYS, {Sliced.SEND_L: broken}):
        engine = case.engine()
        engine.step(case.share(engine, 0))


@pytest.mark.slow
def test_an_error_in_a_message_of_a_slice_names_both_ends() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(break_before_sending, 2, SPLIT)
    words = "step 1, action 1SEND_L2, global microbatch 2, peer rank 0: ValueError: a defect"
    assert words in str(caught.value)
