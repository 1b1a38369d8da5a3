"""One rank moves no more bytes than plain PyTorch, under any layout.

Counted below autograd: bytes of the tensors that an operation reads and writes, for each parameter of a model whose
activations are small. The plain loop does the same job: a bf16 copy of fp32 masters, gradients added in fp32, clipping,
and a fused AdamW.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.plans import schedules
from atoll.plans.ir.residency import Residency
from atoll.plans.layouts import EFFECTIVE, Layout, Precision
from atoll.plans.plan import MeshShape, Plan
from atoll.runtime.engine import Engine
from atoll.runtime.models import Decoder, DecoderConfig, adapter_for, initialise_model, token_cross_entropy

SIZES = DecoderConfig(vocabulary=64, layers=2, hidden=192, heads=2, kv_heads=2, ffn=768)
TOKENS = 4
CLIP = 1e-3
"""Small, so that every step is clipped."""

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "set_", "resize_", "alias"}
"""Operations that touch no element, besides views."""

OVERWRITING = {"copy_", "zero_", "fill_", "_foreach_copy_"}
"""Operations that do not read the tensor that they write."""


class Moved(TorchDispatchMode):
    """Counts bytes read and written by the operations of a context."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in FREE:
            self.bytes[name] += sum(self._moved(func._schema, name, args, kwargs or {}, out))
        return out

    def _moved(self, schema: Any, name: str, args: Any, kwargs: Any, out: Any) -> Iterator[int]:
        read: dict[int, int] = {}
        for at, argument in enumerate(schema.arguments):
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in (each for each in tree_leaves(value) if isinstance(each, torch.Tensor)):
                if is_written:
                    yield tensor.nbytes
                if not (is_written and (argument.is_out or name in OVERWRITING)):
                    read[id(tensor)] = tensor.nbytes  # a tensor that is given twice is read once
        yield from read.values()
        outputs = out if isinstance(out, tuple | list) else (out,)
        for returned, value in zip(schema.returns, outputs, strict=False):
            if returned.alias_info is None:
                yield from (each.nbytes for each in tree_leaves(value) if isinstance(each, torch.Tensor))


Step = Callable[[dict[str, torch.Tensor]], object]


def atoll_step(layout: str, microbatches: int, residency: Residency | None = None) -> Step:
    with torch.device("meta"):
        model = Decoder(SIZES)
    schedule = schedules.build("1f1b", ranks=1, microbatches=microbatches)
    plan = Plan(MeshShape(), Layout(layout), schedule, 1, precision=Precision.preset("bf16"), residency=residency)
    return Engine(model, plan, optimizer=lambda groups: torch.optim.AdamW(groups, fused=True), clip=CLIP).step


def plain_step(microbatches: int) -> Step:
    model = Decoder(SIZES)
    initialise_model(adapter_for(model), 0)
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    parameters = list(model.to(torch.bfloat16).parameters())
    optimizer = torch.optim.AdamW(masters, fused=True)

    def adds_to(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return add

    for parameter, master in zip(parameters, masters, strict=True):
        parameter.register_post_accumulate_grad_hook(adds_to(master))

    def step(batch: dict[str, torch.Tensor]) -> None:
        for at in range(microbatches):
            piece = {name: value[at : at + 1] for name, value in batch.items()}
            (token_cross_entropy(model(piece["input_ids"]), piece) / (microbatches * TOKENS)).backward()
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)

    return step


def bytes_of(make: Callable[[int], Step]) -> tuple[float, float]:
    """Bytes a parameter, of each microbatch and of the rest of a step."""
    numel = sum(parameter.numel() for parameter in Decoder(SIZES).parameters())
    found = []
    for microbatches in (2, 4):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(SIZES.vocabulary, (microbatches, TOKENS + 1), generator=generator)
        batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        step = make(microbatches)
        for _ in range(2):  # the second step is as all later ones
            step(batch)
        with Moved() as moved:
            step(batch)
        found.append(moved.bytes.total() / numel)
    each = (found[1] - found[0]) / 2
    return each, found[0] - 2 * each


@pytest.fixture(scope="module")
def plain() -> tuple[float, float]:
    return bytes_of(plain_step)


def test_the_count_of_a_plain_loop(plain: tuple[float, float]) -> None:
    """A product each in forward, and two in backward, read or write a bf16 weight; its gradient is read once more and
    added in fp32. A step ends with norm, clipping, AdamW and a cast."""
    each, rest = plain
    assert each == pytest.approx(3 * 2 + 2 + 4 + 4, rel=0.1)
    # The first gradient is written and not added to: 4 bytes less in each of the two passes.
    assert rest == pytest.approx(4 + 8 + (4 * 4 + 4 * 4) + (4 + 2) - 4, rel=0.1)


@pytest.mark.wide(5)
@pytest.mark.parametrize("layout", [layout.name for layout in EFFECTIVE])
def test_one_rank_moves_as_many_bytes_as_plain_pytorch(layout: str, plain: tuple[float, float]) -> None:
    each, rest = bytes_of(lambda microbatches: atoll_step(layout, microbatches))
    assert each <= plain[0] + 0.1
    assert rest <= plain[1] + 0.1


def test_residency_action_trades_casts_for_memory(plain: tuple[float, float]) -> None:
    """Two casts of a block in a microbatch, of 4 bytes that are read and 2 that are written."""
    each, _ = bytes_of(lambda microbatches: atoll_step("GGG", microbatches, "action"))
    assert each == pytest.approx(plain[0] + 2 * (4 + 2), rel=0.03)
