"""Long rows that ranks divide: Atoll's exchange of heads for positions, torch's ring and DeepSpeed's exchange.

Everything is computed, on the CPUs of one machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.islands import allocations, tables
from benchmarks.islands.work import BYTES
from benchmarks.sequence.race import run_race
from benchmarks.sequence.work import Rows

RANKS = (1, 2, 4)
ROUNDS = 7
SMALL = Rows(hidden=64, ffn=128, vocabulary=256, tokens=1024)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everyone on every number of ranks."""
    work = SMALL if arguments.quick else Rows()
    with allocations.library() as preload:
        rows = run_race(work, RANKS, rounds=2 if arguments.quick else ROUNDS, preload=preload)
    for row in rows:
        print(_line(row), flush=True)
    return {"work": work.to_json(), "rows": rows}


# ---- the page


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    work, rows = result["work"], result["rows"]
    parts = [
        "# Long rows that ranks divide",
        "Written by `python benchmarks/run.py sequence`. Everything is computed, on the CPUs of one machine; messages "
        "are copies in its memory. Trust ratios, not seconds.",
        tables.measured_in(result["environment"]) if "environment" in result else "",
        _SET_UP.format(**work, rounds=len(rows[0]["seconds"])),
        "\n".join([_HEAD, *map(_line, rows)]),
        "## Atoll beside its peers",
        "Above 1 Atoll is faster: the median over rounds of the ratio of both steps of a round. *Processor time* is "
        "the peer's over Atoll's, of all ranks, which other work on the machine disturbs less. A share of the peak "
        "below 1 holds less.",
        "\n".join([_BESIDE, *(_beside(*pair) for pair in pairs(rows))]),
        _DENIED.format(megabytes=work["parameters"] * BYTES / 1e6),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def pairs(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Atoll's fastest way of as many ranks, and each peer."""
    found = []
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        own = [row for row in rows if row["ranks"] == ranks]
        ours = [row for row in own if row["is_ours"]]
        if ours:
            best = min(ours, key=lambda row: float(row["median_seconds"]))
            found += [(best, row) for row in own if not row["is_ours"]]
    return found


def times_as_fast(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> float:
    """How many times as fast Atoll is: the median over rounds of ratios inside a round."""
    return median(b / a for a, b in zip(ours["seconds"], peer["seconds"], strict=True))


_HEAD = """\
| ranks | way | median s | fastest s | cpu s, all ranks | peak MB a rank | at rest MB | MB on the loopback | gradients \
differ by | loss by |
|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|"""

_BESIDE = """\
| ranks | Atoll | peer | times as fast | processor time | share of the peak |
|--:|---|---|--:|--:|--:|"""


def _line(row: Mapping[str, Any]) -> str:
    cells = [str(row["ranks"]), f"**{row['name']}**" if row["is_ours"] else row["name"]]
    cells += [f"{row['median_seconds']:.3f}", f"{min(row['seconds']):.3f}", f"{median(row['cpu_seconds']):.2f}"]
    cells += ["" if row[key] is None else f"{row[key] / 1e6:.1f}" for key in ("peak_bytes", "rest_bytes")]
    cells += [f"{row['loopback_bytes'] / 1e6:.1f}"]
    cells += [f"{row[key]:.1e}" if row["ranks"] > 1 else "" for key in ("gradient_difference", "loss_difference")]
    return f"| {' | '.join(cells)} |"


def _beside(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    share = "" if None in (ours["peak_bytes"], peer["peak_bytes"]) else ours["peak_bytes"] / peer["peak_bytes"]
    cells = [str(ours["ranks"]), ours["name"], peer["name"], f"{times_as_fast(ours, peer):.2f}"]
    cells += [f"{median(peer['cpu_seconds']) / median(ours['cpu_seconds']):.2f}", share and f"{share:.2f}"]
    return f"| {' | '.join(cells)} |"


_SET_UP = """\
A decoder of {layers} layers with {heads} heads, hidden {hidden}, {parameters:,} parameters in fp32; a step trains on \
one row of {tokens:,} tokens with causal attention: forward, backward, the average of gradients, fused AdamW. All \
ranks divide the row. Contenders live beside each other and take {rounds} steps each, in turns; each step begins at \
the same moment on all ranks and ends with the last. All ranks compute with one thread, have the same allocator \
thresholds, and call the same attention kernel. The first rows are plain torch in one process.

- **Atoll**: `MeshShape(sequence=ranks)`, layout NNN. Ranks exchange heads for positions around attention, and read \
them in place where the memory that they share, which is sized for parameters and gradients, has room; otherwise, and \
always with *messages only*, they send them. The loopback's bytes tell which. With the *loss in chunks* its logits \
are not all there at once; the peers compute all of theirs.
- **torch context_parallel**: the ring that torchtitan, Accelerate and trl use, here under DDP. Positions are \
divided head-tail, which balances causal attention. *allgather* is its default, and sends all keys and values at once \
behind the first block; *alltoall* sends them from rank to rank.
- **DeepSpeed DistributedAttention**: its exchange of heads for positions (Ulysses), under DDP.

Peak memory is counted by the C library's allocator on all threads, plus memory that ranks share; of the rank that \
has most, without what loading the libraries takes. The gradients of the first step are compared with those of one \
process, relative to the largest element of each; losses of two steps relative to its losses."""

_DENIED = """\
## Disadvantages of the peers on this machine

- torch's ring has no entry for the CPU's attention kernel: `context_parallel` fails there. `ring.py` registers one \
in torch's table, by the same functions that its kernels of CUDA use.
- A ring hides its messages behind attention, on devices that compute while others copy. Here messages are copies by \
the same cores, for all contenders, and nothing is hidden. What an exchange of heads sends is never hidden behind \
attention.
- With more ranks than cores, ranks take turns: an even division of work is worth less than on devices.
- All heads have keys of their own. With grouped queries a ring sends fewer keys and values, while an exchange sends \
the same queries and outputs. A ring may have more ranks than heads; an exchange of heads may not.
- DDP's buckets are reduced by gloo, and Atoll's gradients in shared memory. Their bytes are few beside those of \
attention: {megabytes:.1f} MB of gradients."""
