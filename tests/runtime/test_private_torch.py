"""The private names of torch do what the public ones do."""

from __future__ import annotations

import gc
import tomllib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh

from atoll.base._torch import (
    TORCH,
    SeenItems,
    bare_copy,
    parameter_replaced,
    pretended_ranks,
    recording_history,
    release_groups,
    reset_of,
    run_backward,
    scaled_gradients,
    storage_references,
    takes_scale,
    tensor_references,
    version,
    watched_operations,
    writes_to,
)


def test_history_is_recorded_inside_an_operator() -> None:
    @torch.library.custom_op("atoll_test::doubled", mutates_args=())
    def doubled(given: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad(), recording_history():
            leaf = given.detach().requires_grad_()
            (2 * leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.clone()

    doubled.register_autograd(lambda ctx, gradient: gradient)
    assert doubled(torch.ones(2, requires_grad=True)).tolist() == [2.0, 2.0]


def test_a_backward_gives_what_the_public_function_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, generator=generator).requires_grad_()
    weight = torch.randn(4, 5, generator=generator).requires_grad_()
    gradient = torch.randn(3, 5, generator=generator)

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        product = hidden @ weight
        return product.tanh(), product.square()

    torch.autograd.backward(outputs(), (gradient, gradient))
    wanted = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    run_backward(outputs(), (gradient, gradient))
    for got, public in zip([hidden.grad, weight.grad], wanted, strict=True):
        assert got is not None
        assert public is not None
        assert torch.equal(got, public)


def test_a_write_is_seen() -> None:
    tensor = torch.zeros(2)
    before = version(tensor)
    assert version(tensor) == before
    tensor[0] = 1.0
    assert version(tensor) > before


@pytest.mark.slow
def test_a_mesh_that_is_kept_releases_its_group() -> None:
    with pretended_ranks(0, 2):
        group = dist.new_group([0, 1])
        mesh = DeviceMesh.from_group(group, "cpu")
        alive = weakref.ref(group)
        del group
    release_groups()
    gc.collect()
    assert alive() is None
    assert mesh.size() == 2


def test_a_parameter_is_replaced_for_a_while() -> None:
    module = nn.Linear(2, 2, bias=False)
    own = module.weight
    with parameter_replaced(module, "weight", torch.eye(2)):
        assert module(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]
    assert module.weight is own
    with pytest.raises(RuntimeError), parameter_replaced(module, "weight", torch.eye(3)):
        module(torch.ones(1, 2))
    assert module.weight is own


def test_attention_is_started_by_its_private_name() -> None:
    module = nn.MultiheadAttention(4, 2)
    nn.init.zeros_(module.in_proj_weight)
    reset = reset_of(module)
    assert reset is not None
    reset()
    assert module.in_proj_weight.std() > 0
    assert reset_of(nn.ReLU()) is None


def test_a_bare_copy_shares_nothing_that_is_large() -> None:
    module = nn.BatchNorm1d(3)
    copied = bare_copy(module, {"weight": nn.Parameter(torch.zeros(1))})
    assert [name for name, _ in copied.named_parameters()] == ["weight"]
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    assert {name for name, _ in copied.named_buffers()} == {name for name, _ in module.named_buffers()}
    assert all(one is not other for one, other in zip(copied.buffers(), module.buffers(), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(copied.buffers(), module.buffers(), strict=True))


def test_writes_are_counted() -> None:
    tensor = torch.zeros(3)
    is_written = writes_to(tensor)
    tensor.sum()
    assert not is_written()
    with torch.no_grad():
        tensor[:1].fill_(0.0)
    assert is_written()


def test_operations_are_watched_forward_and_backward() -> None:
    found: list[str] = []
    hidden = torch.zeros(3, 4, device="meta", requires_grad=True)
    with watched_operations(lambda operation, arguments, output: found.append(operation.name())):
        out = hidden @ torch.zeros(4, 5, device="meta")
        forward = len(found)
        out.backward(torch.zeros(3, 5, device="meta"))
        assert (hidden == 0).all(), "a condition on values that are not there"
    assert "aten::mm" in found[:forward]
    assert "aten::mm" in found[forward:]
    with pytest.raises(RuntimeError):
        bool((hidden == 0).all())


def test_what_a_checkpoint_writes_of_an_item_is_seen(tmp_path: Path) -> None:
    seen: dict[str, bytes] = {}

    def watch(index: MetadataIndex) -> Callable[[bytes], None]:
        seen[index.fqn] = b""

        def add(part: bytes) -> None:
            seen[index.fqn] += bytes(part)

        return add

    writer = FileSystemWriter(tmp_path)
    writer.transforms = SeenItems(watch)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"a": torch.ones(3), "b": torch.zeros(2)}, storage_writer=writer, no_dist=True)
    stored = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    content = (tmp_path / "__0_0.distcp").read_bytes()
    assert {index.fqn: content[at.offset : at.offset + at.length] for index, at in stored.items()} == seen
    assert all(getattr(at, "transform_descriptors", None) is None for at in stored.values())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_fused_step_multiplies_gradients(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """As if they had been multiplied before it; and the next step is as usual."""
    generator = torch.Generator().manual_seed(0)
    begin, gradient = (torch.randn(64, generator=generator) for _ in range(2))
    updated = []
    for factor in (0.25, 1.0):
        parameter = nn.Parameter(begin.clone())
        optimizer = kind([parameter], lr=0.1, fused=True)
        assert takes_scale(optimizer)
        parameter.grad = gradient * (0.25 / factor)
        with scaled_gradients(optimizer, factor, device=torch.device("cpu")):
            optimizer.step()
        parameter.grad = gradient.clone()
        optimizer.step()
        updated.append(parameter.detach())
    assert not torch.equal(updated[0], begin)
    assert torch.allclose(*updated, rtol=1e-6, atol=1e-6)


def test_only_fused_kernels_in_single_precision_take_a_scale() -> None:
    def makes(dtype: torch.dtype, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([nn.Parameter(torch.zeros(2, dtype=dtype))], **options)

    assert not takes_scale(makes(torch.float32))
    assert not takes_scale(makes(torch.float32, foreach=True))
    assert not takes_scale(makes(torch.float64, fused=True))
    assert not takes_scale(torch.optim.Adagrad([nn.Parameter(torch.zeros(2))], fused=True))


def test_the_range_of_versions_is_the_same_everywhere() -> None:
    root = Path(__file__).parents[2]
    first, end = TORCH
    required = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={first},<{end}" in required
    last = f"2.{int(end.partition('.')[2]) - 1}"
    assert f"PyTorch {first} to {last}." in (root / "docs" / "install.md").read_text()


def test_references_to_a_tensor_and_to_its_storage_are_counted() -> None:
    made = torch.zeros(4)
    assert (tensor_references(made), storage_references(made.untyped_storage())) == (1, 1)
    other = made
    assert tensor_references(made) == 1  # all of Python's are one
    view = made.view(2, 2)
    alias = made.detach()
    assert storage_references(made.untyped_storage()) == 3
    del view, alias, other
    leaf = torch.zeros(4, requires_grad=True)
    graph = leaf * leaf
    assert tensor_references(leaf) > 2  # as it is, for two factors and for its gradient
    del graph
    assert storage_references(leaf.untyped_storage()) == 1
