"""A GPU is measured with events and written as a device."""

from __future__ import annotations

import torch

from atoll.cost import Cluster
from atoll.measuring.measure import measure
from atoll.testing import run_ranks


def on_gpu() -> Cluster:
    return measure(1, local=1, device=torch.device("cuda", 0), seconds=0.02)


def test_a_device() -> None:
    (cluster,) = run_ranks(on_gpu, 1, sees_gpus=True, timeout=300.0)
    properties = torch.cuda.get_device_properties(0)
    device, reached = cluster.device, cluster.device.efficiency
    assert device.units == properties.multi_processor_count
    assert 0 < device.context < device.memory
    assert device.rates["float16"] > device.rates["float32"] > 1e11
    assert device.bandwidth > 1e10
    assert 1e-7 < reached.launch < 1e-3
    assert 1e-7 < reached.dispatch < 1e-3
    assert 0 < reached.attention < 1
    assert 0 < reached.memory <= 1
    assert torch.cuda.get_device_name(0) in device.source
