"""Bits that flip on one rank are found, and the rank and the block are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atoll.base.errors import ReplicaError
from atoll.runtime.sharding.replicas import Disagreement, Replica, differences
from atoll.testing import run_ranks
from atoll.testing.parity import Case
from atoll.testing.tiny import TinyConfig

SAME = {
    "NNN": Case(layout="NNN", inter=2, intra=2),
    "NNG": Case(layout="NNG", inter=2, intra=2),
    "III": Case(layout="III", inter=2, intra=2),
    "IIG": Case(layout="IIG", inter=2, intra=2, precision="bf16"),
    "GGG": Case(layout="GGG", pipeline=2, intra=2, precision="bf16"),
    "tied over a pipeline": Case(layout="NNN", pipeline=4, schedule="zb-h1"),
    "ahead": Case(layout="NNG", pipeline=2, intra=2, precision="bf16", post_validation=True),
    "tensor": Case(layout="NNN", intra=2, tensor=2, microbatch=2),
}


def compare(case: Case, flipped: int, unit: int, what: str) -> str:
    """Train two steps, flip a bit on a rank, and compare; what was said."""
    engine = case.engine()
    try:
        for step in range(2):
            engine.step(case.share(engine, step))
        engine.check_replicas()
        if engine.place.rank == flipped:
            _flip(engine, unit, what)
        try:
            engine.check_replicas()
        except ReplicaError as error:
            return f"{error.ranks} {error}"
        return ""
    finally:
        engine.close()


def _flip(engine: object, unit: int, what: str) -> None:
    """The lowest bit of the last element: no norm or loss would show it."""
    own = next(each for each in engine.units if each.spec.index == unit)  # type: ignore[attr-defined]
    segment = next(each for each in own.segments if each.flat.trainable)
    held = {"master": segment.shards.master, "parameter": segment.shards.parameter}.get(what)
    if held is None:
        name = next(iter(segment.flat.parameters))
        held = engine._optimizer.states()[name]["exp_avg_sq"]  # type: ignore[attr-defined]
    held.detach().view(torch.uint8)[-held.itemsize] ^= 1


@pytest.mark.wide(2)
@pytest.mark.parametrize("name", SAME)
def test_replicas_are_equal_to_the_last_bit(name: str) -> None:
    case = SAME[name]
    model = TinyConfig(dropout=0.1) if case.tensor > 1 else TinyConfig(tied=True, frozen=True, odd=True, dropout=0.1)
    case = replace(case, model=model)
    assert run_ranks(compare, case.ranks, case, -1, 0, "") == [""] * case.ranks


@pytest.mark.parametrize(
    ("layout", "what", "said"),
    [
        ("NNN", "master", "rank 2 holds other master weights of 3 than ranks 0, 1, 3"),
        ("NNN", "state", "rank 2 holds other optimizer state of 3 than ranks 0, 1, 3"),
        ("NNG", "parameter", "rank 2 holds other parameters of 3 than ranks 0, 1, 3"),
        ("III", "master", "ranks 0, 2 hold different master weights of 3, and none is in the majority"),
        ("IIG", "parameter", "ranks 0, 2 hold different parameters of 3, and none is in the majority"),
    ],
)
def test_a_flipped_bit_names_rank_and_block(layout: str, what: str, said: str) -> None:
    """Across two groups of two: at I a rank has one replica, at N three."""
    case = Case(layout=layout, inter=2, intra=2, precision="bf16", order=("pp", "inter", "intra", "tp"))
    for found in run_ranks(compare, 4, case, 2, 3, what):
        assert said in found
        assert "after step 2" in found
        assert "last equal at step 2" in found


def test_copies_of_a_tied_parameter_are_replicas() -> None:
    """Embedding and head share a weight, on the first and the last pipeline rank."""
    case = Case(layout="NNN", pipeline=2, model=TinyConfig(tied=True))
    for found in run_ranks(compare, 2, case, 1, 0, "master"):
        assert "ranks 0, 1 hold different master weights of shared 0.table.weight" in found


def test_a_majority_is_needed_to_say_who_is_wrong() -> None:
    def held(*values: int) -> list[list[Replica]]:
        return [[Replica(7, value, unit=1, kind=0)] for value in values]

    assert differences(held(5, 5, 5)) == []
    assert differences(held(5, 6, 5)) == [Disagreement(1, 0, ranks=(1,), others=(0, 2))]
    assert differences(held(5, 6)) == [Disagreement(1, 0, ranks=(0, 1), others=())]
    assert differences(held(5, 5, 6, 7)) == [Disagreement(1, 0, ranks=(0, 1, 2, 3), others=())]
    assert differences([[Replica(1, 5, 0, 0)], [Replica(2, 6, 0, 0)]]) == []
