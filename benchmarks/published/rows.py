"""Turns rows of published measurements into what `atoll.prediction.cost` takes.

    row = rows.read({"source": "vtrain", "model": {...}, "cluster": {...}, "plan": {...}, "result": {...}, ...})
    row.model, row.use, row.mesh, row.cluster, row.step_seconds

A source has a reader, which knows what its rows leave to the page that they are from. What no row and no page says is
not filled in, with two exceptions, which `Published.assumed` names: what hardly changes a step, and what all machines
of a kind have. A row that lacks more, or that plans cannot say, is None; `parse` raises an error that says why.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from atoll.plans.plan import MeshShape
from benchmarks.published.megatron_bridge import megatron_bridge
from benchmarks.published.megatron_ci import megatron_ci
from benchmarks.published.record import GIB, MIB, Fields, Published, Row, filled, shorter_ends
from benchmarks.published.sizes import (
    A100_FLOPS,
    DEEPSEEK,
    NETWORKS,
    SELENE,
    ZERO_BUBBLE,
    ZERO_BUBBLE_VOCABULARY,
    Network,
    UnclearError,
    llama,
    megatron_flops,
    mpt,
    padded,
    palm_flops,
)

__all__ = ["Published", "UnclearError", "folded", "parse", "read", "read_csv", "rows_of_csv"]

SAIL_NETWORK = Network(8, "roce-200")
"""Sea AI Lab's pages say RoCE. A hop that Zero Bubble profiles over two nodes, 10.5 MB in 0.377 ms, is such a card."""

H100_NETWORK = Network(8, "roce-400")
"""A card of 400 Gb/s a device, as nodes of eight H100 have them."""


LAYER_PARAMETERS = 12
"""Weights and biases of a GPT's layer, those of its norms among them."""


def read(row: Row) -> Published | None:
    """A row of any source; None where it does not say enough, or says what no plan can."""
    try:
        return parse(row)
    except UnclearError:
        return None


def parse(row: Row) -> Published:
    """A row of any source. Raises UnclearError where `read` gives None."""
    source = row.get("source")
    if source in UNREAD:
        raise UnclearError(UNREAD[source])
    if source not in READERS:
        raise UnclearError(f"source {source!r} has no reader")
    if row.get("kind") != "measured":
        raise UnclearError(f"the row is {row.get('kind')!r}, not measured")
    return READERS[source](Fields(row))


def folded(row: Row) -> Row:
    """The row with its context-parallel ranks as data-parallel ones that have a part of each sample.

    They hold as many bytes, but for what attention exchanges; seconds are others. Raises UnclearError where the row
    does not say enough.
    """
    fields = Fields(row)
    context, batch = fields.plan.count("cp", 1), fields.plan.get("global_batch")
    if context == 1:
        return row
    sequence, rest = divmod(fields.sequence, context)
    if rest:
        raise UnclearError(f"{fields.sequence} tokens are not even over {context} context-parallel ranks")
    whole = {} if batch is None else {"global_batch": fields.plan.count("global_batch") * context}
    plan = fields.changed("plan", cp=1, dp=fields.data * context, **whole)
    return plan.changed("model", seq=sequence).row


# ---- Megatron with DeepSpeed


def _bigscience(row: Fields) -> Published:
    """BLOOM. The fullest node's memory is what nvidia-smi shows, in MiB of which a thousand are read as a GB.

    Gradients accumulated in fp16 until bf16 came. DeepSpeed cuts the layers, from 02-27 on with both ends as layers.
    """
    layers, assumed = _bloom_layers(row)
    heads = row.model.get("heads")
    if heads is None and row.model.count("hidden") == 14400:
        # The page's "200B model: TP=8, PP=10, NLAYERS=80, NHIDDEN=14400, NHEADS=96".
        heads, assumed = 96, (*assumed, "heads")
    cuts = shorter_ends if row.plan.text("partition").startswith("type:") else filled
    found = row.published(
        "megatron-deepspeed",
        row.gpt(layers=layers, heads=heads, positions=0),
        row.use(attention="eager"),
        network=_network(row),
        layers_per_stage=cuts(layers, row.pipeline),
    )
    memory = row.result.number("mem_gb")
    return replace(
        found.timed(seconds=row.result.number("step_s")),
        gradient_bytes=found.gradient_bytes or 2,
        peak_bytes=None if memory is None else round(memory * 1000 * MIB),
        fits=not row.result.get("oom"),
        bytes_of="device",
        assumed=("alibi", *assumed),
    )


def _bloom_layers(row: Fields) -> tuple[int, tuple[str, ...]]:
    """Layers as printed, if they give the printed size; else those of the printed TFLOPs, if these are a whole number.

    The page's size is l (12 h² + 13 h) + (V + s) h + 2 h, with another vocabulary at first, hence 3 %. Its TFLOPs a
    device are 96 B s l h² / (seconds devices) up to line 600; from there on they count attention and vocabulary too.
    """
    hidden, layers = row.model.count("hidden"), row.model.get("layers")
    size = _billions(row.model.text("size"))
    ends = (row.vocabulary + row.sequence + 2) * hidden
    if layers is not None and abs(layers * hidden * (12 * hidden + 13) + ends - size) < 0.03 * size:
        return row.model.count("layers"), ()
    flops, seconds = row.result.number("tflops_per_gpu"), row.result.number("step_s")
    if flops is None or seconds is None or row.row.get("line", 600) >= 600:
        raise UnclearError(f"{layers} layers of hidden = {hidden} are not {row.model.get('size')}")
    each = 96.0 * row.plan.count("global_batch") * row.sequence * hidden**2
    layers = flops * 1e12 * row.cluster.count("gpus") * seconds / each
    if abs(layers - round(layers)) > 0.1 or round(layers) % row.pipeline:
        raise UnclearError(f"{flops} TFLOPs are {layers:.2f} layers, which are not even over {row.pipeline} stages")
    return round(layers), ("layers",)


def _billions(size: str) -> float:
    number = size.removesuffix("B")
    if number == size or not number.replace(".", "", 1).isdecimal():
        raise UnclearError(f"size {size!r} is not a number of billions")
    return float(number) * 1e9


def _vtrain(row: Fields) -> Published:
    """Without ZeRO. 175B on 64 ranks holds more than 40 GB, so these are A100 of 80; the page does not say so."""
    row = row.changed("cluster", gpu="A100-80GB") if row.cluster.text("gpu") == "A100" else row
    found = row.published("megatron-deepspeed", row.gpt(), row.use(attention="eager"), network=_network(row))
    return replace(found.timed(seconds=row.result.number("step_s")), assumed=("memory of the device",))


def _mt_nlg(row: Fields) -> Published:
    """Megatron-Turing NLG on Selene."""
    found = row.published("megatron-deepspeed", row.gpt(), row.use(attention="eager"), network=_network(row) or SELENE)
    return found.timed(seconds=row.result.number("step_s"))


# ---- Megatron


def _korthikanti(row: Fields) -> Published:
    """Table 5, on Selene; rows of one layer or of closed forms have no step."""
    found = row.published("megatron", row.gpt(), row.use(attention="eager"), network=SELENE)
    return found.timed(seconds=row.result.number("step_s"))


def _sc21(row: Fields) -> Published:
    """On Selene. Rows of table 1 do not say the microbatch; those of table 2 with ZeRO-3 are of DeepSpeed."""
    model = row.gpt()
    is_zero = row.layout.name == "GGG"
    found = row.published("deepspeed" if is_zero else "megatron", model, row.use(attention="eager"), network=SELENE)
    found = _one_ring(found) if is_zero else found
    reached = row.result.number("tflops_per_gpu")
    if reached is None:
        return found
    recomputed = found.use.recompute == "block"
    flops = megatron_flops(model, samples=found.samples, sequence=row.sequence, recomputed=recomputed)
    return found.timed(seconds=flops / (reached * 1e12 * found.mesh.world))


def _one_ring(found: Published) -> Published:
    """DeepSpeed's ZeRO-3 of 2021: one ring of all ranks gathers each of a layer's twelve parameters by itself, which
    the layer waits for, and reduces its gradient in fp16. Later versions gather a layer at once and ahead (DeepSpeed
    #1069).
    """
    ranks, network = found.mesh.data, found.cluster.network
    if network is not None:
        latency = network.latency * LAYER_PARAMETERS * (ranks - 1)
        network = network.model_copy(update={"latency": latency})
    cluster = found.cluster.model_copy(update={"network": network})
    return replace(found, mesh=MeshShape(intra=ranks), cluster=cluster, reduce_bytes=2)


def _simumax(row: Fields) -> Published:
    """One node. Transformer Engine's fused attention and loss; the page's script leaves gradient accumulation fused."""
    name = row.model.text("name")
    named = DEEPSEEK[name] if name in DEEPSEEK else llama(name.replace("-", " "))
    model = replace(named, layers=row.model.count("layers"), vocabulary=padded(named.vocabulary, row.tensor))
    found = row.published("megatron", model, row.use(attention="flash", loss="fused"))
    ranks = row.result.get("peak_alloc_mib_by_rank", {})
    peaks = tuple(round(ranks[rank] * MIB) for rank in sorted(ranks, key=int))
    peak = row.result.number("peak_alloc_gib")
    return replace(
        found.timed(seconds=row.result.number("step_s")),
        peak_bytes=max(peaks, default=None if peak is None else round(peak * GIB)),
        peak_bytes_by_rank=peaks or None,
        fuses_gradients=True,
        loss_in_place=True,
    )


def _llama3(row: Fields) -> Published:
    """Section 3.3: parameters are gathered once a step, and a stage has one layer, but the first and last have none.

    One sequence a microbatch is the most that `batch_per_dp` can be cut into. Utilization follows PaLM's count.
    """
    said = row.plan.text("schedule"), row.plan.text("layout"), row.plan.text("recompute")
    if not ("one layer less" in said[0] and "not resharded" in said[1] and said[2].startswith("none")):
        raise UnclearError(f"no plan is known for {'; '.join(said)}")
    model, batch = row.llama(), row.plan.count("batch_per_dp")
    chunks, rest = divmod(model.layers + 2, row.pipeline)
    if rest:
        raise UnclearError(f"{model.layers} layers and both ends are not even over {row.pipeline} ranks")
    words = {"layout": "GGG", "schedule": "interleaved", "vpp": chunks, "recompute": "none"}
    row = row.changed("plan", **words, microbatch=1, microbatches=batch)
    found = row.published(
        "llama3",
        model,
        row.use(attention="flash"),
        network=_network(row),
        layers_per_stage=shorter_ends(model.layers, row.pipeline * chunks),
    )
    reached = row.result.number("tflops_per_gpu")
    if reached is not None:
        flops = palm_flops(model, samples=found.samples, sequence=row.sequence)
        found = found.timed(seconds=flops / (reached * 1e12 * found.mesh.world))
    return replace(found, residency="step", assumed=("microbatch",))


# ---- Sea AI Lab's Megatron


def _zero_bubble(row: Fields) -> Published:
    """Attention writes its scores, as the paper's memory of 34 h + 5 a s says; stages count both ends as layers.

    Memory fits GiB. The first version of the paper prints sizes by name, and runs 2p also with half the microbatch.
    """
    size = row.model.text("size")
    sizes = {key: row.model.get(key, value) for key, value in ZERO_BUBBLE.get(size, {}).items()}
    row = row.changed("model", **sizes, vocab=ZERO_BUBBLE_VOCABULARY)
    assumed = ("vocabulary", "network") if row.plan.get("precision") else ("vocabulary", "network", "precision")
    row = row.changed("plan", recompute="none", precision=row.plan.get("precision", "fp16"))
    layers, schedule = row.model.count("layers"), row.plan.text("schedule")
    if schedule == "interleaved (most chunks)":
        row = row.changed("plan", schedule="interleaved", vpp=(layers + 2) // row.pipeline)
    if schedule.endswith(", half microbatch, twice as many"):
        half, rest = divmod(row.plan.count("microbatch"), 2)
        if rest:
            raise UnclearError(f"half of a microbatch of {row.plan.count('microbatch')}")
        name = schedule.partition(",")[0]
        row = row.changed("plan", schedule=name, microbatch=half, microbatches=2 * row.microbatches)
    found = row.published(
        "megatron",
        row.gpt(),
        row.use(attention="eager"),
        network=SAIL_NETWORK,
        layers_per_stage=shorter_ends(layers, row.pipeline * row.schedule[1]),
    )
    samples, memory = row.result.number("samples_per_s_per_gpu"), row.result.number("mem_gb")
    return replace(
        found.timed(tokens=None if samples is None else samples * row.sequence),
        peak_bytes=None if memory is None else round(memory * GIB),
        assumed=assumed,
    )


def _vocabulary_parallelism(row: Fields) -> Published:
    """Attention is fused: its scores alone would be more than the printed peaks, which fit GiB.

    Utilization counts 72 B s l h² (1 + s / 6h + V / 12lh): `artifact/test_one_host.csv` of the page prints its parts.
    Gradients are fp16: peaks grow by 16 bytes with a parameter of the vocabulary, where fp32 ones would make it 18.
    """
    methods: Mapping[str, Literal[0, 1, 2]] = {"baseline": 0, "vocab-1": 1, "vocab-2": 2}
    method = row.plan.text("method")
    if method not in methods:
        raise UnclearError(f"layers of the stages, or the order, are not said for {method!r}")
    row = row.changed("plan", recompute="none")
    model = replace(row.gpt(), tied=bool(row.model.get("tied", False)))
    found = row.published("megatron", model, row.use(attention="flash"), network=SAIL_NETWORK)
    reached, memory = row.result.number("mfu"), row.result.number("peak_gb")
    if reached is not None:
        flops = megatron_flops(model, samples=found.samples, sequence=row.sequence, recomputed=False)
        found = found.timed(seconds=flops / (reached * A100_FLOPS * found.mesh.world))
    return replace(
        found,
        vocabulary=methods[method],
        gradient_bytes=2,
        peak_bytes=None if memory is None else round(memory * GIB),
        fits=not row.result.get("oom"),
        assumed=("attention", "network"),
    )


# ---- fully sharded: parameters, and so gradients, are fp32 at rest


def _llm_foundry(row: Fields) -> Published:
    """MPT under FSDP1. PURE also reduces in bf16."""
    model = mpt(
        row.model.text("size"),
        parameters=row.model.count("params"),
        vocabulary=row.model.count("vocab"),
        sequence=row.sequence,
    )
    row = row.changed("cluster", gpu=row.cluster.text("gpu").upper().replace("_", "-"))
    stated = re.search(r"with (\d+) Gbps node-node interconnect \(RoCE\)", str(row.row.get("table")))
    network = Network(int(stated[1]) // 200, "roce-200") if stated else None
    is_assumed = network is None and row.cluster.text("gpu") == "H100-80GB"
    network = H100_NETWORK if is_assumed else network
    found = row.published("fsdp", model, row.use(attention="flash"), network=network)
    return replace(
        found.timed(tokens=row.result.number("tokens_per_s_per_gpu")),
        gradient_bytes=4,
        reduce_bytes={"PURE": 2, "DEFAULT": 4}.get(row.plan.get("mp_mode")),
        assumed=("network",) if is_assumed and found.cluster.network else (),
    )


def _torchtitan(row: Fields) -> Published:
    """FSDP2. Its tensor parallelism is sequence parallel too; memory is what the allocator has reserved.

    Selective recomputing of single operations has no plan.
    """
    row, assumed = _one_microbatch(row.changed("plan", sequence_parallel=True))
    found = row.published("torchtitan", row.llama(), row.use(attention="flash"), network=_network(row))
    memory = row.result.number("mem_gib")
    return replace(
        found.timed(tokens=row.result.number("tokens_per_s_per_gpu")),
        compiled=row.plan.get("compile"),
        gradient_bytes=4,
        peak_bytes=None if memory is None else round(memory * GIB),
        bytes_of="reserved",
        assumed=assumed,
    )


def _fms_fsdp(row: Fields) -> Published:
    """IBM's FSDP of Llama 2. Its selective recomputing leaves out some layers, and rows do not say which."""
    gpu, _, rate = row.cluster.text("gpu").partition(", ")
    stated = re.fullmatch(r"(\d+) Gb/s a node", rate)
    network = Network(int(stated[1]) // 100, "roce-100") if stated else None
    row, assumed = _one_microbatch(row.changed("cluster", gpu=gpu))
    if row.plan.get("recompute") == "selective":
        raise UnclearError("which layers are recomputed is not said")
    model = llama(f"{row.model.text('kind')} {row.model.text('size')}")
    found = row.published("fsdp", model, row.use(attention="flash"), network=network)
    return replace(
        found.timed(tokens=row.result.number("tokens_per_s_per_gpu")),
        compiled=row.plan.get("compile"),
        gradient_bytes=4,
        assumed=assumed,
    )


def _one_microbatch(row: Fields) -> tuple[Fields, tuple[str, ...]]:
    """With one microbatch a step where neither their number nor the global batch is said."""
    if row.plan.get("global_batch") is None and row.plan.get("microbatches") is None:
        return row.changed("plan", microbatches=1), ("microbatches",)
    return row, ()


def _network(row: Fields) -> Network | None:
    return NETWORKS.get(row.cluster.get("inter", ""))


# ---- which reader a source has

READERS: Mapping[str, Callable[[Fields], Published]] = MappingProxyType(
    {
        "bigscience": _bigscience,
        "fms-fsdp": _fms_fsdp,
        "korthikanti": _korthikanti,
        "llama3": _llama3,
        "llm-foundry": _llm_foundry,
        "megatron-bridge": megatron_bridge,
        "megatron-ci": megatron_ci,
        "mt-nlg": _mt_nlg,
        "sc21": _sc21,
        "simumax-b200": _simumax,
        "torchtitan": _torchtitan,
        "vocabulary-parallelism": _vocabulary_parallelism,
        "vtrain": _vtrain,
        "zero-bubble": _zero_bubble,
        "zero-bubble-v1": _zero_bubble,
    }
)

UNREAD: Mapping[str, str] = MappingProxyType(
    {
        "megascale": "neither recompute nor precision is said",
        "paro": "ratios of two plans, neither of whose steps is printed",
        "pipeoffload": "neither layers nor microbatches are said",
    }
)
"""Sources without a reader, and what their rows lack."""


# ---- vTrain's table of one node


def read_csv(path: str | Path) -> tuple[Published, ...]:
    """vTrain's steps on one node, whose first line names the columns. Lines that `read` gives None for are left out."""
    found = map(read, rows_of_csv(path))
    return tuple(each for each in found if each is not None)


def rows_of_csv(path: str | Path) -> tuple[Row, ...]:
    """The same lines in the form of other rows, named `vtrain-s-{line}`. One that lacks numbers has its name alone."""
    with Path(path).open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines))
    return tuple(_vtrain_row(number, cells) for number, cells in enumerate(rows, 1) if _is_data(cells))


def _is_data(cells: list[str]) -> bool:
    return bool(cells) and not cells[0].startswith("#")


def _vtrain_row(number: int, cells: list[str]) -> Row:
    """Line `number` in the form of other rows, with the vocabulary and the plan of vTrain's rows of several nodes."""
    try:
        gpus, batch, microbatch, hidden, heads, layers, sequence, tensor, data, pipeline = map(int, cells[:10])
        seconds = float(cells[10]) / 1000.0 if cells[10:] and cells[10].strip() else None
    except ValueError:
        return {"id": f"vtrain-s-{number}", "source": "vtrain"}
    return {
        "id": f"vtrain-s-{number}",
        "source": "vtrain",
        "kind": "measured",
        "model": {"layers": layers, "hidden": hidden, "heads": heads, "seq": sequence, "vocab": 50257},
        "cluster": {"gpu": "A100", "per_node": 8, "gpus": gpus},
        "plan": {
            "tp": tensor,
            "pp": pipeline,
            "dp": data,
            "layout": "NNN",
            "schedule": "1f1b",
            "microbatch": microbatch,
            "global_batch": batch,
            "recompute": "block",
            "precision": "fp16",
        },
        "result": {"step_s": seconds},
    }
