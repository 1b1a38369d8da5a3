"""Divided sequences on one device: ranks that exchange heads for positions through the host, slices of sequences, and
the loss in chunks."""

from __future__ import annotations

from atoll.testing.parity import Case
from benchmarks.gpu.stage import Run
from benchmarks.gpu.stages.experts import keep_cases

CASES = (
    Case("GGG", intra=2, sequence=2),
    Case("NNG", pipeline=2, intra=2, sequence=2, schedule="zb-h1"),
    Case("IIG", inter=2, intra=2, sequence=2, expert=2, recompute="block"),
    Case("NNG", pipeline=2, slices=4, schedule="zb-v"),
    Case("IIG", pipeline=2, intra=2, sequence=2, slices=2, recompute="selective", loss_chunks=3),
    Case("GGG", tensor=2, loss_chunks=4, schedule="1f1b"),
)


def run(run: Run) -> None:
    """Cases one after the other."""
    keep_cases(run, CASES)
