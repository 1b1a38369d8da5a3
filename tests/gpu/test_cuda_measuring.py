"""A GPU is measured with events and written as a device."""

from __future__ import annotations

import torch

from atoll.prediction.cost import Cluster
from atoll.runtime.measuring.measure import measure_cluster
from atoll.testing import run_ranks


def measured(device: str, seconds: float) -> Cluster:
    return measure_cluster(1, local=1, device=torch.device(f"{device}:0"), seconds=seconds)


def test_a_device(device: str) -> None:
    on_gpu = device == "cuda"
    (cluster,) = run_ranks(measured, 1, device, 0.02 if on_gpu else 0.001, sees_gpus=on_gpu, timeout=300.0)
    found, reached = cluster.device, cluster.device.efficiency
    assert found.context < found.memory
    assert 1e-7 < reached.launch < 1e-3 or not on_gpu
    assert 1e-7 < reached.dispatch < 1e-3
    assert reached.attention > 0
    assert reached.memory > 0
    if not on_gpu:
        return
    properties = torch.cuda.get_device_properties(0)
    assert found.units == properties.multi_processor_count
    assert found.context > 0
    assert found.rates["float16"] > found.rates["float32"] > 1e11
    assert found.bandwidth > 1e10
    assert reached.attention < 1
    assert reached.memory <= 1
    assert torch.cuda.get_device_name(0) in found.source
