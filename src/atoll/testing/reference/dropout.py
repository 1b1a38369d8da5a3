"""Random numbers of a forward: generators seeded from (seed, step, microbatch, block) before each block."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from atoll.testing.reference.initial import seed_generators
from atoll.testing.reference.model import Recipe, base_of, blocks_of_family


def reference_seed(seed: int, step: int, microbatch: int, block: int) -> int:
    """Return the upper 63 bits of the 8-byte BLAKE2b of "seed:step:microbatch:block", little-endian."""
    text = ":".join(map(str, (seed, step, microbatch, block)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") // 2


class Seeding:
    """Seeds torch's generators before each block of a model, by hooks on modules.

    Blocks are counted in the order of execution: those that the recipe names, the modules of an `nn.Sequential`, or the
    layers of a model of transformers and the outermost modules with parameters beside them.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, seed: int) -> None:
        self._seed, self._moment = seed, (0, 0)
        self._order: dict[nn.Module, int] = {}
        self._inside: list[nn.Module] = []
        base = base_of(model)
        named: Iterable[str] | None = getattr(recipe, "blocks", None)
        if named is None and isinstance(model, nn.Sequential):
            named = [name for name, _ in model.named_children()]
        blocks = blocks_of_family(base) if named is None else [base.get_submodule(name) for name in named]
        self._is_known = bool(blocks)
        for block in blocks:
            block.register_forward_pre_hook(self._enter)
            block.register_forward_hook(self._leave)

    def of(self, step: int, microbatch: int) -> Seeding:
        """Return the context of one forward."""
        self._moment = (step, microbatch)
        return self

    def __enter__(self) -> None:
        seed_generators(0)
        self._before = torch.get_rng_state()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None and not self._is_known and not torch.equal(torch.get_rng_state(), self._before):
            raise ValueError("the model draws random numbers: name its blocks, in order, in `blocks` of the recipe")

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._inside:
            block = self._order.setdefault(module, len(self._order))
            seed_generators(reference_seed(self._seed, *self._moment, block))
        self._inside.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()
