"""Tensors of files that are not read yet: their boxes are those that torch's functions give, and only they are read."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.runtime.models.unread import Computed, NotNoted, StoredTensor, Unread


class File:
    """Tensors of a file. read: elements that were read."""

    def __init__(self) -> None:
        self.read = 0

    def tensor(self, name: str, values: Tensor) -> StoredTensor:
        def read(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
            self.read += math.prod(sizes)
            return values[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]

        return StoredTensor(name, values.shape, values.dtype, read)


def stacked_and_joined(parts: list[Any]) -> Any:
    """As the tables of transformers make one tensor for all experts."""
    half = len(parts) // 2
    return torch.cat([torch.stack(parts[:half], dim=0), torch.stack(parts[half:], dim=0)], dim=1)


def split_and_turned(parts: list[Any]) -> Any:
    one, two = torch.chunk(torch.cat(parts, dim=-1), 2, dim=1)
    return torch.stack([torch.transpose(one, 0, 1).contiguous(), torch.transpose(two, 0, -1)], dim=2)


def unequal(parts: list[Any]) -> Any:
    first, _, last = torch.split(torch.cat(parts), [3, 1, 4 * len(parts) - 4], dim=0)
    return torch.cat([last, first], dim=0)


@pytest.mark.parametrize("make", [stacked_and_joined, split_and_turned, unequal])
def test_boxes_are_those_of_torch(make: Any) -> None:
    chance, file = random.Random(0), File()
    values = [torch.randn(4, 6) for _ in range(4)]
    wanted = make(values)
    found = make([file.tensor(str(at), each) for at, each in enumerate(values)])
    assert isinstance(found, Unread)
    assert torch.equal(found.whole(), wanted)
    for _ in range(50):
        offsets = tuple(chance.randrange(size) for size in wanted.shape)
        sizes = tuple(chance.randint(0, size - at) for size, at in zip(wanted.shape, offsets, strict=True))
        target = torch.empty(sizes, dtype=torch.float64)
        file.read = 0
        found.fill(target, offsets)
        ranges = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        assert torch.equal(target, wanted[ranges].double())
        assert file.read == target.numel()
    again = torch.full(wanted.shape, torch.nan)
    for offsets, part in found.boxes():
        again[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))] = part.whole()
    assert torch.equal(again, wanted)


def test_what_is_not_noted_is_computed_from_whole_tensors() -> None:
    values = torch.arange(12.0).view(3, 4)
    stored = File().tensor("a", values)
    for act in (lambda: torch.exp(stored), lambda: stored.reshape(4, 3)):
        with pytest.raises(NotNoted):
            act()
    found = Computed((4, 3), torch.float32, ("a",), lambda: stored.whole().reshape(4, 3))
    assert torch.equal(found.box((1, 0), (2, 3)), values.reshape(4, 3)[1:3])


def test_tensors_that_do_not_join_are_an_error_and_none_keeps_its_dtype() -> None:
    file = File()
    with pytest.raises(ValueError, match="do not join"):
        torch.cat([file.tensor("a", torch.ones(2, 3)), file.tensor("b", torch.ones(2, 4))], dim=0)  # type: ignore[list-item]
    mixed = torch.stack([file.tensor("a", torch.ones(2).bfloat16()), file.tensor("b", torch.ones(2))])  # type: ignore[list-item]
    assert mixed.dtype == torch.float32
