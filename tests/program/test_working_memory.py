"""What a rank needs within a step besides what rests."""

from __future__ import annotations

import pytest

from atoll.plans.layouts import (
    AT_ONCE,
    GATHER_PARAMETER,
    REDUCE_GRADIENT,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    Axis,
    Codec,
    Codecs,
    FlatMap,
    Layout,
    MoveKind,
    Nest,
    Precision,
    SegmentShape,
    Sharding,
)
from atoll.program.memory import WorkingMemory, _arriving, working_memory

FP32, BF16 = Precision.preset("fp32"), Precision.preset("bf16")
NUMEL = 4096


def of(layout: str, *, in_place: bool, nest: Nest | None = None, **options: object) -> WorkingMemory:
    """Of two blocks with 4096 numbers each over 2x2 ranks."""
    nest = nest or Nest(2, 2, 0, 1)
    precision = options.pop("precision", FP32)
    assert isinstance(precision, Precision)
    keeps_apart = bool(options.pop("keeps_apart", False))
    segment = SegmentShape(FlatMap.build([("w", (NUMEL,))], nest.ranks), ("I",), precision.compute)
    sharding = Sharding(Layout(layout), precision, nest, keeps_apart)
    return working_memory([[(segment, sharding)]] * 2, reads_in_place=in_place, **options)  # type: ignore[arg-type]


WHOLE = 4 * NUMEL


@pytest.mark.parametrize("in_place", [True, False])
def test_what_rests_whole_needs_what_arrives_alone(in_place: bool) -> None:
    need = of("NNN", in_place=in_place)
    assert (need.live, need.ahead, need.lent) == (0, 0, 0)
    # Two syncs at once, each of which receives the other's part: of a quarter across, of a half inside.
    assert need.buffers == AT_ONCE * WHOLE // (4 if in_place else 2)


def test_parameters_that_are_read_in_place_are_not_gathered_ahead() -> None:
    need = of("IIG", in_place=True)
    assert (need.live, need.ahead) == (WHOLE, 0)
    assert need.lent == 2 * WHOLE
    sent = of("IIG", in_place=False)
    assert (sent.live, sent.ahead, sent.lent) == (2 * WHOLE, WHOLE, 0)  # one link, one block ahead
    assert sent.buffers >= 2 * WHOLE


def test_two_levels_gather_ahead_what_crosses_the_link() -> None:
    need = of("GGG", in_place=True)
    assert need.live == WHOLE
    assert need.ahead == WHOLE // 2
    assert need.lent == AT_ONCE * WHOLE // 2 + 2 * WHOLE
    assert need.buffers == WHOLE // 4
    least = of("GGG", in_place=True, prefetch=0)
    assert (least.ahead, least.lent) == (0, WHOLE // 2 + WHOLE)  # no reduction under way either
    assert of("GGG", in_place=False, prefetch=0).flows == WHOLE
    assert of("GGG", in_place=True, prefetch=10 * WHOLE).lent >= 10 * WHOLE
    both = of("GGG", in_place=False)
    assert (both.live, both.ahead) == (3 * WHOLE, 2 * WHOLE)  # two links
    assert of("GGG", in_place=False, prefetch=WHOLE).live == 2 * WHOLE


@pytest.mark.parametrize("layout", ["IIG", "GGG", "III"])
@pytest.mark.parametrize("in_place", [True, False])
def test_encoded_blocks_are_sent_and_received_besides(layout: str, in_place: bool) -> None:
    """A reduction between groups has encoded blocks of both in and out, a gather has them once."""
    nest = Nest(2, 2, 0, 1)
    codecs = Codecs(Codec("int8", 64), Codec("int4", 64))
    segment = SegmentShape(FlatMap.build([("w", (NUMEL,))], nest.ranks), ("I",), "float32")
    sharding = Sharding(Layout(layout), FP32, nest, codecs=codecs)
    parts = Layout(layout)
    for of_what, codec, moves in (
        ("gradient", codecs.gradient, REDUCE_GRADIENT[parts.gradients]),
        ("gradient", codecs.gradient, SYNC_GRADIENT[parts.gradients, parts.optimizer]),
        ("parameter", codecs.parameter, GATHER_PARAMETER[parts.parameters]),
        ("parameter", codecs.parameter, SYNC_PARAMETER[parts.optimizer, parts.parameters]),
    ):
        assert codec is not None
        sizes = [0]
        for move in moves:
            block = len(nest.range(move.fine, NUMEL))
            if move.axis is Axis.INTER:  # two groups
                sizes.append((2 if move.kind is MoveKind.REDUCE else 1) * 2 * codec.nbytes(block))
            elif move.kind is MoveKind.REDUCE and not in_place:  # of the other rank, as it is
                sizes.append(4 * block)
        assert _arriving(moves, of_what, sharding, segment, is_shared=in_place) == max(sizes)  # type: ignore[arg-type]


def test_one_group_reads_what_rests() -> None:
    need = of("GGG", in_place=True, nest=Nest(1, 4, 0, 1))
    assert (need.live, need.ahead, need.lent) == (WHOLE, 0, 2 * WHOLE)


def test_whole_parameters_are_stored_and_not_gathered() -> None:
    """In mixed precision too, beside their masters: a cast for each use would cost more than the copy."""
    for layout in ("NNN", "NNG"):
        assert of(layout, in_place=True, precision=BF16).live == 0
    assert of("GGG", in_place=True, precision=BF16).live == WHOLE // 2


def test_frozen_parameters_have_no_gradients() -> None:
    nest = Nest(2, 2, 0, 0)
    frozen = SegmentShape(FlatMap.build([("w", (NUMEL,))], nest.ranks))
    need = working_memory([[(frozen, Sharding(Layout("ING"), FP32, nest))]], reads_in_place=True)
    assert (need.live, need.lent, need.buffers) == (WHOLE, 0, 0)


def test_nobody_needs_anything_of_no_block() -> None:
    assert working_memory([], reads_in_place=True).total == 0


def test_a_program_says_what_is_whole_and_made_at_once() -> None:
    need = of("GGG", in_place=False, whole=5 * WHOLE, made=(3 * WHOLE, 0))
    assert (need.live, need.flows) == (5 * WHOLE, 3 * WHOLE)
    assert need.total == of("GGG", in_place=False).total + 3 * WHOLE
    lent = of("IIG", in_place=True, made=(0, 3 * WHOLE))
    assert (lent.lent, lent.flows) == (3 * WHOLE, 3 * WHOLE)
    assert of("IIG", in_place=True, made=(0, WHOLE)).lent == 2 * WHOLE, "room for one more than is under way"
