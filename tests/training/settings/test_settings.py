"""Settings of other systems: they parse, their keys exist in the version that is named, and what is lost is said."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from atoll.base.errors import ConfigError
from atoll.cli.main import app
from atoll.plans.ir.text import from_csv
from atoll.plans.layouts import ALL_LAYOUTS, EFFECTIVE, Layout
from atoll.prediction.cost import Cluster
from atoll.runtime.models import Decoder, DecoderConfig
from atoll.testing import run_ranks
from atoll.training.config import Config, from_dict, load
from atoll.training.config.deepspeed import translate, zero_block
from atoll.training.settings import SYSTEMS, Settings, settings_for
from atoll.training.settings.convert import convert
from atoll.training.setup.prediction import predict_plan

MODEL = {"layers": 8, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 160, "vocabulary": 1000}

NO_BALANCE: Mapping[str, float] = {}
DATA: Mapping[str, Any] = {"sequence": 32}

TORCHTITAN = {
    "model": "name flavor hf_assets_path converters",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "training": "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload "
    "dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug dataloader",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
    "tensor_parallel_degree pipeline_parallel_degree module_fqns_per_model_part pipeline_parallel_layers_per_stage "
    "pipeline_parallel_schedule pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size "
    "expert_parallel_degree expert_tensor_parallel_degree context_parallel_degree",
    "activation_checkpoint": "mode selective_ac_option early_stop memory_budget preserve_rng_state",
    "compile": "enable components backend",
    "quantize": "linear",
}
"""Keys of torchtitan 0.2.2, torchtitan/config/job_config.py, by table."""

MEGATRON = """
--adam-beta1 --adam-beta2 --adam-eps --attention-dropout --bf16 --ckpt-format --clip-grad
--context-parallel-size --cp-comm-type
--data-parallel-sharding-strategy --disable-bias-linear --expert-model-parallel-size --expert-tensor-parallel-size
--ffn-hidden-size --fp16 --global-batch-size
--group-query-attention --hidden-dropout --hidden-size --lr --lr-decay-style --lr-warmup-iters
--max-position-embeddings --micro-batch-size --min-lr --moe-ffn-hidden-size --moe-grouped-gemm --moe-layer-freq
--moe-router-bias-update-rate --moe-router-dtype --moe-router-enable-expert-bias --moe-router-group-topk
--moe-router-load-balancing-type --moe-router-num-groups --moe-router-pre-softmax --moe-router-score-function
--moe-router-topk --moe-router-topk-scaling-factor --moe-shared-expert-intermediate-size
--moe-token-dispatcher-type --num-experts --norm-epsilon --normalization --num-attention-heads
--num-distributed-optimizer-instances --num-layers --num-query-groups --outer-dp-sharding-strategy
--overlap-grad-reduce --overlap-param-gather --pipeline-model-parallel-layout --pipeline-model-parallel-size
--position-embedding-type --recompute-granularity --recompute-method --recompute-num-layers --rotary-base
--seq-length --sequence-parallel --swiglu --tensor-model-parallel-size --train-iters
--untie-embeddings-and-output-weights --use-distributed-optimizer --use-megatron-fsdp --weight-decay
"""
"""Flags of Megatron-LM core_v0.19.0, megatron/training/arguments.py and the dataclasses that it makes flags from."""

DEEPSPEED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "zero_optimization",
    "bf16",
    "fp16",
    "data_types",
    "tensor_parallel",
    "expert_parallel",
    "sequence_parallel_size",
}
"""Keys of DeepSpeed 0.19.2, deepspeed/runtime/constants.py and deepspeed/runtime/config.py."""

CLUSTER = Cluster.of(
    {
        "device": {"preset": "h100-80gb"},
        "node": {"devices": 8, "link": {"preset": "nvlink4"}},
        "network": {"preset": "infiniband-ndr"},
    }
)

TORCH_SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")


def config(
    *,
    model: dict[str, Any] = MODEL,
    router: Mapping[str, float] = NO_BALANCE,
    data: Mapping[str, Any] = DATA,
    **parallel: Any,
) -> Config:
    plain = {"ranks": 16, "pipeline": 2, "intra": 4, "layout": "NNG"}
    train = {"global_batch": 64, "microbatch": 2, "precision": "bf16", "router": dict(router)}
    return from_dict({"model": model, "data": dict(data), "train": train, "parallel": plain | parallel})


def settings(system: str, **parallel: Any) -> Settings:
    own = config(**parallel)
    return settings_for(system, own, predict_plan(own, own.to_plan(), None))


CASES: tuple[dict[str, Any], ...] = (
    *({"layout": layout.name} for layout in EFFECTIVE),
    *({"layout": layout.name, "pipeline": 1} for layout in EFFECTIVE),
    *(
        {"schedule": name}
        for name in ("gpipe", "interleaved", "breadth-first", "zb-h1", "zb-v", "v-half", "dualpipe-v")
    ),
    {"tensor": 2, "sequence_parallel": True, "intra": 2},
    {"recompute": "block", "residency": "step", "layout": "GGG"},
    {"recompute": "selective", "reduction": "step", "layout": "GGG", "unit": 2, "prefetch": 0},
    {"vocabulary": True, "post_validation": True, "schedule": "zb-h2"},
    {"ranks": 1, "pipeline": 1, "intra": 1, "layout": "NNN"},
    {"expert": 4, "layout": "NGG", "pipeline": 1},
    {"sequence": 4, "layout": "GGG", "pipeline": 1},
    {"sequence": 2, "layout": "III"},
    {"sequence": 2, "layout": "NNN", "tensor": 2, "sequence_parallel": True},
    {"expert": 2, "expert_layout": "III", "layout": "IIG", "tensor": 2},
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_torchtitan_toml_parses_and_has_its_keys(case: dict[str, Any]) -> None:
    found = settings("torchtitan", **case)
    tables = tomllib.loads(found.files["torchtitan.toml"])
    assert {(table, key) for table, own in tables.items() for key in own} <= {
        (table, key) for table, keys in TORCHTITAN.items() for key in keys.split()
    }
    own = tables["parallelism"]
    plan = config(**case).to_plan()
    degrees = own["data_parallel_replicate_degree"] * own["data_parallel_shard_degree"]
    degrees *= own.get("context_parallel_degree", 1)
    assert degrees * own["tensor_parallel_degree"] * own["pipeline_parallel_degree"] == plan.mesh.world
    if plan.mesh.pipeline > 1:
        parts = own["module_fqns_per_model_part"]
        names = [name for part in parts for name in part]
        assert names == ["tok_embeddings", *(f"layers.{at}" for at in range(8)), "norm", "output"]
        assert tables["training"]["local_batch_size"] == plan.microbatch * plan.schedule.microbatches
        csv = own.get("pipeline_parallel_schedule_csv")
        assert own["pipeline_parallel_schedule"] in (("PipelineScheduleMulti",) if csv else TORCH_SCHEDULES)
        if csv:
            again = from_csv(found.files[csv], placement=plan.schedule.placement)
            assert again.actions == plan.schedule.actions


@pytest.mark.parametrize(
    ("flavor", "sizes"),
    [
        ("8B", {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336}),
        ("70B", {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672}),
        ("405B", {"hidden": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "ffn": 53248}),
    ],
)
def test_torchtitans_flavors_are_the_models_of_llama_3(flavor: str, sizes: dict[str, int]) -> None:
    """Table 3 of arXiv 2407.21783, in both directions; any other size is none of them."""
    assert convert({"model": {"flavor": flavor}}, "torchtitan").tables["model"] == sizes

    def exported(**model: Any) -> Settings:
        return settings("torchtitan", model=MODEL | model, pipeline=1)

    found = exported(**sizes)
    assert tomllib.loads(found.files["torchtitan.toml"])["model"]["flavor"] == flavor
    assert not any("the sizes of the model" in limit for limit in found.limits)
    other = exported(**sizes | {"layers": sizes["layers"] + 1})
    assert tomllib.loads(other.files["torchtitan.toml"])["model"]["flavor"] != flavor
    assert any(f"n_layers {sizes['layers'] + 1}" in limit for limit in other.limits)


@pytest.mark.parametrize(
    "given",
    [
        {"layout": "GGG", "expert": 4},
        {"layout": "III", "expert": 2},
        {"layout": "III", "expert": 4, "tensor": 2},
        {"layout": "GGG", "expert": 2, "tensor": 2, "pipeline": 1},
    ],
    ids=str,
)
def test_experts_are_read_back_from_torchtitans_toml(given: dict[str, Any]) -> None:
    found = settings("torchtitan", **given, residency="action")
    tables = tomllib.loads(found.files["torchtitan.toml"])
    mesh = config(**given).to_plan().mesh
    own = tables["parallelism"]
    assert (own["expert_parallel_degree"], own["expert_tensor_parallel_degree"]) == (mesh.expert * mesh.tensor, 1)
    read = from_dict(convert(tables, "torchtitan").tables).to_plan().mesh
    assert (read.expert, read.tensor, read.data) == (mesh.expert, mesh.tensor, mesh.data)
    assert "expert" not in str(tomllib.loads(settings("torchtitan", layout="GGG").files["torchtitan.toml"]))


def test_experts_are_read_back_from_deepspeeds_json() -> None:
    found = settings("deepspeed", layout="NGG", pipeline=1, expert=4)
    values = json.loads(found.files["deepspeed.json"])
    assert values["expert_parallel"] == {"enabled": True, "autoep_size": 4}
    assert from_dict(convert(values, "deepspeed").tables).parallel.expert == 4
    assert not any("experts" in limit for limit in found.limits)


@pytest.mark.parametrize("given", [{"layout": "GGG"}, {"tensor": 2}], ids=str)
def test_deepspeed_divides_no_experts_with_zero_3_or_tensor_parallelism(given: dict[str, Any]) -> None:
    found = settings("deepspeed", **given, pipeline=1, expert=2)
    assert "expert_parallel" not in json.loads(found.files["deepspeed.json"])
    assert any(limit.startswith("experts that 2 ranks divide") for limit in found.limits)


def test_megatrons_flags_of_experts() -> None:
    """With tensor parallelism it wants sequence parallelism."""
    found = settings("megatron", expert=4)
    (script,) = found.files.values()
    assert "--expert-model-parallel-size 4\n    --expert-tensor-parallel-size 1\n" in script
    assert "--moe-token-dispatcher-type alltoall" in script
    assert "--sequence-parallel" not in script
    assert [limit for limit in found.limits if "experts" in limit] == [
        "the experts of the model: --num-experts, --moe-ffn-hidden-size, --moe-router-topk, "
        "--moe-router-score-function and other flags of its router"
    ]
    for sequence in (False, True):
        found = settings("megatron", expert=2, tensor=2, sequence_parallel=sequence)
        (script,) = found.files.values()
        assert "--expert-model-parallel-size 4\n" in script
        assert script.count("--sequence-parallel") == 1
        assert any("which Megatron-LM needs" in limit for limit in found.limits) != sequence
    assert "expert" not in str(settings("megatron"))


@pytest.mark.parametrize("given", [
    {"layout": "GGG", "sequence": 4},
    {"layout": "III", "sequence": 2},
    {"layout": "III", "sequence": 2, "tensor": 2, "expert": 4},
    {"layout": "GGG", "sequence": 4, "pipeline": 1},
], ids=str)  # fmt: skip
def test_divided_sequences_are_read_back_from_torchtitans_toml(given: dict[str, Any]) -> None:
    found = settings("torchtitan", **given, residency="action")
    tables = tomllib.loads(found.files["torchtitan.toml"])
    mesh = config(**given).to_plan().mesh
    assert tables["parallelism"]["context_parallel_degree"] == mesh.sequence
    read = from_dict(convert(tables, "torchtitan").tables).to_plan()
    assert (read.mesh.sequence, read.mesh.data, read.mesh.shares) == (mesh.sequence, mesh.data, mesh.shares)
    assert read.global_batch == 64
    assert [limit.partition(":")[0] for limit in found.limits if "sequence" in limit or "attention" in limit][:1] == [
        f"attention of {mesh.sequence} ranks that exchange heads for positions"
    ]
    assert "context" not in str(settings("torchtitan", layout="GGG"))


def test_torchtitan_shards_over_ranks_that_divide_sequences_and_masks_no_documents() -> None:
    """It has FSDP over them even without any other, and 2 x cp x tp divides a sequence."""
    found = settings("torchtitan", layout="NNN", sequence=2, data={"sequence": 33, "packing": "documents"})
    own = tomllib.loads(found.files["torchtitan.toml"])["parallelism"]
    assert (own["data_parallel_replicate_degree"], own["data_parallel_shard_degree"]) == (4, 1)
    words = ("layout NNN: torchtitan shards", "documents that attention keeps apart", "use a multiple of 4")
    assert all(any(word in limit for limit in found.limits) for word in words)


def test_divided_sequences_are_read_back_from_deepspeeds_json() -> None:
    found = settings("deepspeed", layout="NGG", pipeline=1, sequence=4)
    values = json.loads(found.files["deepspeed.json"])
    assert (values["sequence_parallel_size"], values["train_batch_size"]) == (4, 64)
    assert from_dict(convert(values, "deepspeed").tables).parallel.sequence == 4
    (limit,) = found.limits
    assert "UlyssesSPAttentionHF.register_with_transformers with sequence_parallel_size=4" in limit


@pytest.mark.parametrize(("given", "batch"), [
    ({"tensor": 2, "pipeline": 1}, 64),
    ({"pipeline": 2}, 64),
    ({"pipeline": 1, "tensor": 2, "intra": 8, "sequence": 8}, 64),
], ids=str)  # fmt: skip
def test_ulysses_has_no_other_parallelism_beside_it(given: dict[str, Any], batch: int) -> None:
    """The file's batch is then one that DeepSpeed takes: samples of every data-parallel rank."""
    found = settings("deepspeed", layout="NGG", model=MODEL | {"heads": 16}, **{"sequence": 4, **given})
    values = json.loads(found.files["deepspeed.json"])
    assert "sequence_parallel_size" not in values
    assert values["train_batch_size"] == batch
    assert any("Ulysses has no pipeline and no tensor parallelism" in limit for limit in found.limits)


def test_megatrons_flags_of_divided_sequences() -> None:
    """All-to-all as here, where each rank gets a key and value head of its own."""
    found = settings("megatron", sequence=2)
    (script,) = found.files.values()
    assert "--context-parallel-size 2\n    --cp-comm-type a2a\n" in script
    assert found.limits == ()
    found = settings("megatron", sequence=4, data={"sequence": 36})
    (script,) = found.files.values()
    assert "--context-parallel-size 4\n    --cp-comm-type p2p\n" in script
    assert [limit.partition(":")[0] for limit in found.limits] == [
        "data.sequence = 36, which is padded here",
        "2 key and value heads for 4 ranks",
    ]
    assert "context" not in str(settings("megatron"))


def mixture_of(**options: Any) -> dict[str, Any]:
    return MODEL | {"config": {"experts": 16, **options}}


def test_megatrons_flags_of_a_mixture_are_those_of_the_router() -> None:
    """DeepSeek-V3's router, and Mixtral's, which has the defaults of both."""
    deepseek = mixture_of(
        experts_per_token=4,
        expert_ffn=48,
        shared_experts=2,
        dense_layers=1,
        scoring="sigmoid",
        route_scale=2.5,
        groups=4,
        groups_per_token=2,
        selection_bias=True,
    )
    found = settings("megatron", model=deepseek, expert=2)
    (script,) = found.files.values()
    flags = {line.strip() for line in script.splitlines()}
    assert flags >= {
        "--num-experts 16",
        "--moe-ffn-hidden-size 48",
        "--moe-layer-freq '([0]*1+[1]*7)'",
        "--moe-router-topk 4",
        "--moe-router-score-function sigmoid",
        "--moe-router-topk-scaling-factor 2.5",
        "--moe-router-num-groups 4",
        "--moe-router-group-topk 2",
        "--moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate 0.0",
        "--moe-shared-expert-intermediate-size 96",
        "--expert-model-parallel-size 2",
    }
    assert found.limits == ()
    found = settings("megatron", model=mixture_of())
    (script,) = found.files.values()
    assert {word for word in shlex.split(script) if word.startswith("--moe")} == {
        *("--moe-token-dispatcher-type", "--moe-grouped-gemm", "--moe-router-load-balancing-type"),
        *("--moe-ffn-hidden-size", "--moe-layer-freq", "--moe-router-topk", "--moe-router-score-function"),
        "--moe-router-dtype",
    }
    assert "--expert-model-parallel-size 1\n" in script
    assert f"--moe-ffn-hidden-size {MODEL['ffn']}\n" in script
    assert found.limits == ()


def test_the_balance_of_experts_is_exported_or_said() -> None:
    """It fell silently: Megatron-LM got a rate of 0 and no loss."""
    router = {"bias_rate": 0.001, "sequence_loss": 0.0001, "z_loss": 0.01}
    biased = mixture_of(scoring="sigmoid", selection_bias=True)
    found = settings("megatron", model=biased, router=router)
    (script,) = found.files.values()
    assert {line.strip() for line in script.splitlines()} >= {
        "--moe-router-bias-update-rate 0.001",
        "--moe-router-load-balancing-type seq_aux_loss",
        "--moe-aux-loss-coeff 0.0001",
        "--moe-z-loss-coeff 0.01",
    }
    assert found.limits == ()
    said = {system: str(settings(system, model=biased, router=router).limits) for system in ("deepspeed", "fsdp2")}
    assert all(f"train.router.{key} = " in text for key in router for text in said.values())
    titan = str(settings("torchtitan", model=biased, router=router).limits)
    assert "load_balance_coeff = 0.001" in titan
    assert [key for key in router if f"train.router.{key} = " in titan] == ["sequence_loss", "z_loss"]
    assert "load_balance_coeff = None" in str(settings("torchtitan", model=biased).limits)


@pytest.mark.parametrize(("options", "words"), [
    ({"scoring": "sigmoid", "normalise_weights": False}, "weights of a sigmoid that are not normalised"),
    ({"groups": 4, "groups_per_token": 2, "scoring": "sigmoid"}, "groups of experts, chosen by the sum of two scores"),
    ({"groups": 4}, "groups of experts, chosen by the sum of two scores"),
    ({"selection_bias": True}, "a selection bias with a softmax"),
])  # fmt: skip
def test_what_megatrons_router_has_not_is_said(options: dict[str, Any], words: str) -> None:
    (limit,) = settings("megatron", model=mixture_of(**options)).limits
    assert limit.startswith(words)


def test_a_softmax_over_all_experts_is_megatrons_pre_softmax() -> None:
    (script,) = settings("megatron", model=mixture_of(normalise_weights=False)).files.values()
    assert "--moe-router-pre-softmax" in script


@pytest.mark.parametrize("expert", [1, 2])
def test_tensor_parallel_ranks_divide_the_experts_of_a_mixture(expert: int) -> None:
    given = {"model": mixture_of(), "pipeline": 1, "tensor": 2, "expert": expert, "sequence_parallel": True}
    own = tomllib.loads(settings("torchtitan", **given).files["torchtitan.toml"])["parallelism"]
    (script,) = settings("megatron", **given).files.values()
    assert own["expert_parallel_degree"] == 2 * expert
    assert f"--expert-model-parallel-size {2 * expert}\n" in script


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v", "v-half", "zb-h1"])
def test_torchtitan_does_not_reshard_under_a_split_backward(schedule: str) -> None:
    """torch loses weight gradients there without an error: benchmarks/who_gets_it_right."""
    found = settings("torchtitan", schedule=schedule, layout="GGG")
    assert tomllib.loads(found.files["torchtitan.toml"])["parallelism"]["fsdp_reshard_after_forward"] == "never"
    assert any("loses weight gradients" in limit for limit in found.limits)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_megatrons_flags_exist(case: dict[str, Any]) -> None:
    (script,) = settings("megatron", **case).files.values()
    lines = re.fullmatch(r"MEGATRON_FLAGS=\(\n(.*)\)\n", script, re.DOTALL)
    assert lines is not None
    words = shlex.split(lines[1])
    flags = [word for word in words if word.startswith("--")]
    assert set(flags) <= set(MEGATRON.split())
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("NNN", ()),
        ("NNG", ("--use-distributed-optimizer",)),
        ("NNI", ("--use-distributed-optimizer", "--num-distributed-optimizer-instances 2")),
        ("IIG", ("--outer-dp-sharding-strategy optim", "--use-megatron-fsdp")),
        ("III", ("--outer-dp-sharding-strategy no_shard", "--num-distributed-optimizer-instances 2")),
    ],
)
def test_megatrons_words_for_a_layout(layout: str, words: tuple[str, ...]) -> None:
    found = settings("megatron", layout=layout)
    (script,) = found.files.values()
    assert all(f"    {word}\n" in script for word in words)
    assert not any(limit.startswith("layout") for limit in found.limits)
    assert ("--use-distributed-optimizer" in script) == (layout != "NNN")


def test_megatron_gets_the_stages_as_they_are() -> None:
    own = config(layers_per_stage=[5, 3])
    found = settings_for("megatron", own, predict_plan(own, own.to_plan(), None))
    (script,) = found.files.values()
    assert "--pipeline-model-parallel-layout 'Et*5|t*3,L'" in script


@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=str)
@pytest.mark.parametrize("intra", [1, 8])
def test_deepspeeds_words_are_read_back_to_the_layout(layout: Layout, intra: int) -> None:
    block = zero_block(layout, intra)
    expressed = {"NNN", "NNG", "NGG", "GGG"} | ({"III", "IGG"} if intra > 1 else set())
    assert (block is not None) == (layout.name in expressed)
    if block is not None:
        found = translate(block)
        assert found.layout == layout.name
        assert found.intra in (None, intra)
        assert found.problems == ()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_deepspeed_json_parses_and_has_its_keys(case: dict[str, Any]) -> None:
    found = settings("deepspeed", **case)
    values = json.loads(found.files["deepspeed.json"])
    assert set(values) <= DEEPSPEED
    plan = config(**case).to_plan()
    data = plan.mesh.data // values.get("sequence_parallel_size", 1)
    assert values["train_batch_size"] == (
        values["train_micro_batch_size_per_gpu"] * values["gradient_accumulation_steps"] * data
    )
    stage = values["zero_optimization"]["stage"]
    assert stage <= 1 or plan.mesh.pipeline == 1, "PipelineEngine refuses ZeRO-2 and ZeRO-3"
    read = translate(values["zero_optimization"])
    assert read.layout is not None
    assert (read.layout == plan.layout.name) == (not any(limit.startswith("layout") for limit in found.limits))


@pytest.mark.slow
def test_deepspeed_itself_takes_the_json() -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config", reason="needs DeepSpeed (make peers)")
    found = settings("deepspeed", ranks=1, pipeline=1, intra=1, layout="NNN")
    read = runtime.DeepSpeedConfig(json.loads(found.files["deepspeed.json"]))
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (64, 32)
    assert read.gradient_clipping == 1.0


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_fsdp2s_code_compiles(case: dict[str, Any]) -> None:
    (code,) = settings("fsdp2", **case).files.values()
    compile(code, "shard.py", "exec")
    assert "{" not in code


def train_with(code: str) -> tuple[list[float], list[float]]:
    """Losses and gradients' norm of one step of two microbatches, with the code's functions and without."""
    names: dict[str, Any] = {"__name__": "shard"}
    exec(compile(code, "shard.py", "exec", dont_inherit=True), names)
    results = []
    for with_code in (True, False):
        torch.manual_seed(0)
        model: nn.Module = Decoder(DecoderConfig(vocabulary=50, layers=2, hidden=16, heads=2, kv_heads=2, ffn=32))
        batches = [torch.randint(50, (2, 8)) for _ in range(2)]
        losses: list[float] = []

        def loss_of(model: nn.Module, batch: torch.Tensor, losses: list[float] = losses) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
            losses.append(loss.item())
            return loss

        if with_code:
            model = names["shard"](model, list(model.layers), device="cpu")  # type: ignore[arg-type]
            names["accumulate"](model, batches, loss_of)
        else:
            for batch in batches:
                (loss_of(model, batch) / 2).backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        results.append([*losses, (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()])
    return results[0], results[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [{"layout": "GGG"}, {"layout": "NGG", "reduction": "step"}, {"layout": "III"}, {"layout": "NNN"}],
    ids=lambda case: case["layout"],
)
def test_fsdp2s_code_trains_like_the_plain_model(case: dict[str, str]) -> None:
    """On one rank: the code is made for more, and the mesh's size is all that is changed."""
    own = from_dict({
        "model": MODEL,
        "data": {"sequence": 32},
        "train": {"global_batch": 16, "microbatch": 2},
        "parallel": {"ranks": 4, "intra": 2} | case,
    })  # fmt: skip
    (code,) = settings_for("fsdp2", own, predict_plan(own, own.to_plan(), None)).files.values()
    code = re.sub(r"init_device_mesh\(device, \((?:\d+, ?)+\d*\)", lambda found: re.sub(r"\d+", "1", found[0]), code)
    with_code, plain = run_ranks(train_with, 1, code)[0]
    assert with_code == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("system", ["torchtitan", "fsdp2"])
def test_nodes_of_a_run_meet_at_the_first_one_and_a_node_alone_needs_none(system: str) -> None:
    def launched(nodes: int) -> str:
        own = config()
        found = settings_for(system, own, predict_plan(own, own.to_plan(), CLUSTER.model_copy(update={"nodes": nodes})))
        return found.launch[0]

    one = Cluster.of({"device": {"preset": "h100-80gb"}, "node": {"devices": 16, "link": {"preset": "nvlink4"}}})
    own = config()
    alone = settings_for(system, own, predict_plan(own, own.to_plan(), one)).launch[0]
    assert "--nnodes 1 --nproc-per-node 16 --standalone" in alone
    two = launched(2)
    assert "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint" in two
    assert "--standalone" not in two


@pytest.mark.parametrize(("given", "words"), [
    ({"layout": "NGG", "gradients": True}, ""),
    ({"layout": "GGG", "gradients": True}, ""),
    ({"layout": "NGG"}, "with offload_optimizer, ZeRO stages 2 and 3 accumulate them in host memory"),
    ({"layout": "NNG", "gradients": True}, "gradients in host memory between microbatches: they stay on the device"),
    ({"layout": "NNG"}, ""),
    ({"layout": "NGG", "gradients": True, "pipeline": 2}, "they stay on the device"),
    ({"layout": "NGG", "pipeline": 2}, "state in host memory (update-on-host): it rests on the device"),
])  # fmt: skip
def test_where_deepspeed_accumulates_gradients(given: dict[str, Any], words: str) -> None:
    own = {"pipeline": 1, **given}
    host = {"optimizer": "update-on-host", "gradients": own.pop("gradients", False)}
    found = settings("deepspeed", **own, host=host)
    said = [each for each in found.limits if "host memory" in each]
    assert any(words in each for each in said) if words else not said
    assert ("offload_optimizer" in found.files["deepspeed.json"]) == ("pipeline" not in given)


@pytest.mark.parametrize(("given", "count"), [
    ({"parameters": "all", "gradients": True}, 0),
    ({"parameters": "all", "gradients": True, "optimizer": "update-on-device"}, 3),
    ({"parameters": "all"}, 2),
    ({"parameters": "all", "gradients": True, "layout": "NNN"}, 3),  # no FSDP
])  # fmt: skip
def test_torchtitan_offloads_all_or_nothing(given: dict[str, Any], count: int) -> None:
    own = {"optimizer": "update-on-host", **given}
    found = settings("torchtitan", layout=own.pop("layout", "GGG"), host=own)
    assert len([each for each in found.limits if "in host memory" in each]) == count
    tables = tomllib.loads(found.files["torchtitan.toml"])
    assert tables["training"].get("enable_cpu_offload", False) == (count == 0)
    read = from_dict(convert(tables, "torchtitan").tables).parallel.host
    assert (read is None) == (count > 0)
    if read is not None:
        assert (read.optimizer, read.parameters, read.gradients) == ("update-on-host", "all", True)


def test_what_cannot_be_expressed_is_said() -> None:
    lost = {"vocabulary": True, "post_validation": True, "schedule": "zb-h2", "layout": "IGG"}
    for system in SYSTEMS:
        text = "\n".join(settings(system, **lost).limits)
        assert "vocabulary that is split" in text
        assert "post-validated" in text
    assert "layout IGG" in "\n".join(settings("megatron", **lost).limits)
    assert "schedule zb-h2" in "\n".join(settings("megatron", **lost).limits)
    assert settings("megatron").limits == ()


def test_experts_that_no_rank_shards_or_that_have_a_layout_of_their_own_are_said() -> None:
    found = settings("torchtitan", layout="NNN", expert=4)
    assert "expert" not in found.files["torchtitan.toml"]
    assert any("with layout NNN there are 1" in limit for limit in found.limits)
    for system in SYSTEMS:
        given = {"layout": "NGG", "expert": 2, "pipeline": 1}
        assert "layout NNG of the experts: they" in str(settings(system, **given, expert_layout="NNG").limits)
        assert "of the experts: they" not in str(settings(system, **given, expert_layout="NGG").limits)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"intra": 2, "sequence": 2}, "sequences that 2 ranks divide: divide them in the loop"),
        ({"intra": 2, "expert": 2}, "experts that 2 ranks divide: FSDP2 shards and gathers them"),
        ({"tensor": 2, "ranks": 4}, "tensor parallelism over 2 ranks: apply parallelize_module before fully_shard"),
        ({"pipeline": 2, "ranks": 4}, "the pipeline of 2 and schedule 1f1b"),
        ({"recompute": "block"}, "recompute block: wrap the layers in checkpoint_wrapper"),
        ({"prefetch": 0}, "the bytes that are gathered ahead"),
    ],
)
def test_fsdp2_says_what_has_to_be_done_beside_it(given: dict[str, Any], words: str) -> None:
    """And nothing of what the plan does not have."""
    plain = {
        "pipeline": 1,
        "tensor": 1,
        "intra": 1,
        "ranks": 2,
        "layout": "GGG",
        "schedule": "1f1b",
        "recompute": "none",
    }
    assert settings("fsdp2", **plain).limits == ()
    (said,) = settings("fsdp2", **{**plain, **given}).limits
    assert said.startswith(words)


def test_the_command_prints_settings_without_a_cluster() -> None:
    path = Path(__file__).parents[3] / "configs" / "llama-3-8b.toml"
    result = CliRunner().invoke(app, ["explain", str(path), "--as", "torchtitan"])
    assert result.exit_code == 0
    assert "==> torchtitan.toml <==" in result.stdout
    assert "torchtitan 0.2.2" in result.stdout
    found = json.loads(CliRunner().invoke(app, ["explain", str(path), "--as", "megatron", "--json"]).stdout)
    assert set(found) == {"system", "version", "files", "launch", "limits"}
    own = load(path)
    with pytest.raises(ConfigError, match="did you mean 'megatron'"):
        settings_for("megatorn", own, predict_plan(own, own.to_plan(), None))


@pytest.mark.parametrize(("recipe", "skipped"), [
    ("rowwise", ["output", "auto_filter_small_kn"]),
    ("rowwise_with_gw_hp", ["output"]),
])  # fmt: skip
def test_fp8_is_torchtitans_converter_and_a_limit_elsewhere(recipe: str, skipped: list[str]) -> None:
    own = config()
    own = own.model_copy(update={"train": own.train.model_copy(update={"precision": f"fp8-{recipe}"})})
    prediction = predict_plan(own, own.to_plan(), None)
    found = settings_for("torchtitan", own, prediction)
    tables = tomllib.loads(found.files["torchtitan.toml"])
    assert tables["model"]["converters"] == ["quantize.linear.float8"]
    assert tables["quantize"] == {"linear": {"float8": {"recipe_name": recipe, "filter_fqns": skipped}}}
    assert any("small linear layers in bf16" in limit for limit in found.limits) is (recipe != "rowwise")
    assert convert(tables, "torchtitan").tables["train"]["precision"] == f"fp8-{recipe}"
    for system in ("deepspeed", "megatron", "fsdp2"):
        limits = settings_for(system, own, prediction).limits
        assert f"large linear layers in FP8 ({recipe}): they multiply in bfloat16" in limits
