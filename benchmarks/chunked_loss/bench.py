"""The loss in chunks of tokens: seconds and memory of a step beside all logits at once, and beside torch's own chunks.

One process trains a decoder whose logits are most of its memory. Everything is computed, on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from atoll.plans import schedules
from atoll.plans.layouts import Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from benchmarks.islands import allocations, race, tables
from benchmarks.islands.contenders import Contender
from benchmarks.islands.race import SAME_LOSS, Row
from benchmarks.islands.ranks import Ranks, Where
from benchmarks.islands.work import BYTES, Batch
from benchmarks.sequence.contenders import Gradients, Trained
from benchmarks.sequence.race import difference, gradients
from benchmarks.sequence.work import Rows

WORK = Rows(vocabulary=32_768, tokens=2048)
SMALL = Rows(hidden=64, ffn=128, vocabulary=512, tokens=256)
CHUNKS = (1, 4, 16, 64)
ROUNDS = 7
TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Chunked:
    """Atoll with a loss in chunks."""

    chunks: int

    @property
    def name(self) -> str:
        return f"Atoll, {_words(self.chunks)}"

    def build(self, work: Rows, **_: int) -> Contender:
        schedule = schedules.build("1f1b", ranks=1, microbatches=1)
        precision = Precision.preset("fp32")
        plan = Plan(MeshShape(), Layout("NNN"), schedule, 1, precision=precision, loss_chunks=self.chunks)
        engine = Engine(work.model(), plan, optimizer=work.optimizer, seed=work.seed, device="cpu")

        def first(batch: Batch) -> Gradients:
            found: Gradients = {}
            engine.step(batch, before_update=lambda: found.update(engine.full_gradients()))
            return found

        return Trained(lambda batch: engine.step(batch).loss, sees_all=True, close=engine.close, gradients=first)


@dataclass(frozen=True, slots=True)
class Torch:
    """A loop of plain torch. chunks: of `F.linear_cross_entropy`; 1 for `F.cross_entropy` of all logits."""

    chunks: int

    @property
    def name(self) -> str:
        return f"torch, {_words(self.chunks)}"

    def build(self, work: Rows, **_: int) -> Contender:
        model = work.model()
        optimizer = work.optimizer(model.parameters())
        loss_of: Callable[[Any, Batch], Tensor] = work.loss if self.chunks == 1 else self._chunked

        def backward(batch: Batch) -> float:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, batch)
            loss.backward()
            return float(loss.detach())

        def first(batch: Batch) -> Gradients:
            backward(batch)
            return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}

        def step(batch: Batch) -> float:
            loss = backward(batch)
            optimizer.step()
            return loss

        return Trained(step, gradients=first)

    def _chunked(self, model: Any, batch: Batch) -> Tensor:
        hidden = model.embed(batch["input_ids"])
        for layer in model.layers:
            hidden = layer(hidden, None)
        flat, labels = model.head.norm(hidden).flatten(0, 1), batch["labels"].flatten()
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=-(-len(labels) // self.chunks))
        return F.linear_cross_entropy(flat, model.head.output.weight, labels, options=options)


Setting = Chunked | Torch


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everyone."""
    work, chunks = (SMALL, CHUNKS[:2]) if arguments.quick else (WORK, CHUNKS)
    settings = [each(count) for count in chunks for each in (Chunked, Torch)]
    with allocations.library() as preload:
        rows = _race(work, settings, rounds=2 if arguments.quick else ROUNDS, preload=preload)
    return {"work": work.to_json(), "rows": rows}


def _race(work: Rows, settings: Sequence[Setting], *, rounds: int, preload: Path | None) -> list[dict[str, Any]]:
    """Compare the gradients of each with those of torch's whole loss, and let all take timed steps in turns."""
    apart, rows = list[float](), list[Row]()
    with Ranks(Where(1, 1), work, preload=preload) as ranks:
        wanted = ranks.ask(gradients, Torch(1), timeout=TIMEOUT)[0]
        for setting in settings:
            apart.append(ranks.ask(difference, setting, wanted, timeout=TIMEOUT)[0])
            if not apart[-1] <= SAME_LOSS:
                raise RuntimeError(f"{setting.name}: gradients differ by {apart[-1]:.2g}")
            row = Row(setting)
            ranks.ask(race.open_contender, setting, timeout=TIMEOUT)
            row.remember([memory for _, memory in ranks.ask(race.step, setting.name, 1, timeout=TIMEOUT)])
            rows.append(row)
        for at in range(rounds):
            turn = at % len(rows)
            for row in (*rows[turn:], *rows[:turn]):
                row.add([seen for seen, _ in ranks.ask(race.step, row.name, at + 2, timeout=TIMEOUT)], 1)
                print(f"{row.name}: {row.seconds[-1]:.2f} s", flush=True)
    return [_to_json(*both) for both in zip(rows, apart, strict=True)]


def _to_json(row: Row, apart: float) -> dict[str, Any]:
    setting: Setting = row.setting
    return {
        "name": row.name,
        "is_ours": isinstance(setting, Chunked),
        "chunks": setting.chunks,
        "seconds": [round(value, 4) for value in row.seconds],
        "peak_bytes": row.peak_bytes,
        "rest_bytes": row.rest_bytes,
        "gradient_difference": apart,
    }


def _words(chunks: int) -> str:
    return "all logits" if chunks == 1 else f"{chunks} chunks"


def row_of(rows: Sequence[Mapping[str, Any]], chunks: int, *, ours: bool) -> Mapping[str, Any]:
    """Return the row of Atoll or of torch with so many chunks."""
    return next(row for row in rows if (row["chunks"], row["is_ours"]) == (chunks, ours))


def over(row: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return how many times as long a step takes: the median over rounds of ratios inside a round."""
    return median(a / b for a, b in zip(row["seconds"], other["seconds"], strict=True))


# ---- the page


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    work, rows = result["work"], result["rows"]
    logits = work["tokens"] * work["vocabulary"] * BYTES
    parts = [
        "# The loss in chunks",
        "Written by `python benchmarks/run.py chunked_loss`. Everything is computed, on a CPU. Trust ratios, not "
        "seconds.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        _SET_UP.format(**work, rounds=len(rows[0]["seconds"]), megabytes=logits / 1e6),
        "\n".join([_HEAD, *(_line(row, rows) for row in rows)]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _line(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    whole, same = row_of(rows, 1, ours=row["is_ours"]), row_of(rows, row["chunks"], ours=False)
    cells = [f"**{row['name']}**" if row["is_ours"] else row["name"], f"{median(row['seconds']):.3f}"]
    cells += [f"{over(row, whole):.2f}", f"{over(row, same):.2f}" if row["is_ours"] else ""]
    cells += ["" if row[key] is None else f"{row[key] / 1e6:.0f}" for key in ("peak_bytes", "rest_bytes")]
    cells.append(f"{row['gradient_difference']:.1e}")
    return f"| {' | '.join(cells)} |"


_HEAD = """\
| way | median s | times its whole loss | times torch's as many chunks | peak MB | at rest MB | gradients differ by |
|---|--:|--:|--:|--:|--:|--:|"""

_SET_UP = """\
A decoder of {layers} layers with hidden {hidden}, {parameters:,} parameters in fp32; a step trains on one row of \
{tokens:,} tokens, whose logits of {vocabulary:,} ids take {megabytes:.0f} MB: forward, backward, fused AdamW. \
Contenders live beside each other in one process of one thread, and take {rounds} steps each, in turns.

- **Atoll**: `Plan(loss_chunks=n)`; with *all logits* the loss is the adapter's.
- **torch**: a loop with `F.cross_entropy` of *all logits*, or with `F.linear_cross_entropy` on the output of the last \
norm, whose options have as many chunks. It computes gradients in the forward; Atoll computes the loss in the backward.

Below 1 a step is faster: the median over rounds of the ratio inside a round. Peak memory is counted by the C \
library's allocator. The gradients of the first step are compared with those of torch's whole loss, relative to the \
largest element of each."""
