"""Functions that the ranks run: build the engine of a configuration, take steps, count bytes, close it."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from atoll.program.memory import Held
from atoll.runtime.engine import Engine
from atoll.runtime.models.mixture import Router, Routing
from atoll.training.setup.build import build_engine, build_model
from atoll.training.setup.prediction import expected_vocabulary
from benchmarks.emulated.race import go_first
from benchmarks.islands.allocations import Allocations
from benchmarks.islands.ranks import Rank
from benchmarks.predictions.instructions import Count, Sleep, Slept, watched
from benchmarks.predictions.rows import Row


@dataclass(frozen=True, slots=True)
class Running:
    """An engine, the batch of its steps, and the bytes that the allocator had given out before it was built."""

    engine: Engine
    batch: dict[str, torch.Tensor]
    base: int


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of a rank in a step: all components at the peak, and the largest value of each."""

    peak: Held
    most: Held


def go_before_others(rank: Rank) -> bool:
    """Run before the machine's other work, where that is permitted."""
    return go_first()


def build(rank: Rank, row: Row) -> bool:
    """Build the engine and take two steps, which make the optimizer's state and the room for messages. All ranks call
    it. Return whether ranks read each other's memory."""
    gc.collect()
    config, plan = row.config, row.plan
    vocabulary = expected_vocabulary(config)
    generator = torch.Generator().manual_seed(plan.mesh.place(rank.number).share)
    shape = plan.global_batch // plan.mesh.shares, config.data.sequence + 1
    ids = torch.randint(vocabulary, shape, generator=generator)
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    base = Allocations().out() or 0
    model = build_model(config, vocabulary)
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(_spread_evenly)
    engine = build_engine(model, plan, config, torch.device("cpu"))
    rank.contenders["engine"] = Running(engine, batch, base)
    for _ in range(2):
        engine.step(batch)
    return engine.reads_in_place


def _spread_evenly(router: torch.nn.Module, given: Any, made: Routing) -> Routing:
    """Give every expert as many tokens as the others: predictions say what that takes."""
    tokens, k = made.top_k_index.shape
    even = torch.arange(tokens * k, device=made.top_k_index.device).view(tokens, k) % made.scores.shape[-1]
    return made._replace(top_k_index=even)


def count(rank: Rank) -> Bytes:
    """All ranks: a step whose bytes are counted."""
    running: Running = rank.contenders["engine"]
    gc.collect()
    counted = Count(running.engine, running.base)
    with watched(running.engine, counted):
        running.engine.step(running.batch)
    return Bytes(counted.held, counted.most)


def take(rank: Rank, steps: int, sleeps: Sequence[Sequence[Slept]] = ()) -> list[float]:
    """All ranks: seconds of steps that follow each other.

    sleeps: what instructions take on the emulated device, by pipeline rank and slice; () where they take what they
    take.
    """
    running: Running = rank.contenders["engine"]
    engine = running.engine
    gc.collect()
    gc.freeze()  # to look through what other engines have made takes a tenth of a second
    dist.barrier()
    ends = []
    with watched(engine, Sleep(sleeps[engine.place.pp], engine)) if sleeps else nullcontext():
        for _ in range(steps + 1):
            engine.step(running.batch)
            ends.append(time.monotonic())
    gc.unfreeze()
    return [after - before for before, after in pairwise(ends)]


def copied(rank: Rank, folder: str) -> int:
    """All ranks: bytes that the engine copies to save in the background."""
    running: Running = rank.contenders["engine"]
    running.engine.save(folder, background=True)
    running.engine.finish_saving()
    return running.engine.saving.nbytes


def close(rank: Rank) -> None:
    """Close the engine and free it."""
    rank.contenders.pop("engine").engine.close()
    gc.collect()
