"""Bytes of the tensors that a rank stores now, as predicted by `atoll.plans.layouts.state`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from atoll.plans.layouts import Footprint
from atoll.runtime.sharding.unit import Unit


def stored_now(
    units: Iterable[Unit],
    states: Iterable[torch.Tensor],
    anchors: Iterable[torch.Tensor] = (),
    *,
    on_host: bool = False,
) -> Footprint:
    """Return the bytes of the storages of some units, of the optimizer's states and of anchors, each storage once.
    on_host: whether anchors are in host memory."""
    held: dict[str, dict[int, int]] = {"parameters": {}, "gradients": {}, "optimizer": {}, "host": {}}
    for unit in units:
        for segment in unit.segments:
            for component, tensors in segment.held().items():
                for tensor in tensors:
                    storage = tensor.untyped_storage()
                    held[component][id(tensor) if storage.nbytes() == 0 else storage.data_ptr()] = storage.nbytes()
    for tensor in states:
        held["optimizer"][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    kept = held["host" if on_host else "optimizer"]
    for tensor in anchors:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return Footprint(**{component: sum(sizes.values()) for component, sizes in held.items()})
