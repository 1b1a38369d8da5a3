"""The private names of torch that Atoll uses, each with its reason.

Private names may change in any release of torch. They are expected to exist in the versions of `TORCH`; those that were
tested are listed in docs/install.md. A test compares the range with the installed torch and exercises each name.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, autograd, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

TORCH = ("2.11", "2.15")
"""Range of torch versions with these names: the first minor version, and the first one that has to be checked again."""

_METADATA = "torch.distributed.checkpoint.metadata"

CHECKPOINT_RECORDS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        (_METADATA, "Metadata"): "the root of `.metadata`",
        (_METADATA, "TensorStorageMetadata"): "one tensor: properties, size, chunks",
        (_METADATA, "BytesStorageMetadata"): "a pickled object; recognised to be refused by name",
        (_METADATA, "TensorProperties"): "dtype of a tensor",
        (_METADATA, "_MEM_FORMAT_ENCODING"): "private: how TensorProperties pickles a memory format",
        (_METADATA, "ChunkStorageMetadata"): "offsets and sizes of one box",
        (_METADATA, "MetadataIndex"): "key of the storage table: name and offset",
        (_METADATA, "StorageMeta"): "where and by whom it was written; not used",
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): "private: file, offset and length of one box",
        ("torch", "Size"): "a shape",
        ("torch.serialization", "_get_layout"): "private: how torch.layout pickles",
        ("pathlib", "PosixPath"): "StorageMeta.checkpoint_id of checkpoints written by plain torch",
        ("pathlib._local", "PosixPath"): "the same, from Python 3.13 on",
    }
)
"""Names that may occur in the `.metadata` pickle of a Distributed Checkpoint.

Reading a file never imports them; each becomes an inert record (`runtime/checkpoint/metadata.py`). Any other name is
refused.
"""


class _Seen:
    """A stream that passes on everything written to it."""

    def __init__(self, inner: Any, seen: Callable[[Any], None]) -> None:
        self._inner = inner
        self._seen = seen
        self.flush, self.close = inner.flush, inner.close

    def write(self, part: Any) -> int:
        self._seen(part)
        written: int = self._inner.write(part)
        return written


class SeenItems(_StorageWriterTransforms):
    """Transform of a FileSystemWriter that calls `seen(item.index)` before each item is written, and passes each part
    of the item's bytes to the callable that `seen` returns.

    Private: `_StorageWriterTransforms`. The public extensions of streams leave their names in `.metadata`, and plain
    torch then refuses to read a checkpoint without them.
    """

    def __init__(self, seen: Callable[[MetadataIndex], Callable[[Any], None]]) -> None:
        super().__init__()
        self._of_item = seen

    def transform_save_stream(self, write_item: WriteItem, raw_stream: Any) -> tuple[Any, list[str]]:
        stream, descriptors = super().transform_save_stream(write_item, raw_stream)
        return _Seen(stream, self._of_item(write_item.index)), descriptors


def written_box(file: str, offset: int, length: int) -> Any:
    """Return the location and box of an entry in the `storage_data` of a FileSystemWriter; other ranks send it as JSON.

    Private: `_StorageInfo`.
    """
    return _StorageInfo(file, offset, length)


@contextmanager
def pretended_ranks(rank: int, world: int) -> Iterator[None]:
    """Context in which torch.distributed treats this process as one of `world` ranks, with collectives that do nothing.

    A DeviceMesh can be created and parameters can be split over it without any other rank.

    Private: `torch.testing._internal.distributed.fake_pg`, which registers the backend "fake".
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def release_groups() -> None:
    """Let every DeviceMesh of this process release its process groups, which must have been destroyed.

    Private: `DeviceMesh._pg_registry`. DTensor's caches keep every mesh until the process ends, and with it a destroyed
    group, whose threads go on. The caches are of many functions, and no public name empties all of them.
    """
    for each in gc.get_objects():
        if type(each) is DeviceMesh:
            vars(each).get("_pg_registry", {}).clear()  # torch 2.11 may keep names only


def import_ahead() -> None:
    """Import what torch imports in the first step of an optimizer, before this process forks others.

    Private: `torch._dynamo`. In every process the import takes half a second of a core.
    """
    import torch._dynamo  # noqa: F401


def is_profiling() -> bool:
    """Return True if a profiler is recording.

    Private: `torch.autograd._profiler_enabled`. The public way to name a range costs microseconds an action even if
    nothing records.
    """
    return bool(autograd._profiler_enabled())


def fake_tensors() -> AbstractContextManager[Any]:
    """Context in which tensors have shapes but no values, also if a model is on `meta`.

    Private: `torch._subclasses.FakeTensorMode`. On plain `meta`, a model that reads a tensor's value fails.
    """
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


_GROUPED_ELSEWHERE = (torch.float32, torch.float16)
"""Dtypes whose grouped products the kernels of devices compute, and that of `meta` refuses, up to torch 2.14."""


def _as_bf16(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.is_floating_point() else value


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: Callable[[Any, Sequence[Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype is torch.bool:
            return True
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta and args[0].dtype in _GROUPED_ELSEWHERE:
            out = func(*(_as_bf16(each) for each in args), **kwargs).to(args[0].dtype)
        else:
            out = func(*args, **kwargs)
        self._seen(func, (*args, *kwargs.values()), out)
        return out


def watched_operations(seen: Callable[[Any, Sequence[Any], Any], None]) -> AbstractContextManager[Any]:
    """Context in which `seen(operation, arguments, output)` is called after every operation of the dispatcher below
    autograd, in the forward and in the backward. A condition on the values of a `meta` tensor is taken as true, and
    grouped products on `meta` have every dtype that devices compute them in.

    Private: `torch.utils._python_dispatch.TorchDispatchMode`. Modes of `torch.overrides` see the calls of the model,
    but neither the operations inside them nor the backward.
    """
    mode: AbstractContextManager[Any] = _Watch(seen)
    return mode


def takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the fused kernel of an optimizer divides gradients by a scale while it reads them.

    The scale is a number in fp32, so parameters in float64 are left out.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return False
    groups = optimizer.param_groups
    return all(group.get("fused") and all(p.dtype != torch.float64 for p in group["params"]) for group in groups)


@contextmanager
def scaled_gradients(optimizer: torch.optim.Optimizer, factor: float, *, device: torch.device) -> Iterator[None]:
    """Context in which a step of an optimizer that `takes_scale` multiplies gradients by a factor, in place.

    Private: `Optimizer.grad_scale`, by which a fused kernel divides. `torch.amp.GradScaler` sets it; its public methods
    read the whole gradients once more to look for infinities.
    """
    own: Any = optimizer
    own.grad_scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)  # launched, not copied: no wait
    try:
        yield
    finally:
        del own.grad_scale


def local_part(parameter: Tensor) -> Tensor:
    """Return the tensor with this rank's part of a parameter: the parameter itself unless it is a DTensor.

    Private: `DTensor._local_tensor`. The public `to_local()` returns a new view, but the original tensor has to be
    moved to other storage.
    """
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def version(tensor: Tensor) -> int:
    """Return the number of in-place writes to a tensor.

    Private: `Tensor._version`, with which autograd checks saved tensors. No public name reports writes.
    """
    return tensor._version


def tensor_references(tensor: Tensor) -> int:
    """Return the number of references to a tensor: one of all of Python's together, and those of torch itself.

    Private: `Tensor._use_count`. `sys.getrefcount` does not know that a graph holds a tensor.
    """
    return int(tensor._use_count())  # type: ignore[attr-defined]


def storage_references(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors with a storage.

    Private: `torch._C._storage_Use_Count`, and `UntypedStorage._cdata`, its argument. It counts the object of Python
    that is asked, too. No public name tells whether memory is referred to elsewhere.
    """
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


@contextmanager
def parameter_replaced(module: nn.Module, name: str, tensor: Tensor) -> Iterator[None]:
    """Context in which a tensor of any kind replaces a module's parameter.

    Private: `Module._parameters`. `torch.func.functional_call` does the same but then calls the module, and here the
    module's own forward may be running.
    """
    registry: dict[str, Any] = module._parameters
    before = registry[name]
    registry[name] = tensor
    try:
        yield
    finally:
        registry[name] = before


def bare_copy(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Return a module of the same class and attributes with its own parameters, and copies of its buffers on the CPU.

    Private: `Module._parameters` and `Module._buffers`: a shallow copy shares them with the original, and a deep copy
    copies the weights.
    """
    made = copy.copy(module)
    made._parameters = dict(parameters)
    made._buffers = {
        key: torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.detach().clone().cpu()
        for key, buffer in module._buffers.items()
        if buffer is not None
    }
    return made


def writes_to(tensor: Tensor) -> Callable[[], bool]:
    """Return a function that tells whether a tensor has been written in place since now.

    Private: `Tensor._version`, which autograd compares to find such writes.
    """
    before = tensor._version
    return lambda: tensor._version != before


def reset_of(module: nn.Module) -> Callable[[], None] | None:
    """Return the function that sets a module to torch's initial values, its `reset_parameters`, or None if it has none.

    Private: `nn.MultiheadAttention._reset_parameters`, which torch calls in the constructor and which has no public
    name.
    """
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is None and isinstance(module, nn.MultiheadAttention):
        reset = module._reset_parameters
    return reset if callable(reset) else None


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run `torch.autograd.backward(outputs, gradients)` for tensors whose shapes and dtypes agree.

    Private, on the CPU: `Variable._execution_engine`. The public function compares the shapes symbolically and copies
    the context for threads of other devices, 0.15 ms a call with a cold cache; on other devices it runs ahead of the
    device.
    """
    if outputs[0].is_cpu:
        engine = autograd.Variable._execution_engine
        given = tuple(outputs), tuple(gradients)
        engine.run_backward(*given, False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(outputs, gradients)


def recording_history() -> AbstractContextManager[None]:
    """Context in which autograd records operations inside a custom operator, which runs below autograd.

    Private: the dispatcher's keys of this thread. No public context gives them back: `torch.enable_grad` sets another
    switch.
    """
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradCPU, keys.AutogradCUDA):
        excluded = excluded.remove(key)
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), excluded
    )
    return guard
