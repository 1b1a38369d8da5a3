"""Cost of a plan: workloads, clusters, and the predicted seconds and bytes. Imports no torch.

Names are loaded on first access. Models count their work with some of them, and only clusters are validated by
pydantic: a program that trains, and predicts nothing, works without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.cost.breakdown import Breakdown, break_down
    from atoll.cost.cluster import Cluster, Device, Efficiency, Link, Node, presets
    from atoll.cost.implementation import Implementation
    from atoll.cost.kernels import Attention, Clock, Exchange, Kernel, Pass, Product, collective
    from atoll.cost.prediction import Held, Prediction
    from atoll.cost.ranks import Ranks
    from atoll.cost.transformer import Transformer
    from atoll.cost.work import Saved, Use, Work, Workload

_HOMES = {
    "Attention": "atoll.cost.kernels",
    "Breakdown": "atoll.cost.breakdown",
    "Clock": "atoll.cost.kernels",
    "Cluster": "atoll.cost.cluster",
    "Device": "atoll.cost.cluster",
    "Efficiency": "atoll.cost.cluster",
    "Exchange": "atoll.cost.kernels",
    "Held": "atoll.cost.prediction",
    "Implementation": "atoll.cost.implementation",
    "Kernel": "atoll.cost.kernels",
    "Link": "atoll.cost.cluster",
    "Node": "atoll.cost.cluster",
    "Pass": "atoll.cost.kernels",
    "Prediction": "atoll.cost.prediction",
    "Product": "atoll.cost.kernels",
    "Ranks": "atoll.cost.ranks",
    "Saved": "atoll.cost.work",
    "Transformer": "atoll.cost.transformer",
    "Use": "atoll.cost.work",
    "Work": "atoll.cost.work",
    "Workload": "atoll.cost.work",
    "break_down": "atoll.cost.breakdown",
    "collective": "atoll.cost.kernels",
    "presets": "atoll.cost.cluster",
}
"""Module in which each name is defined."""

__all__ = [
    "Attention",
    "Breakdown",
    "Clock",
    "Cluster",
    "Device",
    "Efficiency",
    "Exchange",
    "Held",
    "Implementation",
    "Kernel",
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
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'atoll.cost' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
