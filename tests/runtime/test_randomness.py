"""Dropout is independent over steps, microbatches, ranks, samples and blocks, and the same wherever a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from atoll import Engine
from atoll.plans import schedules
from atoll.plans.layouts import Layout
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.models import Adapter
from atoll.runtime.models.adapter import SequentialAdapter
from atoll.runtime.randomness import block_seed, draw_alike, draw_apart, seed_block
from atoll.testing import run_ranks

SAMPLES, SEQUENCE, WIDTH = 2, 32, 32
BITS = SEQUENCE * WIDTH
SIGMAS = 6.0
"""Two independent fair masks of n bits agree in n/2, with a standard deviation of sqrt(n)/2."""


class Which(NamedTuple):
    """Whose mask: the step, the microbatch of all ranks, the block, its first or second dropout, the sample."""

    step: int
    microbatch: int
    block: int
    nth: int
    sample: int


class Masked(nn.Module):
    """A block with two dropouts, which notes what they leave of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropouts = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
        self.noted: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        for dropout in self.dropouts:
            left = dropout(torch.ones_like(hidden))
            self.noted.append(left.detach() != 0)
            hidden = hidden * left
        out: Tensor = hidden + self.linear(hidden)
        return out


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Masked() for _ in range(4)))

    def atoll_adapter(self) -> Adapter:
        return SequentialAdapter(self, lambda outputs, batch: outputs.square().mean())


def masks(mesh: MeshShape, seed: int = 3, recompute: str = "none") -> dict[Which, Tensor]:
    """What this rank's dropouts kept in two steps of four microbatches, as booleans [SEQUENCE * WIDTH]."""
    with torch.device("meta"):
        model = Model()
    microbatches = 4 // mesh.data
    schedule = schedules.build("1f1b", ranks=mesh.pipeline, microbatches=microbatches)
    plan = Plan(mesh, Layout("IIG"), schedule, SAMPLES, recompute=recompute)
    engine = Engine(model, plan, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), seed=seed)
    rows = SAMPLES * microbatches
    batch = {"inputs": torch.ones(rows, SEQUENCE, WIDTH), "labels": torch.zeros(rows, 1).long()}
    found: dict[Which, Tensor] = {}
    for step in range(2):
        engine.step(batch)
        for block, module in enumerate(model):
            assert isinstance(module, Masked)
            if recompute != "none":  # without a pipeline each forward is followed by its backward, which runs it again
                pairs = list(zip(module.noted[0::4], module.noted[1::4], strict=True))
                again = list(zip(module.noted[2::4], module.noted[3::4], strict=True))
                assert all(
                    torch.equal(a, b)
                    for one, two in zip(pairs, again, strict=True)
                    for a, b in zip(one, two, strict=True)
                )
                module.noted = [noted for pair in pairs for noted in pair]
            for at, noted in enumerate(module.noted):
                microbatch = engine.place.data * microbatches + at // 2
                for sample in range(SAMPLES):
                    found[Which(step, microbatch, block, at % 2, sample)] = noted[sample].flatten()
            module.noted.clear()
    engine.evaluate(batch)
    assert all(bool(noted.all()) for module in model for noted in module.noted)  # type: ignore[union-attr]
    engine.close()
    return found


def masks_of_all(mesh: MeshShape, **options: Any) -> dict[Which, Tensor]:
    """Those of all ranks together."""
    found: dict[Which, Tensor] = {}
    for own in run_ranks(masks, mesh.world, mesh, **options):
        assert not found.keys() & own.keys()
        found |= own
    assert len(found) == 2 * 4 * 4 * 2 * SAMPLES
    return found


def furthest_from_independent(given: dict[Which, Tensor]) -> tuple[float, str]:
    """The pair of masks that agree most, or least, beyond chance: in standard deviations, and which they are."""
    names = list(given)
    signs = torch.stack([given[name] for name in names]).double() * 2 - 1
    product = (signs @ signs.T / BITS**0.5).abs().fill_diagonal_(0.0)
    at = int(product.argmax())
    one, other = names[at // len(names)], names[at % len(names)]
    return float(product.max()), f"{one} and {other}"


MESH = MeshShape(pipeline=2, inter=1, intra=2)


def test_masks_of_any_two_steps_microbatches_ranks_blocks_and_samples_are_independent() -> None:
    """Each of 128 masks against each other: by chance one in 500 million pairs is so far off."""
    found = masks_of_all(MESH)
    worst, which = furthest_from_independent(found)
    assert worst < SIGMAS, f"{which}: {worst:.1f} standard deviations"
    counts = torch.stack(list(found.values())).sum(dim=1) - BITS / 2
    assert float(counts.abs().max()) < SIGMAS * BITS**0.5 / 2
    total = sum(float(mask.sum()) for mask in found.values())
    assert abs(total - len(found) * BITS / 2) < SIGMAS * (len(found) * BITS) ** 0.5 / 2


def test_positions_of_a_mask_are_independent() -> None:
    """A mask against itself moved by a token, a channel and so on."""
    found = torch.stack(list(masks_of_all(MESH).values())).double() * 2 - 1
    for shift in (1, 2, WIDTH - 1, WIDTH, WIDTH + 1, 8 * WIDTH, BITS // 2):
        moved = (found * found.roll(shift, dims=1)).sum(dim=1) / BITS**0.5
        assert float(moved.abs().max()) < SIGMAS * (2**0.5 if shift == BITS // 2 else 1), shift
        assert abs(float(moved.mean())) < SIGMAS / len(moved) ** 0.5 * 2, shift


def test_another_seed_gives_other_masks() -> None:
    one, other = (masks_of_all(MeshShape(), seed=seed) for seed in (3, 4))
    both = {**one, **{name._replace(step=name.step + 2): mask for name, mask in other.items()}}
    worst, which = furthest_from_independent(both)
    assert worst < SIGMAS, which


def test_the_masks_do_not_depend_on_mesh_and_recompute() -> None:
    wanted = masks_of_all(MeshShape())
    for found in (masks_of_all(MESH), masks_of_all(MeshShape(intra=2), recompute="block")):
        assert all(torch.equal(found[name], mask) for name, mask in wanted.items())


def test_seeds_of_neighbours_differ() -> None:
    """Also where the same digits are cut in other places: step 1, microbatch 11 against step 11, microbatch 1."""
    seeds = {
        block_seed(seed, step, microbatch, block)
        for seed in (0, 1, 11)
        for step in (*range(12), 111)
        for microbatch in (*range(12), 111)
        for block in (*range(12), 111)
    }
    assert len(seeds) == 3 * 13**3
    assert all(0 <= seed < 1 << 63 for seed in seeds)


# ---- heads of their own


def numbers(count: int = 4) -> list[float]:
    return torch.rand(count).tolist()


@pytest.fixture
def common() -> Iterator[list[float]]:
    """Seeds the shared generator, and gives its first numbers: eight."""
    with torch.random.fork_rng(devices=[]):
        seed_block(0, 1, 2, 3)
        yield numbers(8)
        draw_alike()


def test_ranks_draw_apart_in_a_region_and_alike_around_it(common: list[float]) -> None:
    """What all draw after it is what they would have drawn without it, however much each has drawn."""
    apart = []
    for rank in range(3):
        seed_block(0, 1, 2, 3)
        assert numbers() == common[:4]
        draw_apart(rank, "attention")
        apart.append(numbers(4 + rank)[:4])
        draw_alike()
        assert numbers() == common[4:]
    assert len({value for each in [*apart, common] for value in each}) == 3 * 4 + 8


def test_a_region_depends_on_where_it_is_and_not_on_the_time(common: list[float]) -> None:
    """A forward that is run again from its random state draws the same; another place or another state does not."""

    def region(name: str, *, before: int = 0) -> tuple[float, ...]:
        seed_block(0, 1, 2, 3)
        numbers(before)
        draw_apart(1, name)
        found = numbers()
        draw_alike()
        return tuple(found)

    first = region("attention")
    assert region("attention") == first
    assert len({first, region("feed_forward"), region("attention", before=1)}) == 3


def test_a_region_in_a_region_is_the_outer_one(common: list[float]) -> None:
    seed_block(0, 1, 2, 3)
    draw_apart(0, "attention")
    whole = numbers(8)
    draw_alike()
    seed_block(0, 1, 2, 3)
    draw_apart(0, "attention")
    first = numbers()
    draw_apart(0, "heads")
    assert first + numbers() == whole


def test_no_region_is_open_before_the_first_and_after_a_new_seed(common: list[float]) -> None:
    """A block that raised in its region has not ended it: the seed of the next block does."""
    seed_block(0, 1, 2, 3)
    draw_alike()
    assert numbers() == common[:4]
    draw_apart(0, "attention")
    seed_block(0, 1, 2, 3)
    assert numbers() == common[:4]
    draw_alike()
    assert numbers() == common[4:]
