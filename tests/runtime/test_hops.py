"""Coded hops between stages: a pipeline equals one process that rounds at the same cuts, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from atoll.base.errors import PlanError
from atoll.plans.layouts import NO_CODECS, Codec, Codecs
from atoll.runtime.transport import shared_memory
from atoll.testing import run_ranks
from atoll.testing.coded import CodecKind, coded
from atoll.testing.parity import Case, History, _neutral, reference, train_case, worst_difference
from atoll.testing.tiny import TinyConfig

HOPS = {name: Codecs(hop=Codec(name), near=True) for name in ("bf16", "fp8", "int8", "int4")}
INT8 = HOPS["int8"]
TWO = Case(pipeline=2, layers_per_stage=(2, 2), steps=2, codecs=INT8)
FOUR = replace(TWO, layers_per_stage=(1, 1, 1, 1))


class _Rounded(torch.autograd.Function):
    """Round an activation, and its gradient in the backward, as a coded hop does: token by token."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, kind: CodecKind) -> Tensor:
        ctx.kind = kind
        return _rows(hidden, kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _rows(gradients[0], ctx.kind), None


def _rows(values: Tensor, kind: CodecKind) -> Tensor:
    rows = values.reshape(-1, values.shape[-1])
    return torch.stack([coded(row, kind) for row in rows]).view_as(values)


@dataclass(frozen=True, slots=True)
class Rounding(TinyConfig):
    """A tiny model that rounds behind some of its blocks, in one process."""

    cuts: tuple[int, ...] = ()
    kind: CodecKind | None = None

    def build(self) -> nn.Module:
        model = TinyConfig.build(self)
        for at in self.cuts:
            model.get_submodule(str(at)).register_forward_hook(lambda _, given, hidden: _round(hidden, self.kind))
        return model


def _round(hidden: Tensor, kind: CodecKind | None) -> Any:
    return _Rounded.apply(hidden, kind)  # type: ignore[no-untyped-call]


def train(case: Case, hosts: Sequence[int] = ()) -> History:
    """hosts: number of each rank's machine; all on this one if not given."""
    if not hosts:
        return train_case(case)
    rank = torch.distributed.get_rank()
    with patch.object(shared_memory, "host", lambda: hosts[rank]):
        return train_case(case)


def assert_rounds(case: Case, *cuts: int, hosts: Sequence[int] = ()) -> None:
    """cuts: blocks behind which the pipeline has a coded hop; block 0 is the embedding."""
    hop, model = case.codecs.hop, case.model
    assert hop is not None
    assert isinstance(model, TinyConfig)
    rounding = Rounding(**asdict(model), cuts=cuts, kind=CodecKind(hop.name, hop.block))
    wanted = reference(_neutral(replace(case, model=rounding)))
    for history in run_ranks(train, case.ranks, case, hosts):
        worst, where = worst_difference(history, wanted)
        assert worst <= 1e-10, where


@pytest.mark.wide(2)
@pytest.mark.parametrize("name", HOPS)
def test_every_codec(name: str) -> None:
    assert_rounds(replace(TWO, codecs=HOPS[name]), 2)


@pytest.mark.wide(2)
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_schedules(schedule: str) -> None:
    assert_rounds(replace(TWO, schedule=schedule, model=TinyConfig(tied=True)), 2)


def test_several_stages_on_a_rank() -> None:
    assert_rounds(replace(FOUR, schedule="interleaved"), 1, 2, 3)


def test_a_hop_within_a_rank_is_not_coded() -> None:
    """In a V the second and the third stage are on one rank."""
    assert_rounds(replace(FOUR, schedule="zb-v"), 1, 3)


def test_tensor_parallelism() -> None:
    assert_rounds(replace(TWO, tensor=2), 2)


def test_a_sharded_layout() -> None:
    assert_rounds(replace(TWO, layout="GGG", intra=2, schedule="zb-h1", reduction="step"), 2)


def test_a_divided_vocabulary() -> None:
    """Its messages are no hops: rows that are looked up, and what is scored, travel as they are."""
    assert_rounds(replace(TWO, vocabulary_parallel=True), 2)


@pytest.mark.slow
def test_a_post_validated_step_that_is_taken_back() -> None:
    assert_rounds(replace(TWO, schedule="zb-h1", post_validation=True, steps=4), 2)


def test_only_hops_between_machines_are_coded() -> None:
    case = replace(FOUR, pipeline=4, codecs=Codecs(hop=Codec("int8")))
    assert_rounds(case, 2, hosts=(1, 1, 2, 2))


@pytest.mark.slow
def test_pipelines_that_lie_otherwise_on_machines_code_alike() -> None:
    """The first of two tensor-parallel ranks shares its machine with that of the next stage, the second does not."""
    assert_rounds(replace(TWO, tensor=2, codecs=Codecs(hop=Codec("int8"))), 2, hosts=(1, 1, 1, 2))


def test_what_has_no_gradient_travels_as_it_is() -> None:
    """The first two layers are frozen with the embedding; the hop behind the first of them is not rounded."""
    assert_rounds(replace(FOUR, pipeline=4, model=TinyConfig(trained=(3, 4, 5))), 3)


def test_a_codec_rounds_and_none_changes_no_bit() -> None:
    plain, rounded, near = (
        run_ranks(train, 2, replace(TWO, codecs=codecs))[0] for codecs in (NO_CODECS, INT8, Codecs(hop=Codec("int8")))
    )
    assert worst_difference(rounded, plain)[0] > 1e-4
    assert near.losses == plain.losses
    assert near.norms == plain.norms
    assert all(torch.equal(value, plain.parameters[name]) for name, value in near.parameters.items())


# ---- values


def test_blocks_end_with_their_rows() -> None:
    codec = Codec("int8")
    assert codec.of_rows(256) == codec.of_rows(128) == codec
    assert codec.of_rows(64).block == 64
    assert codec.of_rows(200).block == 200
    assert Codec("bf16").of_rows(7) == Codec("bf16")
    with pytest.raises(PlanError, match="rows of 7 elements"):
        codec.of_rows(7)


def test_a_hop_that_is_no_smaller_is_not_coded() -> None:
    assert HOPS["bf16"].hop_of(64, item=2) is None
    assert HOPS["bf16"].hop_of(64, item=4) == Codec("bf16")
    assert INT8.hop_of(64, item=2) == Codec("int8", 64)
    assert INT8.hop_of(2, item=2) is None
    assert NO_CODECS.hop_of(64, item=4) is None


def test_hops_are_rounded_to_nearest() -> None:
    with pytest.raises(PlanError, match="rounded to nearest"):
        Codecs(hop=Codec("int8", rounding="stochastic"))


def test_words() -> None:
    assert str(INT8) == "hop int8, also on a node"
    assert str(Codecs(Codec("int4"), hop=Codec("bf16"))) == "gradient int4, hop bf16"
