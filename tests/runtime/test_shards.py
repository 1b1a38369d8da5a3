"""Stored shards as boxes: together they cover the model, and the shards of another mesh can be copied from them."""

from __future__ import annotations

import pytest
import torch

from atoll.plans.layouts import Level
from atoll.runtime.services.parameters import StoredShard
from atoll.testing import run_ranks
from atoll.testing.parity import Case
from atoll.testing.tiny import TinyConfig

MODEL = TinyConfig(layers=3)
CASES = {
    "pipeline": Case("IIG", pipeline=2, intra=2, model=MODEL),
    "groups": Case("NII", inter=2, intra=2, model=MODEL),
    "tensor": Case("GGG", pipeline=2, tensor=2, model=MODEL),
    "one": Case(model=MODEL),
}


def store(case: Case) -> tuple[list[StoredShard], dict[str, torch.Tensor]]:
    """Return what the rank stores, and whole values, after a step."""
    engine = case.engine()
    engine.step(case.share(engine, 0))
    found = engine.shards()
    whole = engine.state_dict()
    engine.close()
    return found, whole


@pytest.fixture(scope="module")
def stored() -> dict[str, list[tuple[list[StoredShard], dict[str, torch.Tensor]]]]:
    return {name: run_ranks(store, case.ranks, case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_boxes_are_the_whole_model(name: str, stored: dict[str, list]) -> None:
    """As often as a level, a pipeline and a tensor-parallel group repeat them."""
    whole = {key: value for _, values in stored[name] for key, value in values.items()}
    times = {key: torch.zeros(value.shape) for key, value in whole.items()}
    for rank, (shards, values) in enumerate(stored[name]):
        assert {each.name for each in shards} <= set(values)
        for each in shards:
            assert each.place.rank == rank
            assert each.tensor.shape == each.box.sizes
            assert each.box.shape == whole[each.name].shape
            at = _slices(each.box.offsets, each.box.sizes)
            assert torch.equal(each.tensor, whole[each.name][at])
            times[each.name][at] += 1
    assert all((value == value.max()).all() and value.min() >= 1 for value in times.values())


def test_a_shard_says_how_ranks_divide_it(stored: dict[str, list]) -> None:
    parts = {name: [each for shards, _ in found for each in shards] for name, found in stored.items()}
    levels = {name: {each.level for each in shards} for name, shards in parts.items()}
    assert levels == {"pipeline": {Level.G}, "groups": {Level.I}, "tensor": {Level.G}, "one": {Level.N}}
    split = {each.name: each.dim for each in parts["tensor"] if each.dim is not None}
    assert set(split.values()) == {0, 1}
    for each in parts["tensor"]:
        if each.dim is not None:
            assert each.box.sizes[each.dim] <= each.box.shape[each.dim] // 2
    assert not [each for name in ("pipeline", "groups", "one") for each in parts[name] if each.dim is not None]


@pytest.mark.parametrize(("one", "other"), [("tensor", "groups"), ("groups", "pipeline"), ("one", "tensor")])
def test_what_another_mesh_stores_is_found_in_boxes_that_overlap(one: str, other: str, stored: dict[str, list]) -> None:
    given = [each for shards, _ in stored[one] for each in shards]
    for shards, _ in stored[other]:
        for wanted in shards:
            found = torch.full(wanted.box.sizes, float("nan"), dtype=torch.float64)
            for each in given:
                if each.name == wanted.name and each.box.overlaps(wanted.box):
                    begins = [max(a, b) for a, b in zip(each.box.offsets, wanted.box.offsets, strict=True)]
                    ends = [
                        min(a + n, b + m)
                        for a, n, b, m in zip(
                            each.box.offsets, each.box.sizes, wanted.box.offsets, wanted.box.sizes, strict=True
                        )
                    ]
                    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
                    own, there = (
                        _slices([begin - at for begin, at in zip(begins, box.offsets, strict=True)], sizes)
                        for box in (wanted.box, each.box)
                    )
                    found[own] = each.tensor[there].double()
            torch.testing.assert_close(found, wanted.tensor.double(), rtol=1e-9, atol=1e-11)


def _slices(offsets: list[int] | tuple[int, ...], sizes: list[int] | tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
