"""Ranks that divide sequences under the same judge: causal masks, packed documents, sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from benchmarks.sequence.ring import register_cpu_kernel

if TYPE_CHECKING:
    from benchmarks.who_gets_it_right.work import Parameters, Work

ROWS: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {"causal": ("llama", False), "packed documents": ("llama", True), "sliding windows": ("mistral", False)}
)
"""Row -> kind of model, and whether its rows have several documents."""

RINGS = ("ring by hand", "ring Accelerate")
LAYOUTS = ("NNN", "NNG", "NGG", "GGG")

WINDOW = 4
"""Tokens that a token of a Mistral sees."""

DOCUMENT = 5
"""Tokens of a document; the last one of a row has fewer."""


def family(work: Work) -> nn.Module:
    """Return a small Llama, or a Mistral with windows, of transformers."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

    sizes: dict[str, Any] = {
        "vocab_size": work.config.vocabulary,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    made = LlamaConfig(**sizes) if work.model_kind == "llama" else MistralConfig(**sizes, sliding_window=WINDOW)
    model: nn.Module = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    return model


def positions(work: Work, ids: Tensor) -> Tensor:
    """Return position ids, which restart at each document."""
    counted = torch.arange(ids.shape[1])
    return (counted % DOCUMENT if work.documents else counted).expand(ids.shape).contiguous()


def ring_parts(work: Work, how: str) -> tuple[Callable[[int], object], Callable[[], Parameters]]:
    """Return a step of torch's ring around a model of transformers, and what gives the parameters.

    how: what keeps masks from the ring, which takes none. `by hand`: every layer becomes causal.  `Accelerate`: its
    hook does so, or refuses. Accelerate itself refuses to run context parallelism on CPUs.
    """
    register_cpu_kernel()
    mesh = init_device_mesh("cpu", (work.divided,))
    model = work.model()
    if how == "Accelerate":
        from accelerate.big_modeling import _attach_context_parallel_hooks

        _attach_context_parallel_hooks(model)
    else:
        for module in model.modules():
            if type(module).__name__.endswith("Attention"):
                module.register_forward_pre_hook(_drop_mask, with_kwargs=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(at: int) -> None:
        optimizer.zero_grad()
        share = work.share(at, 0)
        for rows in zip(*(share[name].split(1) for name in ("input_ids", "labels", "position_ids")), strict=True):
            own = [each.clone() for each in rows]
            with context_parallel(mesh, buffers=own, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(own)):
                ids, labels, at_positions = own
                logits = model(input_ids=ids, position_ids=at_positions).logits
                work.loss(logits, labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()

    return step, lambda: {name: value.detach().clone() for name, value in model.named_parameters()}


def _drop_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "attention_mask": None, "is_causal": True}
