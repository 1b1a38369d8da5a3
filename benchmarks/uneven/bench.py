"""Uneven models: split, placement and order chosen together, beside interleaved 1F1B. After AdaPtis, arXiv 2509.23722.

Nothing is measured but the seconds of the search: times of layers are in proportion to their operations, and steps are
simulated, without hops. Everything but the seconds is a function of the models below.

    equal     interleaved 1F1B of two chunks, the same number of layers in each stage, as Megatron-LM splits
    even      the same on the split of `atoll.plans.stages`, as even by time as can be
    best      the best schedule of the catalogue on that split, of any placement, built for the costs where it takes any
    within    the joint search in no more memory than `equal` keeps on its fullest rank; else memory is not limited
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import mean, median
from typing import Any

from atoll.base.errors import AtollError
from atoll.plans.ir import Placement
from atoll.plans.schedules import CATALOGUE, Memory, build
from atoll.plans.stages import BlockWeight, split_blocks
from atoll.prediction.joint import Layer, split_and_order
from atoll.program.sim import Costs, simulate
from benchmarks.islands import tables

SEARCHED = ("auto", "zb-1p", "zb-2p")


@dataclass(frozen=True)
class Model:
    """Layers between an embedding and a head. A layer of matrices alone is 1 in each of F, I and W."""

    name: str
    layers: tuple[Layer, ...]
    head: float

    @property
    def all(self) -> list[Layer]:
        return [Layer(0.01, 0.0, 0.02, 0.0, 0.0), *self.layers, Layer(self.head, self.head, self.head)]


def block(matrices: float = 1.0, attention: float = 0.0) -> Layer:
    """Attention's scores have no weights: their backward is two forwards long, all of it I."""
    return Layer(matrices + attention, matrices + 2 * attention, matrices)


def head(width: int, vocabulary: int, sequence: int) -> float:
    """Return the cost of the output projection in layers: 2hV operations a token, where a layer has 24h^2 + 4sh."""
    return vocabulary / (12 * width + 2 * sequence)


SPARSE, STATE, PERCEPTRON = block(1.7, 0.15), block(0.7), block(1.2)
"""A block with experts beside a dense one; a state-space mixer; an MLP on its own."""

MODELS = (
    Model("26 layers, hidden 2304, vocabulary 256,000", (block(1.0, 0.15),) * 26, head(2304, 256_000, 4096)),
    Model("32 layers, hidden 4096, vocabulary 128,256", (block(1.0, 0.15),) * 32, head(4096, 128_256, 8192)),
    Model("80 layers, hidden 8192, vocabulary 128,256", (block(1.0, 0.1),) * 80, head(8192, 128_256, 8192)),
    Model("3 dense and 58 sparse blocks", (*(block(1.0, 0.15),) * 3, *(SPARSE,) * 58), 1.5),
    Model("every second block sparse, 48 layers", (block(1.0, 0.15), SPARSE) * 24, 2.5),
    Model("18 dense and 18 sparse blocks", (*(block(1.0, 0.15),) * 18, *(SPARSE,) * 18), 2.0),
    Model(
        "state space, MLP and an attention in eight, 56 layers",
        (STATE, PERCEPTRON, STATE, PERCEPTRON, STATE, PERCEPTRON, block(0.4, 0.6), PERCEPTRON) * 7,
        2.0,
    ),
    Model("long sequences in the last quarter, 40 layers", (*(block(1.0, 0.1),) * 30, *(block(1.0, 0.9),) * 10), 1.0),
)
SIZES = ((4, 16), (8, 32))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare every model at each number of ranks."""
    rows = []
    for model in MODELS[:1] if arguments.quick else MODELS:
        for ranks, microbatches in SIZES[:1] if arguments.quick else SIZES:
            rows.append(compared(model, ranks, microbatches))
            print(_line(rows[-1]), flush=True)
    return {"rows": rows}


def compared(model: Model, ranks: int, microbatches: int) -> dict[str, Any]:
    """Compare one model on a number of ranks."""
    layers = model.all
    loop = Placement("loop", ranks, 2)
    interleaved = build("interleaved", ranks=ranks, microbatches=microbatches)
    began = time.process_time()
    found = split_and_order(layers, ranks=ranks, microbatches=microbatches)
    seconds = time.process_time() - began
    equal = _equal(len(layers), loop.stages)
    limit = max(simulate(interleaved, _costs(layers, equal), _memory(layers, equal, loop)).peak_bytes)
    within = split_and_order(layers, ranks=ranks, microbatches=microbatches, limit=limit)
    rivals = dict(_rivals(layers, ranks, microbatches))
    best = min(rivals, key=lambda name: rivals[name])
    return {
        "model": model.name,
        "ranks": ranks,
        "microbatches": microbatches,
        "joint": found.makespan,
        "layers_per_stage": list(found.layers_per_stage),
        "placement": [found.placement.kind, found.placement.chunks],
        "bound_of_split": found.bound,
        "work": microbatches * sum(layer.work for layer in layers) / ranks,
        "within": within.makespan,
        "within_placement": [within.placement.kind, within.placement.chunks],
        "limit": limit,
        "equal": simulate(interleaved, _costs(layers, equal)).makespan,
        "even": simulate(interleaved, _costs(layers, _even(layers, loop))).makespan,
        "best": rivals[best],
        "best_name": best,
        "search_seconds": seconds,
    }


def _rivals(layers: Sequence[Layer], ranks: int, microbatches: int) -> Iterator[tuple[str, float]]:
    """Return the fixed schedules of the catalogue, each on the even split for its placement."""
    for name, entry in CATALOGUE.items():
        if name in SEARCHED:
            continue
        for chunks in (2, 3, 4) if "chunks" in entry.options else (entry.chunks,):
            placement = Placement(entry.placement, ranks, chunks)
            if placement.stages > len(layers):
                continue
            costs = _costs(layers, _even(layers, placement))
            options: dict[str, Any] = {"chunks": chunks} if "chunks" in entry.options else {}
            if "costs" in entry.options and name != "zb-v":
                options["costs"] = costs
            try:
                schedule = build(name, ranks=ranks, microbatches=microbatches, **options)
            except AtollError:  # a size that it does not serve
                continue
            yield f"{name}, {chunks} chunks" if chunks > 1 else name, simulate(schedule, costs).makespan


def _equal(layers: int, stages: int) -> tuple[int, ...]:
    """Give stages equal numbers of layers as nearly as possible; the first has the embedding, the last the head."""
    size, more = divmod(layers - 2, stages)
    counts = [size + (stage < more) for stage in range(stages)]
    counts[0] += 1
    counts[-1] += 1
    return tuple(counts)


def _even(layers: Sequence[Layer], placement: Placement) -> tuple[int, ...]:
    blocks = [BlockWeight(str(at), "layer", layer.work, 0.0) for at, layer in enumerate(layers)]
    return tuple(map(len, split_blocks(blocks, placement)))


def _costs(layers: Sequence[Layer], way: tuple[int, ...]) -> Costs:
    runs = [layers[first:last] for first, last in pairwise(accumulate(way, initial=0))]
    return Costs(
        tuple(sum(each.forward for each in run) for run in runs),
        tuple(sum(each.input_grad for each in run) for run in runs),
        tuple(sum(each.weight_grad for each in run) for run in runs),
    )


def _memory(layers: Sequence[Layer], way: tuple[int, ...], placement: Placement) -> Memory:
    """Count memory as the joint search does: each chunk as a rank's largest. A full backward keeps nothing for W."""
    runs = [layers[first:last] for first, last in pairwise(accumulate(way, initial=0))]
    kept = [sum(layer.activation for layer in run) for run in runs]
    own = [[kept[stage] for stage in placement.stages_of(rank)] for rank in range(placement.ranks)]
    return Memory(activation=tuple(placement.chunks * max(each) for each in own))


def report(result: dict[str, Any]) -> str:
    """Write the page."""
    rows = result["rows"]
    lines = [
        "| model | ranks | microbatches | placement | bubble | equal | even | best of the catalogue | in equal's "
        "memory | search s |",
        "|---|--:|--:|---|--:|--:|--:|---|--:|--:|",
        *map(_line, rows),
    ]
    ratios = {name: [row[name] / row["joint"] for row in rows] for name in ("equal", "even", "best")}
    ratios["within"] = [row["equal"] / row["within"] for row in rows]
    summary = ["| joint search, times as fast as | mean | median | least | most |", "|---|--:|--:|--:|--:|"]
    summary += [
        f"| {_NAMES[name]} | {mean(values):.2f} | {median(values):.2f} | {min(values):.2f} | {max(values):.2f} |"
        for name, values in ratios.items()
    ]
    parts = [
        "# Uneven models",
        "Written by `python benchmarks/run.py uneven`. **Simulated**: layers take times in proportion to their "
        "operations, hops take no time, and memory is not limited unless stated.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        "`split_and_order` chooses the layers of each stage, the placement and the order. *bubble*: its "
        "step time beyond the work, spread evenly over the ranks. The others are relative to its step time: *equal*, "
        "interleaved 1F1B of two chunks with equally many layers in each stage; *even*, the same with layers split "
        "by time; *best*, the best schedule of the catalogue on the even split of its placement. *in equal's "
        "memory*: speed of the search relative to *equal*, limited to the memory of *equal*'s fullest rank, if each "
        "layer keeps equally much and each chunk of a rank counts as its largest one.",
        "\n".join(summary),
        "\n".join(lines),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_NAMES: Mapping[str, str] = {
    "equal": "interleaved 1F1B, as many layers each",
    "even": "interleaved 1F1B, spread by time",
    "best": "the best of the catalogue, spread by time",
    "within": "interleaved 1F1B, as many layers each, in its memory",
}


def _line(row: Mapping[str, Any]) -> str:
    kind, chunks = row["placement"]
    cells = [
        row["model"],
        str(row["ranks"]),
        str(row["microbatches"]),
        kind if chunks == 1 else f"{kind} of {chunks}",
        f"{row['joint'] / row['work'] - 1:.1%}",
        f"{row['equal'] / row['joint']:.2f}",
        f"{row['even'] / row['joint']:.2f}",
        f"{row['best'] / row['joint']:.2f} ({row['best_name']})",
        f"{row['equal'] / row['within']:.2f}",
        f"{row['search_seconds']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"
