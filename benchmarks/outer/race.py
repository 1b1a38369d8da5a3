"""What ranks do: build engines that stay, and train a number of steps with one of them."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, replace

import torch.distributed as dist

from atoll.base.errors import CostWarning
from atoll.plans.outer import Outer
from atoll.runtime.engine import Engine
from benchmarks.islands.contenders import Atoll
from benchmarks.islands.network import INTERFACE, bytes_sent
from benchmarks.islands.ranks import Rank


@dataclass(frozen=True, slots=True)
class Seen:
    """Steps of one rank.

    start, end: of the machine's monotonic clock; the end is when everything that has left an island has arrived.
    crossed: bytes that the rank's island sent over the link, headers included, where it reads the counter.
    counted: bytes between islands that the engine has counted.  losses: of the island.
    """

    start: float
    end: float
    crossed: int
    counted: int
    losses: tuple[float, ...]


def begin(rank: Rank, name: str, layout: str, outer: Outer | None) -> None:
    """Build an engine and take its first step."""
    plan = replace(Atoll(layout).plan(rank.work, inter=rank.inter, intra=rank.intra), outer=outer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CostWarning)
        engine = Engine(rank.work.model(), plan, optimizer=rank.work.optimizer, seed=rank.work.seed, device="cpu")
    rank.contenders[name] = engine
    engine.step(rank.work.batch(0, rank.number))
    dist.barrier()


def end(rank: Rank, name: str) -> None:
    """Let an engine go."""
    rank.contenders.pop(name).close()
    dist.barrier()


def take(rank: Rank, name: str, steps: int) -> Seen:
    """Train, until what has left has arrived."""
    engine: Engine = rank.contenders[name]
    first = engine.step_number
    batch = rank.work.batch(first, rank.number)
    dist.barrier()
    link, counted = bytes_sent(INTERFACE), engine.transport.sent["inter"]
    dist.barrier()
    losses = []
    start = time.monotonic()
    for at in range(first, first + steps):
        following = rank.work.batch(at + 1, rank.number) if at + 1 < first + steps else None
        result = engine.submit(batch, following)
        batch = following
        if result is not None:
            losses.append(result.loss)
    if (last := engine.settle()) is not None:
        losses.append(last.loss)
    if engine.outer is not None:
        engine.outer.settle()
    for unit in engine.units:
        unit.wait_for_parameters()
    finish = time.monotonic()
    dist.barrier()
    link = bytes_sent(INTERFACE) - link if rank.speaks else 0
    return Seen(start, finish, link, engine.transport.sent["inter"] - counted, tuple(losses))
