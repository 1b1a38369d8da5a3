"""Random numbers that depend on the model rather than on the ranks.

The generators are seeded from (seed, step, global microbatch, block) before a block's forward and its recompute, so
dropout is the same under every layout and schedule and a checkpoint needs no generator state.

[Note: heads of their own] The ranks of a tensor-parallel group have the same seed, and so the same dropout on tensors
that all of them have. Between a module that splits and the one that joins again, each computes its own heads and
features with its own random numbers (`draw_apart`); afterwards all use the same ones again (`draw_alike`).
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch


def block_seed(seed: int, step: int, microbatch: int, block: int, *, part: int = 0) -> int:
    """Return the seed of one forward of one block: a stable 63-bit hash of its numbers. part: of a divided sequence."""
    text = f"{seed}:{step}:{microbatch}:{block}{f':{part}' if part else ''}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_block(seed: int, step: int, microbatch: int, block: int, *, part: int = 0) -> None:
    """Seed torch's default generators, of the CPU and of CUDA where it is in use, for one forward of one block."""
    _seed(block_seed(seed, step, microbatch, block=block, part=part))


def _seed(value: int) -> None:
    # torch.manual_seed does the same, but formats a stack trace for every kind of device that is not in use: 0.1 to
    # 0.5 ms for each block and microbatch.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


def keeping_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Context that restores the user's random generators after blocks were seeded."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@dataclass(slots=True)
class _Region:
    """A region in which tensor-parallel ranks use different random numbers: its seed, and the shared generator states.
    It ends when the default generator has another seed. Before the first one, `seed` is None."""

    seed: int | None = None
    common: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return torch.default_generator.initial_seed() == self.seed


_REGION = _Region()


def draw_apart(rank: int, name: str) -> None:
    """Start a region in which the `rank`-th tensor-parallel rank uses its own random numbers.

    Its seed is derived from the next shared random number and from `name`, which identifies the place in the model. So
    it is the same when a forward is run again from its random state.
    """
    if _REGION.is_open:
        return
    common = [torch.default_generator.get_state()]  # copies: later random numbers do not change them
    if torch.cuda.is_initialized():
        common.append(torch.cuda.get_rng_state())
    digest = hashlib.blake2b(f"{name}:{rank}".encode(), digest_size=8)
    digest.update(common[0].numpy().tobytes())
    seed = int.from_bytes(digest.digest(), "little") >> 1
    _REGION.seed, _REGION.common = seed, common
    _seed(seed)


def draw_alike() -> None:
    """End the region: restore the shared generator states, as if no rank had used its own."""
    if _REGION.is_open:
        torch.default_generator.set_state(_REGION.common[0])
        for state in _REGION.common[1:]:
            torch.cuda.set_rng_state(state)
