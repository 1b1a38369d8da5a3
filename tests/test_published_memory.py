"""Bytes of published rows against their measurements, and files of rows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.prediction.cost.calibration import LIMITS
from benchmarks.published import memory, predict, rows
from benchmarks.published.rows import Published

GIB = 2**30
MIB = 2**20
A100 = {"gpu": "A100-80GB", "gpus": 8, "per_node": 8, "inter": "RoCE"}
CASES = "tests/functional_tests/test_cases/"


def row(source: str, **tables: Any) -> dict[str, Any]:
    return {"id": f"{source}-1", "source": source, "kind": "measured", **tables}


# ---- Megatron's tests


def ci(test: str, model: dict[str, Any], plan: dict[str, Any], arguments: str, *, gpu: str, rest: int,
       peak: int) -> Published:  # fmt: skip
    pairs = (each.partition("=") for each in arguments.split())
    plan = {"cp": 1, "pp": 1, "layout": "NNN", **plan}
    plan["megatron_args"] = {name: value or "true" for name, _, value in pairs}
    cluster = {"gpu": gpu, "gpus": 8, "per_node": 8}
    result = {"rest_bytes": float(rest), "peak_bytes": float(peak)}
    return rows.parse(row("megatron-ci", table=CASES + test, model=model, cluster=cluster, plan=plan, result=result))


def gpt3_7b(*, gpu: str, rest: int, peak: int) -> Published:
    arguments = (
        "group-query-attention num-query-groups=8 untie-embeddings-and-output-weights tokenizer-type=NullTokenizer "
        "vocab-size=131073 transformer-impl=transformer_engine tensor-model-parallel-size=4 overlap-grad-reduce "
        "overlap-param-gather no-gradient-accumulation-fusion bf16"
    )
    model = {"kind": "gpt", "layers": 32, "hidden": 4096, "heads": 32, "seq": 8192, "ffn": 16384}
    plan = {"tp": 4, "dp": 2, "layout": "NNG", "microbatch": 2, "global_batch": 8}
    return ci("gpt/gpt3_7b_tp4_pp1_memory_speed", model, plan, arguments, gpu=gpu, rest=rest, peak=peak)


def bert(*, rest: int, peak: int) -> Published:
    model = {"kind": "bert", "layers": 24, "hidden": 1024, "heads": 16, "seq": 512, "ffn": 4096}
    plan = {"tp": 1, "pp": 2, "dp": 4, "microbatch": 4, "global_batch": 128}
    arguments = "tensor-model-parallel-size=1 no-gradient-accumulation-fusion bf16 attention-backend=unfused"
    return ci("bert/bert_mcore_tp1_pp2", model, plan, arguments, gpu="A100-80GB", rest=rest, peak=peak)


@pytest.mark.parametrize(
    "found",
    [
        gpt3_7b(gpu="H100-80GB", rest=19_706 * MIB, peak=54_497 * MIB),
        bert(rest=3_375_511_040, peak=5_631_605_760),
    ],
    ids=["gpt3-7b", "bert"],
)
def test_tests_of_megatron_within_one_percent(found: Published) -> None:
    last = found.mesh.pipeline - 1
    assert memory.rest_bytes(found, last) == pytest.approx(found.rest_bytes, rel=0.01)
    assert memory.peak_bytes(found, last) == pytest.approx(found.peak_bytes, rel=0.01)


def test_workspaces_grow_by_28_mib_from_a100_to_h100() -> None:
    old, new = (gpt3_7b(gpu=gpu, rest=1, peak=1) for gpu in ("A100-80GB", "H100-80GB"))
    assert memory.rest_bytes(new, 0) - memory.rest_bytes(old, 0) == 28 * MIB


def test_fp32_gradients_of_fp16_ones_are_gone_when_the_step_begins() -> None:
    half = replace(gpt3_7b(gpu="H100-80GB", rest=1, peak=1), gradient_bytes=2)
    half = replace(half, use=replace(half.use, compute="float16"))
    held = memory.bytes_of(half)
    rest, peak = held.rest[0], held.peak[0]
    # 2 ranks share the optimizer: masters and both moments are 6 bytes a parameter, fp32 gradients 2.
    assert (rest.parameters, rest.optimizer) == (peak.parameters, peak.optimizer)
    assert rest.gradients - peak.gradients == rest.optimizer // 3


# ---- SimuMax


def simumax(*, sequence: int, **plan: Any) -> dict[str, Any]:
    words = {
        "ep": 1, "layout": "NNG", "schedule": "1f1b", "microbatch": 1, "microbatches": 8, "recompute": "none",
        "precision": "bf16, fp32 gradients", **plan,
    }  # fmt: skip
    model = {"kind": "llama", "name": "llama3-70b", "layers": 12, "seq": sequence}
    cluster = {"gpu": "B200", "gpus": 8, "per_node": 8}
    return row("simumax-b200", model=model, cluster=cluster, plan=words, result={"step_s": 1.4768})


def test_llama_of_simumax_on_each_stage() -> None:
    found = rows.parse(simumax(sequence=4096, tp=1, pp=2, dp=4, cp=1, sequence_parallel=False))
    assert found.fuses_gradients
    assert memory.peak_bytes(found, 0) == pytest.approx(68_149 * MIB, rel=0.01)
    assert memory.peak_bytes(found, 1) == pytest.approx(64_480 * MIB, rel=0.01)


def test_context_parallelism_has_bytes_without_seconds() -> None:
    asked = simumax(sequence=32768, tp=2, pp=1, dp=1, cp=4, sequence_parallel=True)
    failed: Counter[str] = Counter()
    found = predict.predict(asked, {}, failed)
    assert found.step_seconds is None
    assert found.peak_bytes == pytest.approx(70_070 * MIB, rel=0.02)
    assert failed == {"UnclearError: cp = 4 has no plan": 1}


# ---- Sea AI Lab


def zero_bubble(schedule: str) -> Published:
    model = {"kind": "gpt", "size": "6.2B", "layers": 30, "heads": 32, "hidden": 4096, "ffn": 16384, "seq": 1024}
    plan = {"pp": 8, "tp": 1, "dp": 1, "schedule": schedule, "microbatch": 3, "microbatches": 32, "precision": "fp16"}
    result = {"samples_per_s_per_gpu": 4.0, "mem_gb": 1}
    return rows.parse(row("zero-bubble", model=model, cluster=A100, plan=plan, result=result))


@pytest.mark.parametrize(("schedule", "gib"), [("1f1b", 39), ("zb-1p", 42), ("zb-2p", 70)])
def test_zero_bubble_fills_its_limit(schedule: str, gib: int) -> None:
    assert fullest(zero_bubble(schedule)) == pytest.approx(gib * GIB, rel=0.03)


def vocabulary(method: str, vocabulary: int, **other: Any) -> Published:
    model = {
        "kind": "gpt", "size": "4B", "layers": 32, "heads": 24, "hidden": 3072, "ffn": 12288, "seq": 2048,
        "vocab": vocabulary, "tied": False,
    }  # fmt: skip
    plan = {
        "pp": 8, "tp": 1, "dp": 1, "schedule": "1f1b", "method": method, "microbatch": 1, "microbatches": 128,
        "precision": "fp16/bf16",
    }  # fmt: skip
    cluster = {**A100, "gpus": other.get("pp", 8)}
    model |= {key: value for key, value in other.items() if key in model}
    plan |= {key: value for key, value in other.items() if key in plan}
    result = {"mfu": 0.4, "peak_gb": 1.0, "oom": None}
    return rows.parse(row("vocabulary-parallelism", model=model, cluster=cluster, plan=plan, result=result))


@pytest.mark.parametrize(
    ("method", "size", "gib"),
    [("baseline", 32768, 14.86), ("baseline", 131072, 19.25), ("vocab-1", 262144, 18.59), ("vocab-2", 32768, 14.83)],
)
def test_split_and_whole_vocabularies(method: str, size: int, gib: float) -> None:
    assert fullest(vocabulary(method, size)) == pytest.approx(gib * GIB, rel=0.01)


@pytest.mark.parametrize(("method", "size", "gib"), [("baseline", 262144, 46.77), ("vocab-1", 262144, 15.02)])
def test_split_and_whole_vocabularies_on_a_v(method: str, size: int, gib: float) -> None:
    found = vocabulary(method, size, schedule="v-half", pp=16, heads=32, hidden=4096, ffn=16384)
    assert fullest(found) == pytest.approx(gib * GIB, rel=0.02)


def fullest(row: Published) -> int:
    return max(memory.peak_bytes(row, rank) for rank in range(row.mesh.pipeline))


def test_more_microbatches_than_a_pipeline_holds_change_nothing() -> None:
    found = vocabulary("baseline", 32768)
    assert memory.bytes_of(replace(found, microbatches=64)) == memory.bytes_of(found)
    assert fullest(replace(found, microbatches=4)) < fullest(found)


# ---- BLOOM


def bloom(**plan: int) -> Published:
    model = {
        "kind": "gpt", "size": "181B", "layers": 72, "hidden": 14336, "ffn": 57344, "heads": 64, "vocab": 250880,
        "seq": 2048,
    }  # fmt: skip
    words = {
        "layout": "NNG", "schedule": "1f1b", "global_batch": 2048, "recompute": "block", "precision": "fp16",
        "partition": "layers evenly", **plan,
    }  # fmt: skip
    cluster = {**A100, "gpus": 384, "inter": "4 x Omni-Path 100 Gb/s a node"}
    result = {"step_s": 113.54, "tflops_per_gpu": None, "mem_gb": None, "oom": None}
    return rows.parse(row("bigscience", model=model, cluster=cluster, plan=words, result=result, line=802))


def test_bloom_fits_where_it_ran() -> None:
    ran = bloom(tp=8, pp=2, dp=24, microbatch=1, global_batch=2016)
    assert memory.fits(ran)
    assert fullest(ran) == pytest.approx(65_000 * MIB, rel=0.05)
    assert not memory.fits(bloom(tp=2, pp=6, dp=32, microbatch=1))


# ---- files


CSV = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)\n"
    "2,16,8,1024,16,24,1024,1,1,2,372.160408\n"
    "8,32,2,1024,16,16,1024,4,2,1,457.697031\n"
    "8,nonsense\n"
)


def predicted(path: Path, *options: str) -> list[dict[str, Any]]:
    out = path.with_name("out.json")
    predict.main([str(path), *options, "--out", str(out)])
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def test_rows_that_say_too_little_are_null_and_stop_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(CSV)
    first, second, third = predicted(path)
    assert (first["id"], second["id"], third["id"]) == ("vtrain-s-2", "vtrain-s-3", "vtrain-s-4")
    assert first["step_seconds"] > 0.0
    assert first["tokens_per_second_per_gpu"] == pytest.approx(16 * 1024 / 2 / first["step_seconds"])
    assert len(second["peak_bytes_by_rank"]) == 8
    assert second["fits"] is True
    assert set(third.values()) == {"vtrain-s-4", None}
    assert "1 x UnclearError" in capsys.readouterr().err


def test_forms_of_a_file_are_one(tmp_path: Path) -> None:
    lines = rows.rows_of_csv(_written(tmp_path / "rows.csv", CSV))
    forms = {
        "table.json": json.dumps({"rows": lines}),
        "list.json": json.dumps(lines),
        "lines.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
    }
    assert [predict.read(_written(tmp_path / name, text)) for name, text in forms.items()] == [list(lines)] * 3


@pytest.mark.slow
def test_calibration_carries_constants_to_other_clusters(tmp_path: Path) -> None:
    path = _written(tmp_path / "rows.csv", CSV)
    constants = predict.constants_of(predict.read(path))
    assert set(constants) <= set(LIMITS)
    assert "network.reach" not in constants
    plain, fitted = predicted(path), predicted(path, "--calibrate", str(path))
    measured = (0.372160408, 0.457697031)
    errors = [
        sum(abs(each["step_seconds"] / seconds - 1.0) for each, seconds in zip(found, measured, strict=False))
        for found in (plain, fitted)
    ]
    assert errors[1] < errors[0]
    assert [each["peak_bytes"] for each in plain] == [each["peak_bytes"] for each in fitted]


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
