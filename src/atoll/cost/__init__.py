"""Cost of a plan: workloads, clusters, and the predicted seconds and bytes. Imports no torch."""

from atoll.cost.breakdown import Breakdown, break_down
from atoll.cost.cluster import Cluster, Device, Efficiency, Link, Node, presets
from atoll.cost.implementation import Implementation
from atoll.cost.kernels import Attention, Clock, Exchange, Kernel, Pass, Product, collective
from atoll.cost.prediction import Held, Prediction
from atoll.cost.ranks import Ranks
from atoll.cost.transformer import Transformer
from atoll.cost.work import Saved, Use, Work, Workload

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
