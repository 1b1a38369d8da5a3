"""Mixtures of experts under the same judge: their models, and the expert parallelism of transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.runtime.models.mixture import Experts

if TYPE_CHECKING:
    from benchmarks.who_gets_it_right.work import Parameters, Work

EXPERTS, CHOSEN = 8, 2

MESHES = ("fsdp 2, ep 2", "fsdp 4, ep 2", "tp 2, ep 2", "fsdp 2, tp 2, ep 2", "pp 2, tp 2, ep 2", "pp 2, fsdp 2, ep 2")
"""Sizes of `DistributedConfig`."""


class MixtureLayer(nn.Module):
    """A norm and a mixture of experts."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.router = nn.Linear(hidden, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS, hidden, 12)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what the experts of each token make of it."""
        tokens = self.norm(hidden).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(CHOSEN, dim=-1)
        out: Tensor = hidden + self.experts(tokens, index, weights / weights.sum(-1, keepdim=True)).view_as(hidden)
        return out


def qwen3_moe(work: Work) -> nn.Module:
    """A small Qwen3-MoE of transformers, whose forward takes token numbers."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=work.config.vocabulary,
        hidden_size=16,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        max_position_embeddings=32,
        use_cache=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return model


def sizes_of(mesh: str) -> dict[str, int]:
    """Return the sizes of `DistributedConfig`: `fsdp 2, ep 2`."""
    return {f"{name}_size": int(size) for name, size in (part.split() for part in mesh.split(", "))}


def axes_of(mesh: str) -> dict[str, int]:
    """Return the axes of a mesh as `Work` calls them."""
    sizes = sizes_of(mesh)
    return {
        "pipeline": sizes.get("pp_size", 1),
        "intra": sizes.get("fsdp_size", 1),
        "tensor": sizes.get("tp_size", 1),
    }


def transformers_parts(work: Work, mesh: str) -> tuple[Callable[[int], object], Callable[[], Parameters]]:
    """Return a step of transformers with a mesh of its own, gradients accumulated over the microbatches, and what gives
    the parameters."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    with TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        start: Any = work.model()
        start.save_pretrained(folder[0])  # the first rank alone writes
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(
            folder[0],
            dtype=getattr(torch, work.dtype),
            distributed_config=DistributedConfig(**sizes_of(mesh)),
            attn_implementation="eager",
            experts_implementation="eager",
        ).train()
        dist.barrier()  # all have read it
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)

    def step(at: int) -> None:
        optimizer.zero_grad()
        share = work.share(at, rank // work.tensor)
        for ids, labels in zip(share["input_ids"].split(1), share["labels"].split(1), strict=True):
            work.loss(model(ids).logits, labels, averaged=work.data).backward()
        optimizer.step()

    def parameters() -> Parameters:
        named = model.named_parameters()
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named}
        return {name: value.detach().clone() for name, value in whole.items()}

    return step, parameters
