"""Configs of other systems: what becomes of each setting, and that nothing is left out without a word."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from atoll.config import from_dict, load
from atoll.errors import ConfigError
from atoll.settings.convert import SYSTEMS, convert

DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.98], "eps": 1e-9, "weight_decay": 0.05}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 30, "total_num_steps": 500}},
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    "steps_per_print": 10,
    "flops_profiler": {"enabled": True},
}

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_version: 1
machine_rank: 0
mixed_precision: bf16
num_machines: 2
num_processes: 16
use_cpu: false
"""

TORCHTITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
beta2 = 0.98
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.8
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
fsdp_reshard_after_forward = "never"
tensor_parallel_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "ZBVZeroBubble"
context_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
[float8]
enable_fsdp_float8_all_gather = true
"""


def test_deepspeed() -> None:
    found = convert(DEEPSPEED)
    config = from_dict(found.tables)
    assert found.system == "deepspeed"
    assert (config.train.global_batch, config.train.microbatch, config.train.precision) == (64, 4, "bf16")
    assert (config.train.lr, config.train.betas, config.train.eps) == (2e-4, (0.9, 0.98), 1e-9)
    assert (config.train.lr_schedule, config.train.warmup, config.train.steps) == ("cosine", 30, 500)
    assert (config.train.clip, config.train.weight_decay, config.parallel.layout) == (0.5, 0.05, "NGG")
    left = "\n".join(found.left)
    assert "offload to CPU or NVMe is not supported" in left
    assert "gradient_accumulation_steps = 'auto'" in left
    assert "flops_profiler.enabled = True: it has no counterpart" in left
    assert len(found.left) == 3


def test_accelerate() -> None:
    found = convert(pytest.importorskip("yaml").safe_load(ACCELERATE))
    config = from_dict(found.tables)
    assert found.system == "accelerate"
    assert (config.parallel.ranks, config.parallel.layout, config.parallel.intra) == (16, "III", 8)
    assert (config.parallel.recompute, config.train.precision) == ("block", "bf16")
    assert found.left == ["fsdp_config.fsdp_offload_params = True: offload is not supported"]


def test_torchtitan() -> None:
    found = convert(tomllib.loads(TORCHTITAN))
    config = from_dict(found.tables)
    parallel = config.parallel
    assert found.system == "torchtitan"
    assert (parallel.layout, parallel.intra, parallel.tensor, parallel.pipeline) == ("NII", 8, 2, 4)
    assert (parallel.schedule, parallel.recompute) == ("zb-v", "selective")
    assert (config.model.hidden, config.model.kv_heads, config.data.sequence) == (4096, 8, 8192)
    assert (config.train.betas, config.train.steps, config.run.folder) == ((0.9, 0.98), 1000, "./outputs")
    assert [line.partition(" = ")[0] for line in found.left] == [
        "model.name",
        "lr_scheduler.decay_ratio",
        "training.dataset",
        "float8.enable_fsdp_float8_all_gather",
    ]


@pytest.mark.parametrize(("system", "table", "key", "expected"), [
    ("accelerate", {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}}, "layout", "NGG"),
    ("accelerate", {"fsdp_config": {"fsdp_version": 2}}, "layout", "GGG"),
    ("accelerate", {"deepspeed_config": {"zero_stage": 1}}, "layout", "NNG"),
    ("deepspeed", {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "intra", 4),
    ("torchtitan", {"parallelism": {"data_parallel_shard_degree": -1}}, "layout", "GGG"),
    ("torchtitan", {"compile": {"enable": True}}, "compile", "block"),
])  # fmt: skip
def test_single_settings(system: str, table: dict[str, Any], key: str, expected: object) -> None:
    assert getattr(from_dict(convert(table, system).tables).parallel, key) == expected


def test_nothing_is_left_out_without_a_word() -> None:
    """A setting that no table has is said to be left, whichever system's it is."""
    for system in SYSTEMS:
        found = convert({"never_heard_of": {"it": 3}, "gradient_accumulation_fusion": True}, system)
        assert [line.partition(" = ")[0] for line in found.left] == [
            "never_heard_of.it",
            "gradient_accumulation_fusion",
        ]


def test_counts_that_are_none_are_left() -> None:
    """Past bug, found by the fuzzer: `num_machines: 0` divided by it."""
    for count in (0, -1, float("inf"), "two"):
        table = {"num_machines": count, "num_processes": 8, "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}
        assert convert(table).left == [f"num_machines = {count!r}: no number of machines"]


def test_values_of_another_type_are_said() -> None:
    for system, rules in SYSTEMS.items():
        for path in rules:
            table: Any = [1]
            for part in reversed(path.split(".")):
                table = {part: table}
            convert(table, system)  # raises nothing


def test_the_command_writes_a_config_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from atoll.cli.convert import command

    given = tmp_path / "ds_config.json"
    given.write_text(json.dumps(DEEPSPEED))
    command(given, out=tmp_path / "run.toml")
    assert load(tmp_path / "run.toml").parallel.layout == "NGG"
    assert "# Not carried over:" in (tmp_path / "run.toml").read_text()
    assert "not carried over: flops_profiler" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="exists; name another file"):
        command(given, out=tmp_path / "run.toml")


@pytest.mark.parametrize(("name", "content", "words"), [
    ("a.json", "[1]", "a list, not a table"),
    ("a.json", '{"colour": "blue"}', "no config of deepspeed, accelerate, torchtitan: it has colour"),
    ("a.yaml", "a: &x [1]\nb: *x\n", "anchors and aliases are not read"),
    ("a.yaml", "a: [1", "expected ',' or ']'"),
    ("a.yaml", f"a: 0x{'F' * 5000}", "an integer of 20000 bits"),
    ("a.yaml", "1: a", "a key that is not a string"),
    ("a.yaml", f"a: {'b' * 70_000}", "70003 characters of YAML; at most 65536"),
    ("a.txt", "", "supported are .json"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    from atoll.cli.convert import command

    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        command(tmp_path / name)
