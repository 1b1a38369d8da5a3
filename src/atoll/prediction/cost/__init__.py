"""Cost of a plan: workloads, clusters, and the predicted seconds and bytes. Imports no torch.

Names are loaded on first access. Models count their work with some of them, and only clusters are validated by
pydantic: a program that trains, and predicts nothing, works without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.prediction.cost.archipelago import Archipelago, read_cluster_of, read_hardware
    from atoll.prediction.cost.breakdown import Breakdown, break_down
    from atoll.prediction.cost.cluster import Cluster
    from atoll.prediction.cost.hardware import Device, Efficiency, Host, Link, Node, presets
    from atoll.prediction.cost.implementation import Implementation
    from atoll.prediction.cost.kernels import Exchange, FusedAttention, Kernel, KernelClock, Pass, Product, collective
    from atoll.prediction.cost.prediction import Prediction
    from atoll.prediction.cost.ranks import Ranks
    from atoll.prediction.cost.transformer import Transformer
    from atoll.prediction.cost.work import Saved, Use, Work, Workload
    from atoll.program.memory import Held

_HOMES = {
    "Archipelago": "atoll.prediction.cost.archipelago",
    "Breakdown": "atoll.prediction.cost.breakdown",
    "Cluster": "atoll.prediction.cost.cluster",
    "Device": "atoll.prediction.cost.hardware",
    "Efficiency": "atoll.prediction.cost.hardware",
    "Exchange": "atoll.prediction.cost.kernels",
    "FusedAttention": "atoll.prediction.cost.kernels",
    "Held": "atoll.program.memory",
    "Host": "atoll.prediction.cost.hardware",
    "Implementation": "atoll.prediction.cost.implementation",
    "Kernel": "atoll.prediction.cost.kernels",
    "KernelClock": "atoll.prediction.cost.kernels",
    "Link": "atoll.prediction.cost.hardware",
    "Node": "atoll.prediction.cost.hardware",
    "Pass": "atoll.prediction.cost.kernels",
    "Prediction": "atoll.prediction.cost.prediction",
    "Product": "atoll.prediction.cost.kernels",
    "Ranks": "atoll.prediction.cost.ranks",
    "Saved": "atoll.prediction.cost.work",
    "Transformer": "atoll.prediction.cost.transformer",
    "Use": "atoll.prediction.cost.work",
    "Work": "atoll.prediction.cost.work",
    "Workload": "atoll.prediction.cost.work",
    "break_down": "atoll.prediction.cost.breakdown",
    "collective": "atoll.prediction.cost.kernels",
    "presets": "atoll.prediction.cost.hardware",
    "read_cluster_of": "atoll.prediction.cost.archipelago",
    "read_hardware": "atoll.prediction.cost.archipelago",
}
"""Module in which each name is defined."""

__all__ = [
    "Archipelago",
    "Breakdown",
    "Cluster",
    "Device",
    "Efficiency",
    "Exchange",
    "FusedAttention",
    "Held",
    "Host",
    "Implementation",
    "Kernel",
    "KernelClock",
    "Link",
    "Node",
    "Pass",
    "Prediction",
    "Product",
    "Ranks",
    "Saved",
    "Transformer",
    "Use",
    "Work",
    "Workload",
    "break_down",
    "collective",
    "presets",
    "read_cluster_of",
    "read_hardware",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'atoll.prediction.cost' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
