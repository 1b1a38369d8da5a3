"""Whole weights from a sharded model: `engine.stream` beside FSDP2's `full_state_dict`, in seconds and memory, and what
has changed after a step beside everything.

Two ranks train the same decoder, sharded, with each system; everything is computed, on CPUs. Then the ranks give their
weights to this process, which is of no torch.distributed world.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.changes import HeldWeights
from atoll.runtime.engine import Engine
from atoll.runtime.handover import give, take, weight_group
from atoll.runtime.rendezvous import LOOPBACK, host_store
from benchmarks.islands import allocations, tables
from benchmarks.islands.allocations import Allocations
from benchmarks.islands.ranks import Rank, Ranks, Where
from benchmarks.islands.work import Text

WORK = Text(samples=2, layers=8, hidden=512, heads=8, ffn=1408, vocabulary=8192, tokens=64, lr=1e-5)
SMALL = Text(samples=2, layers=4, hidden=64, heads=4, ffn=128, vocabulary=512, tokens=32, lr=1e-5)
RANKS, ROUNDS, STEPS = 2, 15, 5
BUCKET = 8 * 2**20
TIMEOUT = 600.0
LIMIT = timedelta(seconds=TIMEOUT)

WAYS = {
    "atoll-all": "`engine.stream()`: every rank keeps all tensors",
    "fsdp2-all": "`full_state_dict`: every rank has all tensors",
    "atoll-one": "`engine.stream(to=0)`: the first rank keeps all tensors",
    "fsdp2-one": "`full_state_dict`, `cpu_offload`: the first rank has all tensors",
    "atoll-walk": "`engine.stream(to=0)`: each tensor is dropped before the next one",
}
PEER = {"atoll-all": "fsdp2-all", "atoll-one": "fsdp2-one", "atoll-walk": "fsdp2-one"}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all of it."""
    work, rounds, steps = (SMALL, 3, 2) if arguments.quick else (WORK, ROUNDS, STEPS)
    with allocations.library() as preload:
        with Ranks(Where(1, RANKS), work, preload=preload) as ranks:
            ranks.ask(open_both, timeout=TIMEOUT)
            rows = _race(ranks, tuple(WAYS), rounds)
            changes = _changes(ranks, steps)
        with Ranks(Where(1, 1, pipeline=RANKS), work, preload=preload) as ranks:
            held = ranks.ask(open_atoll, RANKS, timeout=TIMEOUT)
            (walk,) = _race(ranks, ("atoll-walk",), rounds)
    return {
        "work": work.to_json(),
        "rows": rows,
        "changes": changes,
        "pipeline": {**walk, "bucket_bytes": BUCKET, "unit_bytes": max(held)},
    }


def _race(ranks: Ranks, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Let all ways take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, list[int | None]] = {name: [] for name in names}
    sizes: dict[str, int] = {}
    for at in range(-1, rounds):  # what is loaded once does not count
        turn = at % len(names)
        for name in (*names[turn:], *names[:turn]):
            seen = ranks.ask(collect, name, timeout=TIMEOUT)
            sizes[name] = max(nbytes for _, nbytes, _ in seen)
            if at >= 0:
                seconds[name].append(max(took for took, _, _ in seen))
                peaks[name].append(max((peak for _, _, peak in seen if peak is not None), default=None))
    if len(set(sizes.values())) != 1:
        raise RuntimeError(f"ways do not yield the same bytes: {sizes}")
    return [
        {
            "name": name,
            "seconds": [round(each, 5) for each in seconds[name]],
            "peak_bytes": None if None in peaks[name] else max(each for each in peaks[name] if each is not None),
            "nbytes": sizes[name],
        }
        for name in names
    ]


def _changes(ranks: Ranks, steps: int) -> list[dict[str, Any]]:
    """Give everything, and what has changed, after each of some steps, to this process."""
    store = host_store(LOOPBACK, 0)
    rows = []
    with ThreadPoolExecutor(1) as thread:
        begun = thread.submit(ranks.ask, meet, store.port, timeout=TIMEOUT)
        group = weight_group(store, 1, 2, timeout=LIMIT)
        begun.result()
        held = HeldWeights()
        for step in range(-1, steps):
            ranks.ask(take_step, timeout=TIMEOUT)
            row: dict[str, Any] = {}
            for name, own in (("everything", None), ("changed", held)):
                given = thread.submit(ranks.ask, pass_on, own is not None, timeout=TIMEOUT)
                begin = time.perf_counter()
                found = {each.name: each.tensor for each in take(group, held=own)}
                row[name] = {"seconds": round(time.perf_counter() - begin, 5), "bytes": max(given.result())}
                if own is None:
                    whole = found
            if not all(torch.equal(held.weights[name], tensor) for name, tensor in whole.items()):
                raise RuntimeError("what is held differs from what is streamed")
            if step >= 0:  # before, nothing was held
                rows.append(row)
    return rows


# ---- on the ranks


def open_both(rank: Rank) -> None:
    """Build the model of each system, and take a step with each."""
    open_atoll(rank)
    from torch.distributed.fsdp import fully_shard

    model = rank.work.model()
    for unit in rank.work.units(model):
        fully_shard(unit)
    fully_shard(model)
    optimizer = rank.work.optimizer(model.parameters())
    rank.work.loss(model, rank.work.batch(0, rank.number)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    rank.contenders["fsdp2"] = model


def open_atoll(rank: Rank, pipeline: int = 1) -> int:
    """Build an engine, and take a step. Return the bytes of its largest unit."""
    microbatches = rank.work.samples * (rank.world if pipeline > 1 else 1)
    schedule = schedules.build("1f1b", ranks=pipeline, microbatches=microbatches)
    mesh = MeshShape(pipeline=pipeline, intra=rank.world // pipeline)
    plan = Plan(mesh, Layout("III"), schedule, 1, precision=Precision.preset("fp32"))
    engine = Engine(rank.work.model(), plan, optimizer=rank.work.optimizer, seed=rank.work.seed, device="cpu")
    rank.contenders["atoll"] = engine
    take_step(rank)
    return max(sum(p.numel() * p.itemsize for p in unit.parameters.values()) for unit in engine.units)


def take_step(rank: Rank) -> None:
    """Train on a batch."""
    engine: Engine = rank.contenders["atoll"]
    batches = [rank.work.batch(engine.step_number, rank.number)]
    if engine.plan.mesh.pipeline > 1:  # all ranks read the same
        batches = [rank.work.batch(engine.step_number, at) for at in range(rank.world)]
    engine.step({key: torch.cat([batch[key] for batch in batches]) for key in batches[0]})


def collect(rank: Rank, name: str) -> tuple[float, int, int | None]:
    """Return the seconds in which all ranks have what they ask for, its bytes on this one, and the bytes that were
    allocated at most beyond those before."""
    counted = Allocations()
    dist.barrier()
    counted.forget()
    before, begin = counted.out(), time.perf_counter()
    nbytes = _COLLECT[name](rank)
    took, most = time.perf_counter() - begin, counted.most()
    dist.barrier()
    return took, nbytes, None if before is None or most is None else most - before


def _streamed(rank: Rank, **options: Any) -> int:
    found = list(rank.contenders["atoll"].stream(**options))
    return sum(each.tensor.nbytes for each in found)


def _walked(rank: Rank) -> int:
    total = 0
    for each in rank.contenders["atoll"].stream(to=0, bucket=BUCKET):
        total += each.tensor.nbytes
        del each  # a loop would hold its tensor, and so its bucket, until the next one is there
    return total


def _gathered(rank: Rank, **options: Any) -> int:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    found = get_model_state_dict(rank.contenders["fsdp2"], options=StateDictOptions(full_state_dict=True, **options))
    return sum(tensor.nbytes for tensor in found.values())


_COLLECT: Mapping[str, Callable[[Rank], int]] = {
    "atoll-all": _streamed,
    "fsdp2-all": _gathered,
    "atoll-one": lambda rank: _streamed(rank, to=0),
    "fsdp2-one": lambda rank: _gathered(rank, cpu_offload=True),
    "atoll-walk": _walked,
}


def meet(rank: Rank, port: int) -> None:
    """Have the first rank meet the process that takes weights."""
    if rank.number == 0:
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=LIMIT)
        rank.contenders["group"] = weight_group(store, 0, 2, timeout=LIMIT)
        rank.contenders["held"] = HeldWeights()


def pass_on(rank: Rank, changed: bool) -> int:
    """Give all weights in bf16, or what has changed of them. Return the bytes that were given."""
    stream = rank.contenders["atoll"].stream(to=0, dtype=torch.bfloat16)
    if rank.number:
        deque(stream, maxlen=0)
        return 0
    return give(stream, rank.contenders["group"], held=rank.contenders["held"] if changed else None)


# ---- the page


def times(row: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return how many times as long it takes: the median over rounds of ratios inside a round."""
    return median(a / b for a, b in zip(row["seconds"], other["seconds"], strict=True))


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    rows, work = {row["name"]: row for row in result["rows"]}, result["work"]
    walk, changes = result["pipeline"], result["changes"]
    lines = [_HEAD]
    for name, words in WAYS.items():
        row = rows[name]
        ratio = f"{times(row, rows[PEER[name]]):.2f}" if name in PEER else ""
        lines.append(f"| {words} | {median(row['seconds']):.3f} | {ratio} | {_megabytes(row['peak_bytes'])} |")
    everything, changed = ([each[key] for each in changes] for key in ("everything", "changed"))
    given = [f"{median(each['bytes'] for each in of) / 1e6:.1f}" for of in (everything, changed)]
    took = [f"{median(each['seconds'] for each in of):.3f}" for of in (everything, changed)]
    parts = [
        "# Weights to inference",
        "Written by `python benchmarks/run.py stream`. Everything is computed, on CPUs. Trust ratios, not seconds.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        _SET_UP.format(**work, rounds=len(rows["atoll-all"]["seconds"]), ranks=RANKS),
        "\n".join(lines),
        _PIPELINE.format(
            ranks=RANKS,
            seconds=median(walk["seconds"]),
            peak=_megabytes(walk["peak_bytes"]),
            bucket=walk["bucket_bytes"] / 1e6,
            unit=walk["unit_bytes"] / 1e6,
        ),
        _CHANGES.format(steps=len(changes), lr=work["lr"]),
        "\n".join(
            [
                "| what travels | MB | seconds |",
                "|---|--:|--:|",
                f"| everything | {given[0]} | {took[0]} |",
                f"| what has changed | {given[1]} | {took[1]} |",
            ]
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _megabytes(nbytes: int | None) -> str:
    return "not measured" if nbytes is None else f"{nbytes / 1e6:.0f}"


_HEAD = """\
| way | median s | times FSDP2 | most MB allocated |
|---|--:|--:|--:|"""

_SET_UP = """\
A decoder of {layers} layers with hidden {hidden}, {parameters:,} parameters in fp32, sharded over {ranks} ranks of \
one thread: by Atoll with layout III, by torch with `fully_shard` on each block and the whole. Both live in the same \
processes and take {rounds} turns each. Below 1 Atoll is faster: the median over turns of the ratio inside a turn, of \
the slower rank. Memory is the most that a rank has allocated meanwhile beyond what it had before, by the C library's \
allocator: without shared memory, in which Atoll's shards are read."""

_PIPELINE = """\
The same decoder in a pipeline of {ranks} stages, of which FSDP2 has none, streamed to the first rank with buckets of \
{bucket:.0f} MB, each tensor dropped before the next one: {seconds:.3f} s, and at most {peak} MB more than before on \
any rank. The largest unit has {unit:.0f} MB; it is one tensor, and so a bucket of its own."""

_CHANGES = """\
## What has changed

Weights in bf16 for a process of no world, after each of {steps} steps of AdamW with a learning rate of {lr:g} on fp32 \
masters: everything, or what has changed since the step before. Medians; the link is the machine's own loopback, on \
which bytes cost little. The changes are found in host memory, and both sides hold the weights there."""
