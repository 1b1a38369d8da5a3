"""Anchors in host memory: the same bits however a model is divided, and states that masters follow later."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from atoll.plans.federation.records import Contribution
from atoll.plans.layouts import CODES, Codec
from atoll.plans.outer import Apart, Outer
from atoll.runtime.federation.elements import TensorPart
from atoll.runtime.sharding import host_anchors
from atoll.runtime.sharding.host_anchors import (
    AnchorHoldings,
    AnchorState,
    HostAnchor,
    encoded,
    raw,
    stepped,
    weights_of,
)
from atoll.testing import run_ranks
from atoll.testing.parity import Case

OUTER = Outer(2, apart=Apart(3))


def _contribution(tokens: int, digest: str = "aa") -> Contribution:
    return Contribution("a", 0, base=-1, tokens=tokens, used=1, digest=digest)


@pytest.mark.parametrize("outer", [OUTER, Outer(2, optimizer="sgd"), Outer(2, optimizer="sgd", lr=0.3, momentum=0.8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_outer_step_has_the_same_bits_at_any_place_of_a_tensor(outer: Outer, dtype: torch.dtype) -> None:
    """Vectors of processors take eight elements at a time, and what is left one by one."""
    value, mean = torch.randn(101, generator=torch.Generator().manual_seed(3)).to(dtype), torch.randn(101).to(dtype)
    momentum = torch.randn(101).to(dtype) if outer.inertia else None
    whole = stepped(AnchorState(value, momentum), mean, outer)
    for begin, end in ((0, 1), (1, 12), (12, 53), (53, 101)):
        part = AnchorState(value[begin:end].clone(), None if momentum is None else momentum[begin:end].clone())
        found = stepped(part, mean[begin:end].clone(), outer)
        assert torch.equal(found.value, whole.value[begin:end])
        if momentum is not None and found.momentum is not None and whole.momentum is not None:
            assert torch.equal(found.momentum, whole.momentum[begin:end])


def test_an_outer_step_is_that_of_torch() -> None:
    value, means = torch.randn(20, dtype=torch.float64), torch.randn(3, 20, dtype=torch.float64)
    parameter = torch.nn.Parameter(value.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    state = AnchorState(value, torch.zeros_like(value))
    for mean in means:
        parameter.grad = mean.clone()
        optimizer.step()
        state = stepped(state, mean, OUTER)
    torch.testing.assert_close(state.value, parameter.detach(), rtol=0, atol=1e-14)


def test_weights_are_shares_of_tokens() -> None:
    contributions = [_contribution(300), _contribution(100)]
    assert weights_of(contributions, OUTER) == [0.75, 0.25]
    assert weights_of(contributions, replace(OUTER, apart=Apart(3, weights="equal"))) == [0.5, 0.5]
    assert weights_of([_contribution(0), _contribution(0)], OUTER) == [0.5, 0.5]


@pytest.mark.parametrize("count", [1, 7, 128, 300])
@pytest.mark.parametrize("name", CODES)
def test_a_residual_has_what_a_message_lacks(name: str, count: int) -> None:
    values, residual = torch.randn(count), torch.randn(count) / 10
    wanted, sent = values + residual, values.clone()
    message = encoded(Codec(name), sent, residual=residual, seed=0)
    assert len(message) == Codec(name).nbytes(count)
    torch.testing.assert_close(sent + residual, wanted)
    assert not torch.equal(sent, values)


def _holdings(case: Case) -> tuple[AnchorHoldings, list[HostAnchor]]:
    engine = case.engine()
    units = {
        0: [
            HostAnchor(segment, OUTER, engine.transport, tag=(unit.spec.index, at))
            for unit in engine.units
            for at, segment in enumerate(unit.segments)
            if segment.flat.trainable
        ]
    }
    return AnchorHoldings(units, OUTER, item=8, bases=(-1,)), units[0]


def _flows(anchors: list[HostAnchor], seed: int, cut: int) -> dict[TensorPart, memoryview]:
    """Elements of every parameter in parts of `cut`, the same on every rank."""
    found = {}
    for anchor in anchors:
        for name, shape in anchor.segment.flat.parameters.items():
            whole = torch.randn(shape.numel(), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            for begin in range(0, len(whole), cut):
                part = TensorPart(name, begin, min(begin + cut, len(whole)))
                found[part] = raw(whole[part.start : part.stop])
    return found


def _step(case: Case, piece: int = 1 << 20) -> dict[TensorPart, bytes]:
    """piece: elements that are read together."""
    with patch.object(host_anchors, "PIECE", piece):
        return _step_in_pieces(case)


def _step_in_pieces(case: Case) -> dict[TensorPart, bytes]:
    holdings, anchors = _holdings(case)
    for version in range(2):
        averaged = [
            (_contribution(100, "aa"), _flows(anchors, version, cut=7)),
            (_contribution(50, "bb"), _flows(anchors, version + 10, cut=1000)),
        ]
        holdings.step(0, version, averaged)
    assert holdings.version(0) == 1
    assert holdings.is_ahead(0)
    before = [anchor.value for anchor in anchors]
    moved = holdings.follow(0, 1)
    assert moved is not None
    assert holdings.trail[0] == [0, 1]
    for anchor, old, move in zip(anchors, before, moved, strict=True):
        torch.testing.assert_close(anchor.value - old, move)
    assert holdings.follow(0, 1) is None
    assert {part.name for part in holdings.state_parts(0)} >= {f"momentum of {part.name}" for part in holdings.parts(0)}
    return {part: bytes(held) for part, held in holdings.show(0).items()}


@pytest.mark.parametrize("piece", [1 << 20, 6])
def test_ranks_that_divide_a_model_hold_the_bits_of_one_that_does_not(piece: int) -> None:
    case = Case(microbatches=2)
    (whole,) = run_ranks(_step, 1, case)
    parts = run_ranks(_step, 2, replace(case, intra=2, layout="GGG"), piece)
    names = {part.name for part in whole}
    assert {part.name for each in parts for part in each} == names
    for name in names:
        wanted = next(held for part, held in whole.items() if part.name == name)
        found = sorted((part.start, held) for each in parts for part, held in each.items() if part.name == name)
        assert b"".join(held for _, held in found) == wanted, name


def test_islands_that_split_layers_read_parts_of_those_that_do_not() -> None:
    """A tensor-parallel rank has boxes, of rows or columns: the elements are the same at each place of a parameter."""
    case = Case(microbatches=2, tensor=2)
    shown = run_ranks(_show_split, 2, case)
    (alone,) = run_ranks(_assemble, 1, replace(case, tensor=1), [dict(each) for each in shown])
    assert alone == "all are the same"
    # And the other way round: what one rank has, both read.
    (whole,) = run_ranks(_show_split, 1, replace(case, tensor=1))
    assert run_ranks(_assemble, 2, case, [dict(whole)]) == ["all are the same"] * 2


def _show_split(case: Case) -> list[tuple[TensorPart, bytes]]:
    holdings, _ = _holdings(case)
    return [(part, bytes(held)) for part, held in holdings.show(0).items() if not part.name.startswith("momentum")]


def _assemble(case: Case, shown: list[dict[TensorPart, bytes]]) -> str:
    """Take parts of other ranks as a contribution, and compare with what this rank has at the same places."""
    holdings, anchors = _holdings(case)
    elements = {part: memoryview(held) for each in shown for part, held in each.items()}
    holdings.check(0, elements)
    for missing in list(elements)[:3]:
        with pytest.raises(ValueError, match="it does not have"):
            holdings.check(0, {part: held for part, held in elements.items() if part.tensor != missing.tensor})
    before = [anchor.newest.value for anchor in anchors]
    moved = replace(OUTER, optimizer="sgd", lr=1.0, momentum=0.0)
    holdings._outer = moved
    holdings.step(0, 0, [(_contribution(1), elements)])
    # anchor - 1 * (the same anchor) is zero wherever all elements were found in their places.
    left = [float(anchor.newest.value.abs().max()) for anchor in anchors]
    return "all are the same" if not any(left) and any(float(each.abs().max()) for each in before) else f"{left}"


def _take(case: Case) -> tuple[bool, bool, int]:
    holdings, anchors = _holdings(case)
    holdings.step(0, 3, [(_contribution(1), _flows(anchors, 3, cut=50))])
    shown = {part: memoryview(bytes(held)) for part, held in holdings.show(0).items()}
    other, others = _holdings(case)
    other.take(0, 3, shown)
    is_same = all(torch.equal(a.newest.value, b.newest.value) for a, b in zip(anchors, others, strict=True))
    other.take(0, 5, {})  # restored: the same anchors, of a later round
    still = all(torch.equal(a.newest.value, b.newest.value) for a, b in zip(anchors, others, strict=True))
    return is_same, still, other.taken


def test_anchors_are_taken_over_with_their_momentum() -> None:
    assert run_ranks(_take, 1, Case(microbatches=2)) == [(True, True, 6)]
