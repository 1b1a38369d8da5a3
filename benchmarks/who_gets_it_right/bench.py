"""Who computes the right gradients and parameters when a pipeline is combined with sharding.

The same model, batches and microbatches on Atoll, on torch.distributed.pipelining with FSDP2 and on DeepSpeed, in
float64 on CPUs, each compared with plain PyTorch in one process. Every case runs on ranks of its own; one that hangs is
ended.

    matrix      torch's schedules, two stages by two data-parallel ranks; without a pipeline, two data-parallel ranks
    deepspeed   its pipeline with ZeRO 0 to 3, and ZeRO without a pipeline, in the version that is installed and in
                those that lie beside it:
                pip install --no-deps --target build/deepspeed-0.19.8 deepspeed==0.19.8
    twice       schedules of 1F1B and of a split backward, with layers that are called twice in a row
    layouts     Atoll's 14 layouts with the same schedules, two stages by two groups of two
    mixtures    experts in place of dense layers: torch, whose FSDP2 wraps each layer's experts by themselves, and
                Atoll, whose data-parallel ranks divide them
    experts     a Qwen3-MoE of transformers with its own expert parallelism, and with Atoll's
    sequences   ranks that divide the sequences of a Llama and a Mistral of transformers: torch's ring, with every layer
                causal or with Accelerate's hook, and Atoll
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from atoll.plans.layouts import EFFECTIVE
from atoll.testing import RankPool
from benchmarks.islands.contenders import has_deepspeed
from benchmarks.islands.tables import grid, measured_in
from benchmarks.who_gets_it_right.contenders import ALONE, ATOLL, SHARDINGS
from benchmarks.who_gets_it_right.mixtures import MESHES, axes_of
from benchmarks.who_gets_it_right.sequences import DOCUMENT, LAYOUTS, RINGS, ROWS, WINDOW
from benchmarks.who_gets_it_right.verdict import TOLERANCE, judge
from benchmarks.who_gets_it_right.work import Work

SYSTEMS = (*(f"torch {name}" for name in SHARDINGS), *(f"atoll {layout}" for layout in ("NNN", "NNG", "NGG", "GGG")))
TWICE = ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules with which layers are called twice."""
MIXED = (ALONE, "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules of mixtures."""
MIXED_SYSTEMS = (
    "torch by hand",
    "torch FSDP2, kept",
    "torch FSDP2, resharded",
    "torch FSDP2, resharded, gathered first",
    "atoll NNN, expert 2",
    "atoll IIG, expert 2",
    "atoll GGG, expert 2",
    "atoll GGG",
)
BUILD = Path(__file__).parents[2] / "build"
STAGES = ((0, "float64"), (0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"))
"""ZeRO's stages and what they are tried in."""
ACCUMULATED = STAGES[1:]
"""The same without a pipeline."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Judge every case."""
    rows = [ALONE, "InterleavedZeroBubble"] if arguments.quick else list(ATOLL)
    layouts = [layout.name for layout in EFFECTIVE][: 1 if arguments.quick else None]
    work = Work()
    grouped = replace(work, inter=2, microbatches=4)
    with RankPool() as pool:
        matrix = [
            _judge(pool, replace(work, pipeline=1) if row == ALONE else work, system=system, row=row)
            for row in rows
            for system in SYSTEMS
        ]
        twice = [
            _judge(pool, replace(work, twice=True), system=system, row=row)
            for row in TWICE
            if row in rows
            for system in SYSTEMS
        ]
        atoll = [
            _judge(pool, grouped, system=f"atoll {layout}", row=row)
            for layout in layouts
            for row in rows
            if row != ALONE
        ]
        mixture = replace(work, model_kind="mixture")
        mixtures = [
            _judge(pool, replace(mixture, pipeline=1) if row == ALONE else mixture, system=system, row=row)
            for row in (row for row in MIXED if row in rows)
            for system in MIXED_SYSTEMS
        ]
        divided = [
            _judge(pool, replace(grouped, model_kind="mixture"), system=f"atoll {layout}, expert 2", row=row)
            for layout in layouts
            for row in MIXED
            if row in rows and row != ALONE
        ]
    experts = _experts(work, MESHES[: 1 if arguments.quick else None])
    sequences = _sequences(work, (2,) if arguments.quick else (2, 4))
    found = [] if arguments.quick else _deepspeed(work)
    return {
        "work": asdict(work),
        "tolerance": dict(TOLERANCE),
        "matrix": matrix,
        "twice": twice,
        "deepspeed": found,
        "grouped": asdict(grouped),
        "layouts": atoll,
        "mixtures": mixtures,
        "divided": divided,
        "experts": experts,
        "sequences": sequences,
    }


def _judge(pool: RankPool, work: Work, *, system: str, row: str) -> dict[str, Any]:
    found = judge(pool, work, system=system, row=row)
    print(f"{row}, {system}: {_cell(found)}", flush=True)
    return found


def _experts(work: Work, meshes: Sequence[str]) -> list[dict[str, Any]]:
    """A mixture of transformers with each mesh of its own, whose ranks are new each time, and with Atoll."""
    rows = []
    family = replace(work, model_kind="qwen3_moe", pipeline=1)
    for dtype in ("float64", "float32"):
        for mesh in meshes:
            with RankPool() as pool:
                own = replace(family, dtype=dtype, **axes_of(mesh))
                found = _judge(pool, own, system=f"transformers {mesh}", row=ALONE)
            rows.append({**found, "dtype": dtype})
    with RankPool() as pool:
        for row in MIXED:
            own = replace(family, pipeline=1 if row == ALONE else work.pipeline)
            rows.append({**_judge(pool, own, system="atoll GGG, expert 2", row=row), "dtype": "float64"})
    return rows


def _sequences(work: Work, divisions: Sequence[int]) -> list[dict[str, Any]]:
    """Judge models of transformers whose sequences ranks divide, in float32, in which torch's ring adds up."""
    rows = []
    with RankPool() as pool:
        for name, (kind, documents) in ROWS.items():
            own = replace(work, model_kind=kind, documents=documents, pipeline=1, intra=1, sequence=16, dtype="float32")
            for divided in divisions:
                for system in (*RINGS, *(f"atoll {layout}" for layout in LAYOUTS)):
                    found = _judge(pool, replace(own, divided=divided), system=system, row=ALONE)
                    rows.append({**found, "mask": name, "ranks": divided})
    return rows


def _deepspeed(work: Work) -> list[dict[str, Any]]:
    """Each version with each stage; its processes are new each time, since it keeps its groups for good."""
    if not has_deepspeed():
        print("DeepSpeed is not installed (pip install -e '.[bench]'): its rows are left out", flush=True)
        return []
    rows = []
    folders = {path.name.removeprefix("deepspeed-"): [str(path)] for path in BUILD.glob("deepspeed-*")}
    for name, first in sorted(({version("deepspeed"): []} | folders).items()):
        for row, tried in (("1F1B", STAGES), (ALONE, ACCUMULATED)):
            for stage, dtype in tried:
                own = replace(work, dtype=dtype, pipeline=1 if row == ALONE else work.pipeline)
                with _searched(first), RankPool() as pool:
                    found = _judge(pool, own, system=f"deepspeed {stage}", row=row)
                rows.append({**found, "version": name, "dtype": dtype})
    return rows


@contextmanager
def _searched(first: Sequence[str]) -> Iterator[None]:
    """Let ranks import from these folders before any other."""
    sys.path[:0] = first
    try:
        yield
    finally:
        del sys.path[: len(first)]


def _cell(found: Mapping[str, Any]) -> str:
    """A verdict in a few words."""
    if found["verdict"] == "right":
        return "right"
    if found["verdict"] != "wrong":
        return f"**{found['verdict']}**"
    parts = [f"{found['missing']} missing"] if found["missing"] else []
    if found["wrong"]:
        parts.append(f"{found['wrong']} off by up to {found['off']:.0%}")
    return f"**wrong**: {', '.join(parts) or 'in a later step'}"


def _table(rows: Sequence[Mapping[str, Any]], *, down: str, across: str) -> str:
    """The verdicts, by two of the rows' keys."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(row[down], {})[row[across]] = _cell(row)
    return grid(cells, corner=down)


def _words(rows: Sequence[Mapping[str, Any]]) -> str:
    """What refused or failed, and what it said."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if row["words"]:
            who = f"{row['system']} of {row['version']}" if "version" in row else row["system"]
            said.setdefault(row["words"], []).append(f"{who}, {row['schedule']}")
    return "\n".join(f"- {'; '.join(who)}:\n  `{words}`" for words, who in said.items())


def report(result: Mapping[str, Any]) -> str:
    """Everything, in markdown."""
    matrix = [{**row, "schedule": _label(row["schedule"])} for row in result["matrix"]]
    layouts = [
        {**row, "schedule": ATOLL[row["schedule"]], "layout": row["system"].removeprefix("atoll ")}
        for row in result["layouts"]
    ]
    labelled = [
        {**row, "ZeRO": f"{row['system'].removeprefix('deepspeed ')}, {row['dtype']}"} for row in result["deepspeed"]
    ]
    zero, alone = ([row for row in labelled if (row["schedule"] == ALONE) is it] for it in (False, True))
    twice = [{**row, "schedule": _label(row["schedule"])} for row in result["twice"]]
    right = [row["difference"] for row in (*matrix, *twice, *layouts) if row["verdict"] == "right"]
    said = ("matrix", "twice", "deepspeed", "layouts", "mixtures", "divided", "experts", "sequences")
    words = _words([row for name in said for row in result.get(name, [])])
    parts = [
        "# Who gets it right",
        "Written by `python benchmarks/run.py who_gets_it_right`.",
        measured_in(result["environment"]) if "environment" in result else "",
        _SET_UP.format(**result["work"], right=max(right), parameters=matrix[0]["parameters"]),
        "## torch and Atoll: two stages, two data-parallel ranks",
        _table(matrix, down="schedule", across="system"),
        _TORCH,
        "## The same with layers that are called twice in a row",
        _table(twice, down="schedule", across="system"),
        _TWICE,
        "## DeepSpeed: its 1F1B, two stages, two data-parallel ranks" if zero else "",
        _table(zero, down="ZeRO", across="version") if zero else "",
        _DEEPSPEED.format(**result["work"]) if zero else "",
        "## DeepSpeed: ZeRO without a pipeline, two data-parallel ranks" if alone else "",
        _table(alone, down="ZeRO", across="version") if alone else "",
        _ZERO.format(**result["work"]) if alone else "",
        "## Atoll: two stages, two groups of two data-parallel ranks",
        _table(layouts, down="layout", across="schedule"),
        *_of_mixtures(result),
        *_of_sequences(result),
        f"## In their own words\n\n{words}" if words else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _of_mixtures(result: Mapping[str, Any]) -> list[str]:
    """The tables of mixtures; none where they have not been judged."""
    if "mixtures" not in result:
        return []
    mixtures = [{**row, "schedule": _label(row["schedule"])} for row in result["mixtures"]]
    divided = [
        {**row, "schedule": ATOLL[row["schedule"]], "layout": row["system"].split()[1].rstrip(",")}
        for row in result["divided"]
    ]
    experts = [{**row, "system": f"{row['system']}; {_label(row['schedule'])}"} for row in result["experts"]]
    return [
        "## Mixtures of experts: torch and Atoll, two stages, two data-parallel ranks",
        _MIXTURES,
        _table(mixtures, down="schedule", across="system"),
        "## Mixtures of experts: Atoll, two stages, two groups of two data-parallel ranks, which divide the experts",
        _table(divided, down="layout", across="schedule"),
        "## Expert parallelism of transformers",
        _EXPERTS,
        _table(experts, down="system", across="dtype"),
    ]


def _of_sequences(result: Mapping[str, Any]) -> list[str]:
    """The table of divided sequences; none where they have not been judged."""
    if "sequences" not in result:
        return []
    rows = [{**row, "mask": f"{row['mask']}, {row['ranks']} ranks"} for row in result["sequences"]]
    return [
        "## Ranks that divide sequences",
        _SEQUENCES.format(documents=DOCUMENT, window=WINDOW),
        _table(rows, down="mask", across="system"),
    ]


def _label(row: str) -> str:
    return row if row == ALONE else f"{row} (Atoll: {ATOLL[row]})"


_SET_UP = """\
Embedding, {layers} layers of a norm and two linears, head; {microbatches} microbatches a data-parallel rank, {steps} \
steps of plain SGD at a rate of 1, so that the change of a parameter in a step is its gradient. All start from the \
same values, get the same microbatches, and are compared with plain PyTorch in one process.

- **right**: each gradient of the first step, and each parameter after the last, differs by at most 1e-10 · \
max(1e-2, max|b|) in float64, 1e-4 in float32. The largest difference of those in float64 is {right:.1e}.
- **wrong**: how many of the {parameters} parameters did not move at all (missing), how many others got a wrong \
gradient, and by how much of its largest element. No error is raised.
- **refused** at construction, **fails** in a step, **hangs**: the messages are below.

Means over data-parallel ranks (torch, DeepSpeed) or microbatches (DeepSpeed) are conventions, and are removed."""

_ZERO = """\
Gradients of {microbatches} calls are accumulated, the setting of DeepSpeed issue 7718: from 0.17.6 to 0.18.2, ZeRO 2 \
keeps a part of them alone."""

_TORCH = """\
The first row is the same sharding without a pipeline. *By hand* is the same pipeline without sharding, its gradients \
averaged after the step. Both are right, so only the combination is wrong.

**FSDP2, resharded** is `reshard_after_forward=True`. With a split backward torch lists a stage's parameters before it \
gathers them, so those that are resharded at that moment are not found in the graph, and their gradients are dropped \
without an error or a warning. *Gathered first* is the same with a gather before each part of a backward: right, which \
shows the cause. **Kept** is `reshard_after_forward=False`, torchtitan's default with a pipeline: \
right, and a stage's parameters stay whole.

**DDP** does not reduce the gradients of a split backward, since its hooks are not called (pytorch issue 144530): each \
rank keeps its own gradient. If all forwards precede the first backward it fails in the second step, because of \
the forward with which a stage infers its shapes; with *shapes given* it does not. `replicate` is its newer form, on \
FSDP2's code."""

_MIXTURES = """\
The same with a router and 8 experts in each layer, of which a token takes two. FSDP2 wraps each layer's experts by \
themselves, as torchtitan does, and the layer around them. With *expert 2* both data-parallel ranks have half of the \
experts and exchange tokens; without it, the experts are laid out like everything else."""

_EXPERTS = """\
A Qwen3-MoE of two layers, loaded by `from_pretrained` with `DistributedConfig`: *ep* is `ep_size`, the other sizes \
likewise. Gradients of all microbatches are accumulated before a step. Each mesh is compared with the same model in \
one process, in float64 and in float32; Atoll's GGG with both ranks dividing the experts is beside it.

Where each expert is on one rank alone (*fsdp 2, ep 2*), transformers gives FSDP2 a group of one rank and a divisor. \
For such a group FSDP2 applies the divisor twice, but only to gradients in float64 or fp16, and so the experts get a \
share of their gradient. With *tp 2* the gradients of the norms of queries and keys, which every tensor-parallel rank \
has in part, are added up over the ranks after each microbatch, also what was added up before: right for one \
microbatch, wrong for several; FSDP2 reduces each microbatch by itself, so that with *fsdp* they are right. A pipeline \
is refused."""

_SEQUENCES = """\
A Llama and a Mistral of transformers on rows of 16 tokens, in float32. *Packed documents* have {documents} tokens \
each, with position ids that restart; *sliding windows* have {window} tokens. Each is compared with the same model in \
one process, whose masks are its own.

**ring** is torch's `context_parallel`, with the kernel of CPUs added to its table (`benchmarks/sequence/ring.py`). \
It takes no mask. *By hand* every layer is called without a mask, as causal. *Accelerate* is its hook that does the \
same, but refuses models with windows; `Accelerator` refuses context parallelism on CPUs, so the hook stands for it. \
trl, which calls it, refuses packed documents by itself (trl issue 6843). torch's other way, flex attention with a \
block mask, knows documents; flex attention has no backward on CPUs.

**atoll** exchanges heads for positions, so attention has whole rows and the model's own masks."""

_TWICE = """\
A weight is then used twice on one path of a stage. torch's split backward visits a part of the graph a second time \
and fails, also without sharding. On the smallest such graph, releases before 2.13 count the gradient twice without an \
error (pytorch issue 180952): [Silent faults elsewhere](../../docs/bugs-elsewhere.md) has a script for it."""

_DEEPSPEED = """\
In 0.18.2 no stage divides by the number of microbatches: the engine does so where it reduces in the backward, which \
its pipeline turns off, so the gradients are {microbatches} times too large. In 0.19.2 every \
stage divides by the number of microbatches, including gradients that are divided already: the first \
of the two gets an eighth of its gradients (DeepSpeed issue 8152, repaired in 0.19.3). The project pins 0.19.2 for \
another reason (`pyproject.toml`); `bench.py` describes how to compare other versions. DeepSpeed's pipeline has one \
schedule. It refuses gradients in float64, so it runs in float32."""
