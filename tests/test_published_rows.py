"""Rows of published measurements, as each source prints them, and what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.plans.plan import MeshShape
from atoll.prediction.cost import Exchange, Prediction
from atoll.program import Do
from benchmarks.published import memory, plans, rows
from benchmarks.published.rows import Published, UnclearError

GIB = 2**30

A100 = {"gpu": "A100-80GB", "per_node": 8}
OMNI_PATH = {**A100, "gpus": 384, "intra": "NVLink3", "inter": "4 x Omni-Path 100 Gb/s a node"}
SELENE = {**A100, "intra": "NVLink3/NVSwitch", "inter": "HDR InfiniBand"}
ROCE = {**A100, "inter": "RoCE"}


def row(source: str, model: dict[str, Any], cluster: dict[str, Any], plan: dict[str, Any], result: dict[str, Any],
        **more: Any) -> dict[str, Any]:  # fmt: skip
    tables = {"model": model, "cluster": cluster, "plan": plan, "result": result}
    return {"id": f"{source}-1", "source": source, "kind": "measured", **tables, **more}


def parse(*tables: Any, **more: Any) -> Published:
    return rows.parse(row(*tables, **more))


def sizes(found: Published) -> tuple[int, ...]:
    return found.model.layers, found.model.hidden, found.model.heads, found.model.ffn, found.model.vocabulary


# ---- BLOOM


def bloom(model: dict[str, Any], plan: dict[str, Any], result: dict[str, Any], **more: Any) -> dict[str, Any]:
    cluster = {**OMNI_PATH, "gpus": more.pop("gpus", 384)}
    model = {"kind": "gpt", "heads": 64, "vocab": 250880, "seq": 2048, "ffn": 4 * model["hidden"], **model}
    plan = {
        "layout": "NNG",
        "schedule": "1f1b",
        "global_batch": 2048,
        "recompute": "block",
        "sequence_parallel": False,
        "precision": "fp16",
        "partition": "layers evenly",
        **plan,
    }
    return row("bigscience", model, cluster, plan, {"oom": None, **result}, **more)


def test_bloom_on_two_levels_of_links() -> None:
    model = {"size": "181B", "layers": 72, "hidden": 14336}
    plan = {"tp": 4, "pp": 12, "dp": 8, "microbatch": 2}
    found = rows.parse(bloom(model, plan, {"step_s": 113.54, "tflops_per_gpu": 141.99, "mem_gb": 38.0}, line=802))
    assert sizes(found) == (72, 14336, 64, 57344, 250880)
    assert found.mesh == MeshShape(pipeline=12, inter=4, intra=2, tensor=4)
    assert (found.system, found.layout.name, found.schedule, found.microbatches) == (
        "megatron-deepspeed",
        "NNG",
        "1f1b",
        128,
    )
    assert found.layers_per_stage == (6,) * 12
    assert (found.use.attention, found.use.recompute, found.use.compute) == ("eager", "block", "float16")
    assert found.cluster.node.cards == 4
    assert found.cluster.network is not None
    assert found.cluster.network.rate == 12.5e9
    assert (found.step_seconds, found.gradient_bytes, found.fits, found.bytes_of) == (113.54, 2, True, "device")
    assert found.tokens_per_second_per_gpu == pytest.approx(2048 * 2048 / 384 / 113.54)
    assert found.peak_bytes == 38_000 * 2**20


def test_tensor_parallel_ranks_send_parts_which_the_next_stage_gathers() -> None:
    model = {"size": "181B", "layers": 72, "hidden": 14336}
    plan = {"tp": 4, "pp": 12, "dp": 8, "microbatch": 2}
    found = rows.parse(bloom(model, plan, {"step_s": 113.54, "tflops_per_gpu": 141.99, "mem_gb": 38.0}, line=802))
    theirs = plans.prediction_of(found, microbatches=24)
    ours = Prediction(found.model.workload, theirs.plan, theirs.cluster, found.use)
    whole = 2 * 2048 * 14336 * 2
    assert (ours.ranks.message_bytes, theirs.ranks.message_bytes) == (whole, whole // 4)
    gather = Exchange("all-gather", whole)
    for run in theirs.ranks.runs:
        for at in run:
            assert theirs.ranks.works[at].forward.count(gather) == (at == run.start > 0)
            assert theirs.ranks.works[at].backward.count(gather) == (at == run.stop - 1 < 73)


def test_bloom_with_ends_that_count_as_layers_out_of_memory() -> None:
    model = {"size": "206B", "layers": 82, "hidden": 14336, "heads": 128}
    plan = {"tp": 4, "pp": 12, "dp": 8, "microbatch": 2, "precision": "bf16, fp32 gradients"}
    plan["partition"] = "type:transformer|embedding"
    result = {"step_s": None, "tflops_per_gpu": None, "mem_gb": None, "oom": True}
    found = rows.parse(bloom(model, plan, result, line=957))
    assert found.layers_per_stage == (6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 6)
    assert (found.fits, found.step_seconds, found.peak_bytes, found.gradient_bytes) == (False, None, None, 4)


def test_bloom_layers_that_are_not_even_fill_stages_one_by_one() -> None:
    model = {"size": "182B", "layers": 78, "hidden": 13824}
    plan = {"tp": 4, "pp": 12, "dp": 8, "microbatch": 4}
    found = rows.parse(bloom(model, plan, {"step_s": 106.72, "tflops_per_gpu": 152.21, "mem_gb": None}, line=834))
    assert found.layers_per_stage == (7,) * 11 + (1,)


def test_bloom_layers_from_tflops() -> None:
    model = {"size": "191B", "layers": None, "hidden": 14400, "heads": None}
    plan = {"tp": 8, "pp": 7, "dp": 6, "microbatch": 1, "global_batch": 2046}
    early = bloom(model, plan, {"step_s": 202.99, "tflops_per_gpu": 94.2, "mem_gb": 39.0}, line=479, gpus=336)
    found = rows.parse(early)
    assert (found.model.layers, found.model.heads, found.layers_per_stage) == (77, 96, (11,) * 7)
    assert found.assumed == ("alibi", "layers", "heads")
    assert rows.read({**early, "line": 609}) is None


def test_bloom_layers_that_contradict_the_size() -> None:
    model = {"size": "187B", "layers": 96, "hidden": 13824}
    plan = {"tp": 8, "pp": 10, "dp": 4, "microbatch": 4}
    result = {"step_s": 147.43, "tflops_per_gpu": 130.53, "mem_gb": 53.0}
    assert rows.parse(bloom(model, plan, result, line=585, gpus=320)).model.layers == 80


# ---- vTrain


def test_vtrain_on_several_nodes() -> None:
    found = parse(
        "vtrain",
        {"kind": "gpt", "layers": 30, "hidden": 3072, "ffn": 12288, "heads": 32, "seq": 2048, "vocab": 50257},
        {"gpu": "A100", "per_node": 8, "gpus": 64, "inter": "4 x HDR 200 = 800 Gb/s a node"},
        {
            "tp": 2,
            "pp": 1,
            "dp": 32,
            "layout": "NNN",
            "schedule": "1f1b",
            "microbatch": 2,
            "global_batch": 512,
            "microbatches": 8,
            "recompute": "block",
            "precision": "fp16",
        },
        {"step_s": 4.2642},
    )
    assert found.mesh == MeshShape(inter=8, intra=4, tensor=2)
    assert (found.schedule, found.microbatches, found.layers_per_stage) == ("1f1b", 8, None)
    assert found.model.vocabulary == 50432
    assert found.model.dropout
    assert found.cluster.network is not None
    assert (found.cluster.node.cards, found.cluster.network.rate) == (4, 25e9)


def test_vtrain_on_one_node(tmp_path: Path) -> None:
    path = tmp_path / "vtrain.csv"
    path.write_text(
        "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
        "data parallelism,pipeline parallelism,iteration time (ms)\n"
        "2,16,8,1024,16,24,1024,1,1,2,372.160408\n"
        "8,32,2,1024,16,16,1024,4,2,1,457.697031\n",
        encoding="utf-8",
    )
    first, second = rows.read_csv(path)
    assert (first.id, second.id) == ("vtrain-s-2", "vtrain-s-3")
    assert first.mesh == MeshShape(pipeline=2)
    assert (first.layers_per_stage, first.microbatches, first.step_seconds) == ((12, 12), 2, 0.372160408)
    assert second.mesh == MeshShape(intra=2, tensor=4)
    assert second.use.recompute == "block"
    assert second.cluster.network is None


# ---- Megatron's papers


def korthikanti(**plan: Any) -> Published:
    model = {"kind": "gpt", "layers": 96, "hidden": 12288, "ffn": 49152, "heads": 96, "vocab": 51200, "seq": 2048}
    options = {"layout": "NNN", "recompute": "block", "sequence_parallel": False, "precision": "fp16", **plan}
    return parse("korthikanti", model, {**SELENE, "gpus": 64}, options, {"step_s": 18.13, "mfu": None})


def test_korthikanti_interleaves() -> None:
    plan = {"tp": 8, "pp": 8, "dp": 1, "vpp": 3, "schedule": "interleaved", "microbatch": 1, "global_batch": 64}
    found = korthikanti(**plan)
    assert (found.schedule, found.chunks, found.layers_per_stage) == ("interleaved", 3, (4,) * 24)
    assert found.cluster.node.cards == 8
    selective = korthikanti(**plan, recompute="selective", sequence_parallel=True)
    assert (selective.use.recompute, selective.use.sequence_parallel) == ("selective", True)
    with pytest.raises(UnclearError, match="96 layers are not even over 40 stages"):
        korthikanti(**{**plan, "vpp": 5})


def test_closed_forms_are_not_measured() -> None:
    assert rows.read({"id": "korth-f1", "source": "korthikanti", "kind": "formula", "model": {}, "plan": {}}) is None


def test_mt_nlg() -> None:
    found = parse(
        "mt-nlg",
        {"kind": "gpt", "layers": 105, "hidden": 20480, "ffn": 81920, "heads": 128, "seq": 2048, "vocab": 51200},
        {**A100, "gpus": 2800, "inter": "8 x HDR 200 Gb/s a node"},
        {
            "tp": 8,
            "pp": 35,
            "dp": 10,
            "layout": "NNN",
            "schedule": "1f1b",
            "microbatch": 1,
            "global_batch": 1920,
            "recompute": "block",
            "precision": "bf16",
        },
        {"step_s": 50.2, "tflops_per_gpu": 121},
    )
    assert found.mesh == MeshShape(pipeline=35, inter=10, tensor=8)
    assert (found.microbatches, found.layers_per_stage, found.step_seconds) == (192, (3,) * 35, 50.2)
    assert found.use.compute == "bfloat16"


def test_sc21_turns_tflops_into_the_days_that_it_prints() -> None:
    model = {"kind": "gpt", "layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "vocab": 51200, "seq": 2048}
    plan = {"tp": 1, "pp": 1, "dp": 768, "layout": "GGG", "global_batch": 1536}
    plan |= {"recompute": "block", "precision": "fp16"}
    cluster, result = {**A100, "gpus": 768}, {"tflops_per_gpu": 88, "days_for_300B_tokens": 74}
    found = parse("sc21", model, cluster, {**plan, "microbatch": 2}, result)
    assert (found.system, found.microbatches) == ("deepspeed", 1)
    assert found.step_seconds is not None
    assert round(found.step_seconds * 300e9 / (1536 * 2048) / 86400) == 74
    with pytest.raises(UnclearError, match="microbatch is None"):
        parse("sc21", model, cluster, plan, result)


def test_zero_3_of_2021_gathers_parameter_by_parameter_on_one_ring_and_not_ahead() -> None:
    model = {"kind": "gpt", "layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "vocab": 51200, "seq": 2048}
    plan = {"tp": 1, "pp": 1, "dp": 768, "layout": "GGG", "global_batch": 1536, "microbatch": 2}
    plan |= {"recompute": "block", "precision": "fp16"}
    found = parse("sc21", model, {**A100, "gpus": 768}, plan, {"tflops_per_gpu": 88})
    assert (found.mesh, found.reduce_bytes) == (MeshShape(intra=768), 2)
    assert found.cluster.network is not None
    assert found.cluster.network.latency == pytest.approx(12 * 767 * 3e-6)
    assert plans.plan_of(found).prefetch == 0


def test_llama_3_has_a_layer_a_stage() -> None:
    plan = {
        "tp": 8,
        "cp": 1,
        "pp": 16,
        "dp": 64,
        "layout": "parameters whole within the step, gradients and optimizer sharded (p not resharded after forward)",
        "schedule": "interleaved with tunable microbatch runs, one layer less on first and last stage",
        "batch_per_dp": 32,
        "precision": "bf16, fp32 gradients",
        "sequence_parallel": True,
        "recompute": "none (8K)",
    }
    model = {"kind": "llama", "size": "405B", "layers": 126, "hidden": 16384, "ffn": 53248, "heads": 128, "kv_heads": 8}
    model |= {"vocab": 128256, "seq": 8192}
    cluster = {"gpu": "H100-80GB", "per_node": 8, "gpus": 8192, "inter": "RoCE 400 Gb/s a GPU"}
    result = {"tflops_per_gpu": 430, "mfu": 0.43}
    found = parse("llama3", model, cluster, plan, result)
    assert (found.schedule, found.chunks, found.layers_per_stage) == ("interleaved", 8, (0, *(1,) * 126, 0))
    assert (found.layout.name, found.residency, found.gradient_bytes) == ("GGG", "step", 4)
    assert (found.use.samples, found.microbatches, found.assumed) == (1, 32, ("microbatch",))
    assert found.step_seconds == pytest.approx(12.56, abs=0.01)
    assert rows.read(row("llama3", model, cluster, {**plan, "cp": 16, "dp": 4}, result)) is None


# ---- SimuMax


def simumax(model: dict[str, Any], **plan: Any) -> dict[str, Any]:
    plan = {"ep": 1, "cp": 1, "layout": "NNG", "schedule": "1f1b", "microbatch": 1, "recompute": "none", **plan}
    plan["precision"] = "bf16, fp32 gradients"
    peaks = {"10": 64479.5, "2": 68147.3, "0": 68146.3}
    result = {"step_s": 1.4768, "peak_alloc_gib": 66.55, "peak_alloc_mib_by_rank": peaks}
    return row("simumax-b200", model, {"gpu": "B200", "gpus": 8, "per_node": 8}, plan, result)


def test_simumax_has_peaks_of_all_ranks() -> None:
    model = {"kind": "llama", "name": "llama3-70b", "layers": 12, "seq": 4096}
    found = rows.parse(simumax(model, tp=1, pp=2, dp=4, microbatches=8, sequence_parallel=False))
    assert sizes(found) == (12, 8192, 64, 28672, 128256)
    assert (found.model.kv_heads, found.mesh) == (8, MeshShape(pipeline=2, intra=4))
    assert (found.use.attention, found.use.loss, found.use.recompute) == ("flash", "fused", "none")
    assert (found.layers_per_stage, found.microbatches, found.gradient_bytes) == ((6, 6), 8, 4)
    assert found.peak_bytes_by_rank == tuple(round(mib * 2**20) for mib in (68146.3, 68147.3, 64479.5))
    assert found.peak_bytes == round(68147.3 * 2**20)
    assert found.assumed == ()


def test_simumax_of_split_contexts_has_no_plan() -> None:
    model = {"kind": "llama", "name": "llama3-70b", "layers": 12, "seq": 32768}
    assert rows.read(simumax(model, tp=2, pp=1, dp=1, cp=4, microbatches=4, sequence_parallel=True)) is None


def test_simumax_of_experts_is_predicted_within_ten_percent() -> None:
    """Eight ranks divide the experts of three layers of DeepSeek-V3 (0.6032 s, 104.3 GiB)."""
    experts = {"kind": "moe", "name": "deepseekv3", "layers": 4, "seq": 4096}
    own = simumax(experts, tp=1, pp=1, dp=8, ep=8, microbatches=4, sequence_parallel=False)
    own["result"] = {"step_s": 0.6032, "peak_alloc_gib": 104.3}
    found = rows.parse(own)
    assert (found.mesh, found.use.expert) == (MeshShape(intra=8, expert=8), 8)
    assert plans.step_of(found).predicted == pytest.approx(0.6032, rel=0.1)
    assert memory.peak_bytes(found, 0) == pytest.approx(104.3 * 2**30, rel=0.05)


# ---- Megatron-Bridge


def gpt_oss(gpu: str, gpus: int, tokens: int, **plan: Any) -> dict[str, Any]:
    plan = {"fsdp": 0, "tp": 1, "pp": 1, "cp": 1, "vpp": None, "dp": 64, "microbatch": 4, "global_batch": 1280, **plan}
    result = {"tokens_per_s_per_gpu": tokens}
    model = {"name": "GPT OSS 120B", "seq": 4096}
    return row("megatron-bridge", model, {"gpu": gpu, "gpus": gpus}, {"precision": "BF16", **plan}, result)


def test_gpt_oss_of_megatron_bridge_is_planned_by_its_scripts() -> None:
    found = rows.parse(gpt_oss("DGX-GB300", 64, 19200, ep=64))
    assert found.model.parameters == pytest.approx(116.83e9, rel=1e-3)
    assert (found.mesh, found.microbatches) == (MeshShape(intra=64, expert=64), 5)
    assert (str(found.layout), found.schedule, found.use.recompute) == ("NNG", "1f1b", "none")
    assert found.step_seconds == pytest.approx(1280 * 4096 / 64 / 19200)
    assert found.assumed == ("layout", "recompute", "network")


def test_experts_of_megatron_bridge_over_nodes_make_larger_groups() -> None:
    inside = rows.parse(gpt_oss("DGX-B300", 64, 15232, ep=8))
    across = rows.parse(gpt_oss("DGX-B300", 64, 8359, ep=64))
    assert (inside.mesh, across.mesh) == (MeshShape(inter=8, intra=8, expert=8), MeshShape(intra=64, expert=64))
    # 5.38 s and 9.80 s were measured: exchanges that leave the node are what costs.
    assert plans.step_of(across).predicted > 1.3 * plans.step_of(inside).predicted


def test_one_factor_predicts_gpt_oss_on_another_generation() -> None:
    """A GB300 of a rack, and four stages of H100: 4.27 s and 13.67 s."""
    rack, h100 = (
        plans.step_of(rows.parse(each))
        for each in (
            gpt_oss("DGX-GB300", 64, 19200, ep=64),
            gpt_oss("DGX-H100", 64, 5993, pp=4, dp=16, ep=8, microbatch=1),
        )
    )
    factor = rack.seconds / rack.predicted
    assert h100.predicted * factor == pytest.approx(h100.seconds, rel=0.2)


def test_megatron_bridge_in_eight_bits_has_no_plan() -> None:
    with pytest.raises(UnclearError, match="only GPT OSS 120B in BF16"):
        rows.parse(gpt_oss("DGX-GB300", 64, 33166, ep=16, precision="MXFP8"))


# ---- Sea AI Lab


def test_zero_bubble_has_a_layer_less_at_both_ends() -> None:
    model = {"kind": "gpt", "size": "6.2B", "layers": 30, "heads": 32, "hidden": 4096, "ffn": 16384, "seq": 1024}
    plan = {"pp": 8, "tp": 1, "dp": 1, "microbatch": 3, "microbatches": 24, "precision": "fp16"}
    result = {"samples_per_s_per_gpu": 3.88, "mem_gb": 42}
    found = parse("zero-bubble", model, {**ROCE, "gpus": 8}, {**plan, "schedule": "zb-1p"}, result)
    assert (found.schedule, found.chunks, found.layers_per_stage) == ("zb-1p", 1, (3, 4, 4, 4, 4, 4, 4, 3))
    assert (found.use.attention, found.use.recompute, found.model.vocabulary) == ("eager", "none", 32000)
    assert found.step_seconds == pytest.approx(3 * 24 / 8 / 3.88)
    assert found.peak_bytes == 42 * GIB
    most = parse("zero-bubble", model, {**ROCE, "gpus": 8}, {**plan, "schedule": "interleaved (most chunks)"}, result)
    assert (most.schedule, most.chunks, most.layers_per_stage) == ("interleaved", 4, (0, *(1,) * 30, 0))


def test_zero_bubble_of_the_first_version_names_its_models() -> None:
    model, cluster = {"kind": "gpt", "size": "14.6B", "seq": 1024}, {**ROCE, "gpus": 24}
    plan = {"pp": 24, "tp": 1, "dp": 1, "microbatch": 2, "microbatches": 72}
    result = {"samples_per_s_per_gpu": 1.84, "mem_gb": None}
    half = "zb-2p, half microbatch, twice as many"
    found = parse("zero-bubble-v1", model, cluster, {**plan, "schedule": half}, result)
    assert sizes(found) == (46, 5120, 40, 20480, 32000)
    assert (found.schedule, found.use.samples, found.microbatches) == ("zb-2p", 1, 144)
    assert found.step_seconds == pytest.approx(144 / 24 / 1.84)
    assert found.assumed == ("vocabulary", "network", "precision")
    folded = parse("zero-bubble-v1", model, cluster, {**plan, "schedule": "zb-v"}, result)
    assert (folded.schedule, folded.chunks, folded.layers_per_stage) == ("zb-v", 2, (0, *(1,) * 46, 0))
    unknown = {**model, "size": "9B"}
    assert rows.read(row("zero-bubble-v1", unknown, cluster, {**plan, "schedule": "zb-v"}, result)) is None


def vocabulary(method: str, schedule: str = "1f1b", **result: Any) -> dict[str, Any]:
    model = {"kind": "gpt", "layers": 32, "heads": 24, "hidden": 3072, "ffn": 12288, "seq": 2048, "vocab": 32768}
    model["tied"] = False
    plan = {"pp": 8, "tp": 1, "dp": 1, "schedule": schedule, "method": method, "microbatch": 1, "microbatches": 128}
    plan["precision"] = "fp16/bf16"
    return row("vocabulary-parallelism", model, {**ROCE, "gpus": 8}, plan, {"oom": None, **result})


def test_vocabulary_parallelism_prints_utilization() -> None:
    found = rows.parse(vocabulary("baseline", mfu=0.4616, peak_gb=14.86))
    assert (found.vocabulary, found.layers_per_stage, found.model.tied) == (0, (4,) * 8, False)
    assert found.use.attention == "flash"
    assert found.step_seconds == pytest.approx(5.634, abs=1e-3)
    assert found.peak_bytes == round(14.86 * GIB)
    assert rows.parse(vocabulary("vocab-2", mfu=0.5, peak_gb=14.8)).vocabulary == 2
    folded = rows.parse(vocabulary("baseline", "v-half", mfu=None, peak_gb=None, oom=True))
    assert (folded.chunks, folded.layers_per_stage, folded.fits, folded.step_seconds) == (2, (2,) * 16, False, None)
    with pytest.raises(UnclearError, match="'redis'"):
        rows.parse(vocabulary("redis", mfu=0.5, peak_gb=14.8))


@pytest.mark.slow
def test_what_a_split_vocabulary_gains() -> None:
    """Steps of the page's table 5, for eight devices, 2048 tokens and 32k rows."""
    whole, split = (
        plans.step_of(rows.parse(vocabulary(method, mfu=mfu, peak_gb=14.8)))
        for method, mfu in (("baseline", 0.4616), ("vocab-2", 0.5023))
    )
    assert split.predicted / whole.predicted == pytest.approx(split.seconds / whole.seconds, rel=0.05)


def test_nccl_sends_what_all_slices_are_given_once() -> None:
    row = rows.parse(vocabulary("vocab-2", mfu=0.5, peak_gb=14.8))
    theirs = plans.prediction_of(row, microbatches=8)
    ours = Prediction(row.model.workload, theirs.plan, theirs.cluster, row.use)
    last = (Do.SEND_F, 7)
    assert ours.rates[7].messages[last] == 7 * theirs.rates[7].messages[last] > 0
    assert theirs.seconds < ours.seconds


# ---- fully sharded


def foundry(table: str, gpu: str, gpus: int, **plan: Any) -> dict[str, Any]:
    model = {"kind": "mpt", "size": "70b", "params": 64862437376, "seq": 2048, "vocab": 50368}
    plan = {"tp": 1, "pp": 1, "dp": gpus, "layout": "GGG", "microbatch": 8, "recompute": "block", **plan}
    result = {"mfu": 0.5333, "tokens_per_s": 26274, "tokens_per_s_per_gpu": 410}
    return row("llm-foundry", model, {"gpu": gpu, "gpus": gpus, "per_node": 8}, plan, result, table=table)


def test_llm_foundry_counts_the_layers_from_the_parameters() -> None:
    table = "A100 80GB with 1600 Gbps node-node interconnect (RoCE)"
    plan = {"microbatches": 4, "global_batch": 2048, "precision": "bf16", "mp_mode": "PURE"}
    found = rows.parse(foundry(table, "a100_80gb", 64, **plan))
    assert sizes(found) == (80, 8192, 64, 32768, 50368)
    assert found.model.parameters == 64862437376
    assert (found.mesh, found.microbatches) == (MeshShape(inter=8, intra=8), 4)
    assert found.cluster.network is not None
    assert (found.cluster.node.cards, found.cluster.network.rate, found.assumed) == (8, 25e9, ())
    assert (found.gradient_bytes, found.reduce_bytes, found.tokens_per_second_per_gpu) == (4, 2, 410)
    assert found.step_seconds == pytest.approx(2048 * 2048 / 64 / 410)


def test_llm_foundry_does_not_name_the_network_of_h100() -> None:
    plan = {"microbatches": 1, "global_batch": 2048, "precision": "amp_bf16", "mp_mode": "DEFAULT"}
    found = rows.parse(foundry("H100 80GB BF16 (Large Scale, >= 128 GPUs)", "h100_80gb", 256, **plan))
    assert (found.assumed, found.reduce_bytes) == (("network",), 4)
    assert rows.read(foundry("H100 80GB FP8", "h100_80gb", 8, **{**plan, "precision": "amp_fp8"})) is None
    with pytest.raises(UnclearError, match="a global batch of 2000"):
        rows.parse(foundry("H100 80GB BF16", "h100_80gb", 256, **{**plan, "global_batch": 2000}))


def torchtitan(gpu: str = "H100-96GB HBM2e 500W", **plan: Any) -> dict[str, Any]:
    model = {"kind": "llama3", "size": "70B", "layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8}
    model |= {"vocab": 128256, "seq": 8192}
    plan = {"dp": 32, "tp": 8, "pp": 1, "layout": "GGG", "microbatch": 16, "recompute": "block", **plan}
    cluster = {"gpu": gpu, "per_node": 8, "inter": "RDMA 400 Gb/s a GPU", "gpus": 256}
    return row("torchtitan", model, cluster, plan, {"tokens_per_s_per_gpu": 597.3, "mem_gib": 82.4})


def test_torchtitan_on_devices_of_other_sizes() -> None:
    found = rows.parse(torchtitan(precision="bf16", compile=True))
    assert (found.mesh, found.microbatches) == (MeshShape(inter=32, tensor=8), 1)
    assert (found.compiled, found.use.sequence_parallel, found.assumed) == (True, True, ("microbatches",))
    assert (found.cluster.device.memory, found.cluster.device.bandwidth) == (96 * GIB, 2.4e12)
    assert (found.peak_bytes, found.bytes_of) == (round(82.4 * GIB), "reserved")
    assert rows.read(torchtitan(precision="float8 tensorwise")) is None
    assert rows.read(torchtitan(precision="bf16", recompute="selective op")) is None
    assert rows.read(torchtitan("TPU", precision="bf16")) is None


def test_fms_fsdp_in_groups() -> None:
    model = {"kind": "llama2", "size": "7b", "seq": 4096, "vocab": 32000}
    cluster = {"gpu": "A100-80GB, 400 Gb/s a node", "gpus": 128, "per_node": 8}
    plan = {"dp": 128, "tp": 1, "pp": 1, "layout": "III", "microbatch": 2, "recompute": "none", "precision": "bf16"}
    result = {"tokens_per_s_per_gpu": 4550, "mfu": 0.68}
    found = parse("fms-fsdp", model, cluster, {**plan, "compile": True}, result)
    assert sizes(found) == (32, 4096, 32, 11008, 32000)
    assert (found.mesh, found.layout.name) == (MeshShape(inter=16, intra=8), "III")
    assert found.cluster.network is not None
    assert found.cluster.node.cards * found.cluster.network.rate == 50e9
    assert rows.read(row("fms-fsdp", model, cluster, {**plan, "recompute": "selective"}, result)) is None


# ---- Megatron's tests


def ci(test: str, arguments: dict[str, str], *, gpu: str = "H100-80GB", model: dict[str, Any] | None = None,
       **plan: Any) -> dict[str, Any]:  # fmt: skip
    sizes = {"kind": "gpt", "layers": 12, "hidden": 512, "heads": 8, "seq": 1024, "ffn": 2048} | (model or {})
    cluster = {"gpu": gpu, "gpus": 4 if gpu == "GB200" else 8, "note": "one node; 4 GPUs for gb200 assumed"}
    plan = {"tp": 1, "pp": 4, "cp": 1, "layout": "NNN", "microbatch": 4, "global_batch": 32, **plan}
    plan["megatron_args"] = {"bf16": "true", "transformer-impl": "transformer_engine", **arguments}
    result = {"rest_bytes": 545259520.0, "peak_bytes": 2437939200.0, "step_s_median": 0.1, "rank": "last"}
    table = f"tests/functional_tests/test_cases/{sizes['kind']}/{test}"
    return row("megatron-ci", sizes, cluster, plan, result, table=table)


def test_ci_reads_arguments() -> None:
    arguments = {"num-layers-per-virtual-pipeline-stage": "1", "attention-backend": "unfused"}
    found = rows.parse(ci("gpt3_vp1", arguments, dp=2, layout="NNG"))
    assert sizes(found) == (12, 512, 8, 2048, 50304)
    assert (found.schedule, found.chunks, found.layers_per_stage) == ("interleaved", 3, (1,) * 12)
    assert (found.mesh, found.microbatches) == (MeshShape(pipeline=4, intra=2), 4)
    assert (found.use.attention, found.use.loss, found.gradient_bytes) == ("eager", "eager", 4)
    assert (found.model.tied, found.model.dropout, found.model.positions) == (True, True, 1024)
    assert (found.rest_bytes, found.peak_bytes, found.bytes_on) == (545259520, 2437939200, "last")


def test_ci_reads_sizes() -> None:
    arguments = {
        "group-query-attention": "true",
        "num-query-groups": "2",
        "swiglu": "true",
        "normalization": "RMSNorm",
        "disable-bias-linear": "true",
        "position-embedding-type": "rope",
        "untie-embeddings-and-output-weights": "true",
        "hidden-dropout": "0.0",
        "attention-dropout": "0.0",
        "cross-entropy-loss-fusion": "true",
        "sequence-parallel": "true",
        "tokenizer-type": "NullTokenizer",
        "vocab-size": "131073",
    }
    found = rows.parse(ci("gpt3_sizes", arguments, tp=4, pp=1, dp=2))
    model = found.model
    assert (model.ffn, model.kv_heads, model.gated, model.norm, model.biases) == (1344, 2, True, 1, False)
    assert (model.rotary, model.positions, model.tied, model.dropout) == (True, 0, False, False)
    assert (model.vocabulary, found.assumed) == (131584, ())
    assert (found.use.attention, found.use.loss, found.use.sequence_parallel) == ("flash", "fused", True)


def test_ci_has_two_nodes_of_gb200_unless_it_says_one() -> None:
    assert rows.parse(ci("gpt3_te", {}, gpu="GB200", dp=1)).mesh == MeshShape(pipeline=4, intra=2)
    assert rows.parse(ci("gpt3_te_1node", {}, gpu="GB200", dp=1)).mesh == MeshShape(pipeline=4)


def test_ci_splits_layers_and_the_optimizer_as_arguments_say() -> None:
    ends = {"decoder-first-pipeline-num-layers": "2", "decoder-last-pipeline-num-layers": "2"}
    assert rows.parse(ci("gpt3_uneven", ends, dp=2)).layers_per_stage == (2, 4, 4, 2)
    shared = {"num-distributed-optimizer-instances": "2"}
    found = rows.parse(ci("gpt3_instances", shared, tp=2, pp=1, dp=4, layout="NNG"))
    assert (found.layout.name, found.mesh) == ("NNI", MeshShape(inter=2, intra=2, tensor=2))
    sharded = {"use-megatron-fsdp": "true", "data-parallel-sharding-strategy": "optim_grads_params"}
    found = rows.parse(ci("gpt3_fsdp", sharded, tp=2, pp=1, dp=4, layout="NNG"))
    assert (found.layout.name, found.system) == ("GGG", "megatron-fsdp")


def test_ci_bert() -> None:
    model = {"kind": "bert", "layers": 24, "hidden": 1024, "heads": 16, "seq": 512}
    found = rows.parse(ci("bert_pp2", {"attention-backend": "unfused"}, model=model, pp=2, dp=4, global_batch=128))
    assert (found.model.causal, found.model.vocabulary, found.layers_per_stage) == (False, 30592, (12, 12))


@pytest.mark.parametrize(
    ("test", "arguments", "plan"),
    [
        ("gpt3_cp2", {}, {"tp": 2, "pp": 2, "cp": 2, "dp": 1}),
        ("gpt3_mla", {"multi-latent-attention": "true"}, {"dp": 2}),
        ("gpt3_fp8", {"fp8-format": "hybrid"}, {"dp": 2}),
        ("gpt_grpo_8b", {}, {"dp": 2}),
        ("gpt3_experts", {"num-experts": "8"}, {"dp": 2}),
        ("gpt3_rampup", {}, {"dp": 2, "global_batch": None}),
        ("gpt3_too_large", {}, {"tp": 8, "pp": 8, "dp": 1}),
        ("gpt3_tokenizer", {"tokenizer-type": "TikTokenizer"}, {"dp": 2}),
    ],
)
def test_ci_leaves_out_what_no_plan_says(test: str, arguments: dict[str, str], plan: dict[str, Any]) -> None:
    assert rows.read(ci(test, arguments, **plan)) is None


# ---- sources that say too little


@pytest.mark.parametrize("source", ["megascale", "megatron-bridge", "paro", "pipeoffload", "unheard-of", None])
def test_sources_without_a_reader(source: str | None) -> None:
    bare = {"id": "1", "source": source, "kind": "measured", "model": {}, "cluster": {}, "plan": {}, "result": {}}
    assert rows.read(bare) is None
    with pytest.raises(UnclearError):
        rows.parse(bare)


@pytest.mark.parametrize("source", sorted(rows.READERS))
def test_empty_rows_are_unclear(source: str) -> None:
    assert rows.read({"id": "1", "source": source, "kind": "measured"}) is None
