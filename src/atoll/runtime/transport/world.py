"""The world of a run: how a process joins it, its transport, and how it leaves."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from atoll.base.errors import RunError
from atoll.plans.plan import Place
from atoll.runtime.transport.base import Transport
from atoll.runtime.transport.gloo import GlooTransport, StagedTransport
from atoll.runtime.transport.nccl import NcclTransport


def connect(place: Place, device: torch.device, *, has_islands: bool = False) -> Transport:
    """Return the transport of a rank. On CUDA: NCCL, or gloo via the host if torch.distributed was initialized with
    gloo only; gloo on other devices. torch.distributed must have been initialized. has_islands: as in `Transport`.

    Raises RunError if the process group and the mesh have different numbers of ranks.
    """
    world = place.mesh.world
    if world == 1 and not dist.is_initialized():
        return GlooTransport(place, device)
    if not dist.is_initialized():
        raise RunError(f"the mesh has {world} ranks but torch.distributed is not initialised; start with torchrun")
    if dist.get_world_size() != world:
        raise RunError(f"the mesh has {world} ranks, torch.distributed has {dist.get_world_size()}; make them equal")
    if device.type == "cuda":
        has_nccl = "nccl" in str(dist.get_backend_config())
        kind = NcclTransport if has_nccl else StagedTransport
        return kind(place, device, has_islands=has_islands)
    return GlooTransport(place, device, has_islands=has_islands)


def join(rank: int, world: int, store: dist.Store, *, device: torch.device, timeout: float) -> None:
    """Initialise torch.distributed for one rank; `timeout` in seconds bounds every wait for a peer.

    [Note: eager communicators] NCCL's group is bound to its device, which torch 2.11 to 2.13 then connects at once, and
    `new_group` splits further communicators from it (`ncclCommSplit`). Without a device each communicator is made by
    its first message: two ranks whose first messages to each other are in different communicators would wait for each
    other, and the first step would pay for all of them. A split is collective: all ranks of the world make all groups
    in one order, members or not, as the constructors here do. Gloo groups are not split, and must have all ranks:
    torch asks those outside of one for their part in a split.
    """
    limit = timedelta(seconds=timeout)
    if device.type != "cuda":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        return
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=limit, device_id=device)


def leave() -> None:
    """Close the connections, so peers that wait for this rank notice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_rank() -> int:
    """Return this process's rank, 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the world size, 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def world_store() -> dist.Store | None:
    """Return the store passed to `join`; None without torch.distributed."""
    if not dist.is_initialized() or dist.group.WORLD is None:
        return None
    store = dist.group.WORLD.get_group_store()
    # The group wraps the store once; a parent that reports a killed rank only knows the inner one.
    return store.underlying_store if isinstance(store, dist.PrefixStore) else store
