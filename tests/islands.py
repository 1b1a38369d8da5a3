"""A config and a cluster file of two islands that several tests write."""

from __future__ import annotations

from pathlib import Path

ISLANDS = """
[between]
rate = 1e9
latency = 1e-3

[[island]]
name = "north"
nodes = 2
device = { memory = 1_000_000_000, bandwidth = 1e10, rates = { float32 = 5e9 } }
node = { devices = 2, link = { rate = 2e9, latency = 1e-5 } }
network = { rate = 2e9, latency = 1e-5 }

[[island]]
name = "south"
device = { memory = 1_000_000_000, bandwidth = 1e10, rates = { float32 = 5e9 } }
node = { devices = 2, link = { rate = 2e9, latency = 1e-5 } }
uplink = { rate = 1e7, latency = 1e-2 }
"""

OUTER = "outer = { every = 8, delay = 2, fragments = 2 }\n"
FIXED = f"[parallel]\nranks = 2\nintra = 2\n{OUTER}"
"""A plan of its own, of any number of groups."""

OPEN = f"""[parallel]
auto = true
{OUTER}
pipeline = 1
tensor = 1
layout = "NNG"
recompute = "none"
unit = 1
prefetch = 0
residency = "action"
reduction = "microbatch"
post_validation = false
"""
"""What is left to choose is the groups."""

_CONFIG = """
{parallel}
[model]
layers = 4
hidden = 64
heads = 4
ffn = 160
vocabulary = 1000
[data]
source = "{folder}/text.txt"
tokenizer = "bytes"
sequence = 64
cache = "{folder}/cache"
[train]
steps = 2
global_batch = 64
microbatch = 4
precision = "fp32"
[run]
folder = "{folder}/run"
cluster = "{folder}/islands.toml"
{more}
"""


def write_config(folder: Path, parallel: str = FIXED, more: str = "") -> Path:
    """Write a config beside its islands, and return its path."""
    (folder / "text.txt").write_text("def f(x):\n    return x + 1\n" * 400, encoding="utf-8")
    (folder / "islands.toml").write_text(ISLANDS, encoding="utf-8")
    path = folder / "config.toml"
    path.write_text(_CONFIG.format(parallel=parallel, folder=folder, more=more), encoding="utf-8")
    return path
