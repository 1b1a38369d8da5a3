"""Configs, clusters, links and schedules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from atoll.base.documents import parse_json
from atoll.cli.convert import converted
from atoll.plans import schedules
from atoll.plans.ir.text import from_csv, from_text, to_csv, to_text
from atoll.plans.schedules.links import Links
from atoll.prediction.cost import Cluster
from atoll.training.config import from_dict, load
from benchmarks.fuzz.reading import Made, Parser, of_file, of_text

CONFIG = b"""
[model]
layers = 4
hidden = 64
heads = 4
[data]
source = "stdlib"
sequence = 64
[train]
steps = 20
global_batch = 16
microbatch = 2
lr = 3e-3
[parallel]
ranks = 4
pipeline = 2
intra = 2
layout = "IIG"
schedule = "1f1b"
[run]
folder = "runs/quickstart"
"""
CLUSTER = b"""
nodes = 2
[device]
memory = 8_000_000_000
bandwidth = 1e10
rates = { float32 = 3e10 }
[node]
devices = 2
link = { rate = 1e9, latency = 2e-5 }
[network]
rate = 1e8
latency = 1e-4
"""
LINKS = b"""
latency = 0.1
seconds = 0.2
[[link]]
ranks = [0, 1]
latency = 1
name = "wan"
"""
BLOCKS = (
    {"stage": 3, "mics_shard_size": 2, "overlap_comm": True},
    {"stage": 2, "reduce_bucket_size": 5e8},
    {"stage": 3, "zero_hpz_partition_size": 2},
)
ORDERS = [
    schedules.build(name, ranks=2, microbatches=3, chunks=chunks)
    for name, chunks in (("1f1b", None), ("zb-v", None), ("interleaved", 2))
]


def _planned(path: Path) -> object:
    config = load(path)
    return config if config.parallel.auto else config.to_plan()


def _overridden(text: str) -> object:
    config = from_dict({}, overrides=text.split("\n"))
    return config if config.parallel.auto else config.to_plan()


def _block(content: bytes) -> object:
    try:
        words = parse_json(content)
    except ValueError:
        return None  # of a config it is TOML, which is another parser's
    return from_dict({"parallel": {"zero_optimization": words}})


def _deepspeed(folder: Path) -> Parser:
    return Parser([json.dumps(block).encode() for block in BLOCKS], _block)


DS_CONFIG = {
    "train_batch_size": 64,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.98]}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 30, "total_num_steps": 500}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
ACCELERATE = b"""
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD, fsdp_offload_params: true}
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
TORCHTITAN = b"""
[model]
flavor = "8B"
[optimizer]
lr = 3e-4
beta2 = 0.98
[training]
local_batch_size = 1
steps = 1000
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
fsdp_reshard_after_forward = "never"
pipeline_parallel_schedule = "ZBVZeroBubble"
"""

PARSERS: Mapping[str, Made] = {
    "config": of_file("a.toml", [CONFIG], _planned),
    "overrides": of_text(_overridden, "train.steps=5\nparallel.layout=GGG", 'parallel.schedule="zb-h1"'),
    "DeepSpeed block": _deepspeed,
    "DeepSpeed config": of_file("ds_config.json", [json.dumps(DS_CONFIG).encode()], converted),
    "Accelerate config": of_file("accelerate.yaml", [ACCELERATE], converted),
    "torchtitan config": of_file("torchtitan.toml", [TORCHTITAN], converted),
    "cluster": of_file("cluster.toml", [CLUSTER], Cluster.read),
    "links": of_file("links.toml", [LINKS], Links.read),
    "schedule, CSV": of_text(from_csv, *map(to_csv, ORDERS)),
    "schedule, grid": of_text(from_text, *map(to_text, ORDERS)),
}
