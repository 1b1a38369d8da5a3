"""Model FLOPs utilization of measured steps, if the device's peak is known."""

from __future__ import annotations

import re
from dataclasses import dataclass

from atoll.prediction.cost import Cluster, Prediction, presets

OTHERS = ("d", "laptop", "mig", "nvl", "pcie")
"""Words in a GPU's name which mean that its peak differs from the preset with its number."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak of one device in a dtype in FLOP/s, and its source."""

    flops: float
    source: str


def device_peak(name: str | None, dtype: str, cluster: Cluster | None = None, world: int = 1) -> Peak | None:
    """Return the peak of a device; None if unknown, and for CPUs, whose peak depends on too many factors.

    name: torch's name of the GPU; None for a CPU.  dtype: torch's name of the compute dtype.  cluster: that of
    run.cluster, whose rates take precedence over the presets: the mean over the devices of `world` ranks.
    """
    if name is None:
        return None
    if cluster is not None and all(dtype in kind.device.rates for kind in cluster.kinds):
        devices = "devices" if cluster.groups else "device"
        return Peak(cluster.mean_rate(world, dtype), f"the {devices} of run.cluster")
    words = re.findall(r"[a-z0-9]+", name.lower().replace("rtx ", "rtx"))
    for preset, table in presets()["devices"].items():
        if set(preset.split("-")) <= set(words) and not set(OTHERS) & set(words) and dtype in table["rates"]:
            return Peak(table["rates"][dtype], f"the preset {preset}")
    return None


def utilised_seconds(prediction: Prediction, peak: Peak) -> float:
    """Return the seconds of a step if all devices computed at their peak. MFU is this divided by a step's seconds."""
    plan = prediction.plan
    flops = prediction.workload.flops(prediction.use) * plan.schedule.whole_microbatches * plan.mesh.shares
    return flops / (plan.mesh.world * peak.flops)
