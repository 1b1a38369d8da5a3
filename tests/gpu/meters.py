"""Bytes of tensors: what CUDA's allocator says, or on the CPU what Python and the profiler see."""

from __future__ import annotations

import gc

import torch

MEBIBYTE = 2**20
WORKSPACE = {"cuda": 40 * MEBIBYTE, "cpu": MEBIBYTE}
"""More than what cuBLAS keeps for itself in the allocator. On the CPU: more than the activations of short samples."""


def held(device: str) -> int:
    """Bytes that tensors have now, without the allocator's rounding."""
    gc.collect()
    if device == "cuda":
        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.device.type == "cpu")
    storages = {storage.data_ptr(): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}
    return sum(storages.values())


class Peak:
    """The peak from `begin` to `end`, counted like `held`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._begin = 0
        self._profile: torch.profiler.profile | None = None

    def begin(self) -> None:
        """Begin to watch."""
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        self._begin = held("cpu")
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def end(self) -> int:
        """Return the bytes."""
        if self._device == "cuda":
            return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
        assert self._profile is not None, "begin comes first"
        self._profile.stop()
        found = self._profile.profiler
        assert found is not None, "it has been started"
        events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
        total = most = self._begin
        for event in sorted(events, key=lambda event: event.start_ns()):
            total += event.nbytes()
            most = max(most, total)
        return most
