"""Buffers of a rank's part of the model, and the check that a forward changes them as one process would."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from atoll.base._torch import local_part
from atoll.base.digests import digest
from atoll.base.errors import PlanError
from atoll.runtime.assemble.rank import Rank
from atoll.runtime.models.buffers import buffers_outside, first_names, persistent_buffers
from atoll.runtime.sharding.replicas import Replica, differences, digest_of, share, short
from atoll.runtime.verdict import SHOWN


class Buffers:
    """The persistent buffers of this rank's blocks and of no block."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self._model, self._adapter, self._plan = model, rank.adapter, rank.plan
        self._transport, self._agreement = rank.transport, rank.agreement
        self._routers = rank.end.routers
        self._firsts = first_names(rank.adapter)
        blocks = rank.adapter.blocks()
        self._blocks = [blocks[at] for stage in rank.sharded.stages for at in stage.run]
        # If a model keeps values besides its parameters, the first step shows how a forward changes them.
        self._watches = rank.agreement.total(float(bool(self.own()))) > 0

    def own(self) -> dict[str, torch.Tensor]:
        """Return the buffers by qualified name; under tensor parallelism, the plain tensors."""
        return {name: local_part(buffer) for name, buffer in persistent_buffers(self._adapter, self._blocks).items()}

    def digests(self) -> dict[str, str]:
        """Return the digests to be compared after the first step; nothing before any other step."""
        if not self._watches:
            return {}
        stepped = {id(load.bias) for load in self._routers.loads}  # by the engine, and not by a forward
        return {name: digest_of([buffer]) for name, buffer in self.own().items() if id(buffer) not in stepped}

    def check(self, before: Mapping[str, str]) -> None:
        """Raise PlanError on every rank if the forward has changed buffers in a way that one process would not.

        Running statistics, such as those of BatchNorm, cover only a rank's own samples, and a recomputed forward
        updates them twice. The check runs once, after the first step, and misses a buffer that starts to change later.
        """
        if not self._watches:
            return
        with self._agreement.guard("comparing buffers"):
            after = self.digests()
            self._watches = False
            changed = [name for name in after if before.get(name) != after[name]]
            everywhere = buffers_outside(self._adapter)
            own = [
                Replica(short(digest(self._firsts.get(name, name).encode())), short(after[name]), 0, kind=0)
                for name in after
                if name in changed or name in everywhere
            ]
            held = share(own, self._transport)
            is_changed = self._transport.total(torch.tensor([len(changed)], dtype=torch.float64)).item() > 0
        if self._plan.recompute != "none" and is_changed:
            why = "a forward that is recomputed changes them twice; turn recompute off, or"
        elif differences(held):
            why = (
                "each stage changes its own copy of a buffer that stages share; run them in one stage, or"
                if self._plan.mesh.data == 1
                else "each rank has seen its own samples; where the samples are not to be mixed,"
            )
        else:
            return
        raise PlanError(
            f"the forward changes buffers of {self._names_of(changed)}, and they are no longer those of one process: "
            f"{why} use GroupNorm or LayerNorm, SyncBatchNorm on CUDA, or statistics that stay as they are "
            "(`module.eval()`)"
        )

    def _names_of(self, changed: list[str]) -> str:
        modules = dict(self._model.named_modules())
        parts = [name.rpartition(".") for name in changed]
        found = dict.fromkeys(f"{module} ({type(modules[module]).__name__})" for module, _, _ in parts)
        return ", ".join([*list(found)[:SHOWN], *(["..."] if len(found) > SHOWN else [])]) or "modules of other ranks"
