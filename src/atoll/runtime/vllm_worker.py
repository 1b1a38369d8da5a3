"""Streamed weights in the workers of vLLM: `LLM(..., worker_extension_cls="atoll.runtime.vllm_worker.WeightReceiver")`.

    llm.collective_rpc("meet_trainer", args=(host, port, 1, 1 + workers))     # beside `weight_group(store, 0, ...)`
    llm.collective_rpc("take_weights")                                        # beside `give(engine.stream(to=0), ...)`

vLLM mixes the class into its own worker, which has a device, a rank among all workers, and a model that loads whole
weights under the names of a Hugging Face folder: each worker of a tensor-parallel group takes every tensor, and its
model keeps the worker's part. Both calls return when all workers have; call them from another thread than `give`, or
from another process. Prefix caches hold what earlier weights have computed: call `llm.reset_prefix_cache()` afterwards.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from atoll.base.errors import RunError
from atoll.runtime.changes import HeldWeights
from atoll.runtime.handover import WeightGroup, take, weight_group


class WeightReceiver:
    """A worker extension for vLLM. `device`, `rank` and `model_runner` are attributes of the worker."""

    device: torch.device
    rank: int
    model_runner: Any
    _group: WeightGroup | None = None
    _held: HeldWeights | None = None

    def meet_trainer(self, host: str, port: int, first: int, size: int, *, timeout: float = 600.0) -> None:
        """Join the group of the process that gives weights.

        host, port: of its TCPStore.  first: the number of worker 0 in the group.  size: of the group.  timeout: seconds
        for the others to come, and for each message.
        """
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)
        self._group = weight_group(store, first + self.rank, size, device=self.device, timeout=limit)

    def take_weights(self, *, source: int = 0, changes: bool = False) -> int:
        """Take what the process `source` gives, and load it. Return the number of tensors.

        changes: take only what has changed since the last time; the other side gives with `held` as well. The weights
        are then held in host memory, whole, on every worker.
        """
        if self._group is None:
            raise RunError("the worker knows no trainer yet: call meet_trainer first")
        if changes and self._held is None:
            self._held = HeldWeights()
        found = 0
        for each in take(self._group, source=source, device=self.device, held=self._held if changes else None):
            self.model_runner.model.load_weights([(each.name, each.tensor.to(self.device))])
            found += 1
        return found

    def forget_weights(self) -> None:
        """Hold nothing any more: the next time everything travels."""
        self._held = None
