"""Codecs as values: names, bytes, refusals, and what follows for a layout."""

from typing import Any

import pytest

from atoll.base.errors import PlanError
from atoll.plans.layouts import (
    CODES,
    GATHER_INTER,
    REDUCE_INTER,
    REDUCE_INTRA,
    Codec,
    Codecs,
    FlatMap,
    Layout,
    Nest,
    Precision,
    SegmentShape,
    Sharding,
    StoredCopies,
    footprint,
)


@pytest.mark.parametrize(
    ("codec", "numel", "nbytes"),
    [
        (Codec("bf16"), 100, 200),
        (Codec("fp8", 64), 128, 2 * 4 + 128),
        (Codec("int8"), 256, 2 * 4 + 256),
        (Codec("int8"), 257, 3 * 4 + 260),  # 257 bytes, filled up to a multiple of 4
        (Codec("int4"), 256, 2 * 4 + 128),
        (Codec("int4"), 3, 4 + 4),
        (Codec("int4"), 0, 0),
        (Codec("int2"), 256, 2 * 4 + 64),
        (Codec("int2"), 5, 4 + 4),
    ],
)
def test_bytes_of_a_message(codec: Codec, numel: int, nbytes: int) -> None:
    assert codec.nbytes(numel) == nbytes


@pytest.mark.parametrize("name", CODES)
def test_long_messages_have_their_bytes_an_element(name: str) -> None:
    codec = Codec(name)
    assert codec.nbytes(1 << 20) == codec.item_bytes * (1 << 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "int9"}, r"no codec 'int9': did you mean 'int[248]'\? known: bf16, fp8, int8, int4, int2"),
        ({"name": "int8", "block": 0}, r"block = 0 elements of int8; use a multiple of 2, as 128"),
        ({"name": "int4", "block": 7}, r"block = 7 elements"),
        ({"name": "int2", "block": 6}, r"block = 6 elements of int2; use a multiple of 4, as 128"),
        ({"name": "int4", "rounding": "up"}, r"rounding = 'up' of a codec; known: nearest, stochastic"),
    ],
)
def test_what_is_no_codec_is_refused(options: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Codec(**options)


def test_codecs_in_words() -> None:
    assert str(Codecs()) == "none"
    assert not Codecs()
    both = Codecs(Codec("int4", 64, "stochastic"), Codec("int8"), feedback=False)
    assert str(both) == "gradient int4 of 64, stochastic, parameter int8, no feedback"


def sharding(layout: str, *, inter: int = 2, keeps_apart: bool = False, precision: str = "fp32") -> Sharding:
    codecs = Codecs(Codec("int8"), Codec("int4"))
    preset = Precision.preset(precision)
    return Sharding(Layout(layout), preset, Nest(inter, 2), keeps_apart=keeps_apart, codecs=codecs)


SEGMENT = SegmentShape(FlatMap.build([("weight", (64, 16))], 4), ("I",))


def test_only_moves_between_groups_are_encoded() -> None:
    own = sharding("IIG")
    assert own.codec("gradient", REDUCE_INTRA) is None
    assert own.codec("gradient", REDUCE_INTER) == Codec("int8")
    assert own.codec("parameter", GATHER_INTER) == Codec("int4")
    assert sharding("IIG", inter=1).codec("gradient", REDUCE_INTER) is None


@pytest.mark.parametrize(
    ("layout", "keeps_copy"), [("NNN", False), ("NNG", True), ("IIG", True), ("III", False), ("GGG", False)]
)
def test_a_copy_follows_where_parameters_cross_groups_once_a_step(layout: str, keeps_copy: bool) -> None:
    own = sharding(layout)
    assert own.keeps_copy(SEGMENT) is keeps_copy
    assert (own.stored(SEGMENT) is StoredCopies.APART) is keeps_copy
    assert sharding(layout, inter=1).stored(SEGMENT) is StoredCopies.SHARED


def test_the_footprint_has_residuals_and_copies() -> None:
    plain = footprint([SEGMENT], Sharding(Layout("IIG"), Precision.preset("fp32"), Nest(2, 2)))
    coded = footprint([SEGMENT], sharding("IIG"))
    # A residual of the rank's part at level I, and a master of its own at level G.
    assert coded.optimizer == plain.optimizer + 4 * 512 + 4 * 256
    assert coded.parameters == plain.parameters
    assert footprint([SEGMENT], sharding("IIG", keeps_apart=True)).parameters == 2 * coded.parameters
