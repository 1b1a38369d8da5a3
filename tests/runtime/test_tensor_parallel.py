"""Tensor parallelism inside flat buffers: every layout, schedule and recompute gives one process's result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from atoll.base._torch import local_part
from atoll.base.errors import PlanError, RankError
from atoll.plans.layouts import EFFECTIVE
from atoll.runtime.models import Decoder, DecoderConfig
from atoll.testing import run_ranks
from atoll.testing.parity import Case, assert_checkpoint_parity, assert_parity, whole_parameters
from atoll.testing.tiny import TinyConfig
from atoll.training.run.text import generate

TINY = TinyConfig(tied=True, small=True, unused=True, frozen=True, vocabulary=17)
PAIR = Case(tensor=2, microbatches=4, steps=2, model=TINY)


class Small:
    """The built-in decoder as a recipe."""

    def build(self) -> Decoder:
        return Decoder(DecoderConfig(vocabulary=19, layers=3, hidden=16, heads=4, kv_heads=2, ffn=24))

    def batch(self, step: int, samples: int) -> dict[str, torch.Tensor]:
        return TinyConfig(vocabulary=19).batch(step, samples)

    def initialise(self, name: str, module: nn.Module) -> None:
        residual = name.endswith((".attention.output", ".feed_forward.down"))
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02 / 6**0.5 if residual else 0.02)  # three layers, two branches each


@pytest.mark.wide(3)
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_every_layout(layout: str) -> None:
    assert_parity(replace(PAIR, layout=layout, inter=2))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NNG", "IIG", "GGG", "INI"])
def test_on_two_levels(layout: str) -> None:
    assert_parity(replace(PAIR, layout=layout, inter=2, intra=2))


@pytest.mark.wide(3)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_every_kind_of_schedule(schedule: str) -> None:
    assert_parity(replace(PAIR, layout="NNG", pipeline=2, schedule=schedule))


@pytest.mark.wide(2)
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["block", "selective"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_recompute(recompute: str, schedule: str) -> None:
    assert_parity(replace(PAIR, layout="GGG", pipeline=2, schedule=schedule, recompute=recompute))


@pytest.mark.slow
def test_post_validated_steps() -> None:
    assert_parity(replace(PAIR, layout="IIG", pipeline=2, schedule="zb-h1", post_validation=True, clip=0.05, steps=4))


@pytest.mark.wide(1)
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["block", "selective"])
def test_the_decoder_recomputed(recompute: str) -> None:
    """Its embedding is a block, whose output is made whole around it."""
    assert_parity(Case(tensor=2, microbatches=4, steps=2, model=Small(), recompute=recompute))


@pytest.mark.wide(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tensor", [2, 3])
def test_the_decoder(tensor: int, sequence_parallel: bool) -> None:
    if tensor == 3:
        with pytest.raises(RankError, match="tensor = 3 ranks cannot split 4 attention heads"):
            run_ranks(build_only, 3, Case(tensor=3, microbatches=2, model=Small()))
        return
    case = Case(tensor=2, pipeline=2, schedule="zb-h1", microbatches=2, steps=2, model=Small())
    assert_parity(replace(case, sequence_parallel=sequence_parallel))


def build_only(case: Case) -> None:
    case.engine().close()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            Case(tensor=2, microbatches=2, model=TinyConfig(odd=True)),
            "13 features, which tensor = 2 cannot split evenly",
        ),
        (Case(tensor=2, microbatches=2, sequence_parallel=True), "parts that are not in the model's tensor plan"),
    ],
)
def test_what_cannot_be_is_refused(case: Case, words: str) -> None:
    with pytest.raises(RankError, match=words):
        run_ranks(build_only, 2, case)


WIDE = replace(PAIR, layout="IIG", inter=2)
DEEP = replace(PAIR, tensor=1, layout="GGG", pipeline=2, inter=2)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(WIDE, DEEP), (DEEP, WIDE)], ids=["from-tp", "to-tp"])
def test_checkpoints_go_from_and_to_any_split(first: Case, second: Case, tmp_path: Path) -> None:
    assert_checkpoint_parity(first, second, tmp_path / "one")


def read_and_edit(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    engine = case.engine()
    with engine.full_parameters("*") as values:
        before = {name: value.clone() for name, value in values.items()}
        for name, value in values.items():
            if name.endswith("down.weight"):
                value.mul_(2.0)
    after = whole_parameters(engine)
    engine.close()
    return before, after


def test_whole_parameters_are_read_and_edited() -> None:
    for before, after in run_ranks(read_and_edit, WIDE.ranks, WIDE):
        assert before["1.down.weight"].shape == (8, 12)
        for name, value in after.items():
            factor = 2.0 if name.endswith("down.weight") else 1.0
            assert torch.equal(value, before[name] * factor), name


class Letters:
    """A tokenizer of as many letters as the model knows."""

    size = 16
    end_of_text = None
    opening: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


def written(case: Case) -> str:
    engine = case.engine()
    options = {"tokens": 6, "context": 8, "seed": 0}
    text = generate(engine, Letters(), "abc", **options)  # type: ignore[arg-type]
    opened = Letters()
    opened.opening = (0,)
    assert generate(engine, opened, "bc", **options) == text[1:]  # type: ignore[arg-type]
    opened.stops = (ord(text[4]) - ord("a"),)
    assert text.startswith("a" + generate(engine, opened, "bc", **options))  # type: ignore[arg-type]
    assert len(generate(engine, opened, "bc", **options)) <= 3  # type: ignore[arg-type]
    engine.close()
    return text


@pytest.mark.slow
def test_text_of_any_length_is_written_on_parts_of_sequences() -> None:
    alone = Case(microbatches=2, model=Small())
    (wanted,) = run_ranks(written, 1, alone)
    case = replace(alone, tensor=2, pipeline=2, sequence_parallel=True)
    assert run_ranks(written, 4, case) == [wanted] * 4
    assert len(wanted) == 9


def uneven(case: Case) -> list[str]:
    """What a batch that does not divide is answered, and that the engine goes on."""
    engine = case.engine()
    batch = case.share(engine, 0)
    length = batch["labels"].shape[1]
    short = {name: value[:, : length - 1] for name, value in batch.items()}
    said = []
    for act in (engine.step, engine.evaluate):
        with pytest.raises(PlanError) as caught:
            act(short)
        said.append(str(caught.value))
    with pytest.raises(PlanError):
        engine.logits({"input_ids": short["input_ids"][:1]})
    engine.step(batch)
    engine.close()
    return said


def test_sequences_that_do_not_divide_are_refused() -> None:
    case = Case(tensor=2, microbatches=2, sequence_parallel=True, model=Small())
    for said in run_ranks(uneven, 2, case):
        assert all("tokens, which tensor = 2 ranks with sequence_parallel cannot split evenly" in text for text in said)


class Dropping(Small):
    """With dropout on attention and on both branches."""

    def build(self) -> Decoder:
        return Decoder(DecoderConfig(vocabulary=19, layers=3, hidden=16, heads=4, kv_heads=4, ffn=24, dropout=0.5))


def drawn(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What this rank's heads give in each forward of a layer, run again or not, and what the branch gives then.

    All heads have the same weights: what they give differs by their dropout alone.
    """
    engine = case.engine()
    with engine.full_parameters("layers.1.attention.*") as values:
        for name, value in values.items():
            if "output" not in name:
                value[:] = value[:4].repeat(4, 1)
    layer = engine.adapter.blocks()[2].module
    joined: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    layer.attention.output.register_forward_pre_hook(
        lambda _, args: joined.append(local_part(args[0]).detach().clone())
    )
    layer.register_forward_hook(lambda module, args, output: given.append(local_part(output).detach().clone()))
    engine.step(case.share(engine, 0))
    engine.close()
    return joined, given


@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
def test_dropout_is_apart_on_heads_and_alike_behind_them(recompute: str) -> None:
    """Ranks draw other masks for their heads, and the same for what all of them have. A forward that is run again draws
    what it drew before."""
    case = Case(tensor=2, microbatches=2, model=Dropping(), recompute=recompute, steps=1)
    (mine, whole), (others, theirs) = run_ranks(drawn, 2, case)
    assert len(mine) == len(others) == (2 if recompute == "none" else 4)
    assert not any(torch.equal(one, other) for one in mine for other in others)
    assert all(torch.equal(one, other) for one, other in zip(whole, theirs, strict=True))
    for each in (mine, others):
        assert len({tuple(value.flatten().tolist()) for value in each}) == 2, "one for each microbatch"
