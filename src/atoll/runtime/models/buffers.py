"""Buffers: which a checkpoint has, and how those of a model that was built on `meta` get their values.

A model on `meta` has lost what its constructor computed. Parameters are read or initialized; a buffer may be set by the
constructor alone, as the constants of an activation and the multipliers of a scan are, and `_init_weights` or
`reset_parameters` do not know it. A buffer gets its value from the first of

    the model               a buffer with values keeps them
    the constructor         run once more on the CPU, without parameters: `construct_buffers`
    the module's own rule   `Adapter.initialise`, on memory whose unwritten parts are noticed: `written`

and persistent ones are then read from a folder of weights or a checkpoint. What nothing sets is refused by name.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from atoll.base._torch import writes_to
from atoll.base.errors import PlanError
from atoll.runtime.models.adapter import Adapter, Block

_SHOWN = 4


def persistent_buffers(adapter: Adapter, blocks: Iterable[Block]) -> dict[str, Tensor]:
    """Return the persistent buffers of some blocks, and those outside of all blocks, by qualified name."""
    found = {name: buffer for block in blocks for name, buffer in buffers_of(block).items()}
    return found | buffers_outside(adapter)


def buffers_of(block: Block) -> dict[str, Tensor]:
    """Return the persistent buffers of a block by qualified name."""
    return _persistent(block.module, block.module.named_modules(), prefix=f"{block.name}.")


def buffers_outside(adapter: Adapter) -> dict[str, Tensor]:
    """Return the persistent buffers outside of all blocks by qualified name."""
    root = getattr(adapter, "model", None)
    return _persistent(root, modules_outside(adapter).items()) if isinstance(root, nn.Module) else {}


def modules_outside(adapter: Adapter) -> dict[str, nn.Module]:
    """Return the modules with buffers outside of all blocks by name: every stage runs them, such as a model that adds a
    bias to its logits."""
    root = getattr(adapter, "model", None)
    if not isinstance(root, nn.Module):
        return {}
    inside = {id(module) for block in adapter.blocks() for module in block.module.modules()}
    outside = {name: module for name, module in root.named_modules() if id(module) not in inside}
    return {name: each for name, each in outside.items() if any(True for _ in each.buffers(recurse=False))}


def transient_buffers(adapter: Adapter) -> tuple[str, ...]:
    """Return the names of the buffers of all blocks that no checkpoint needs."""
    every = (f"{block.name}.{name}" for block in adapter.blocks() for name, _ in block.module.named_buffers())
    return tuple(sorted(set(every) - set(persistent_buffers(adapter, adapter.blocks()))))


def first_names(adapter: Adapter) -> dict[str, str]:
    """Return each later name of a buffer that several blocks share with its first one."""
    firsts: dict[Tensor, str] = {}
    later = {}
    for block in adapter.blocks():
        for name, buffer in block.module.named_buffers():
            first = firsts.setdefault(buffer, f"{block.name}.{name}")
            if first != f"{block.name}.{name}":
                later[f"{block.name}.{name}"] = first
    return later


def _persistent(root: nn.Module, modules: Iterable[tuple[str, nn.Module]], prefix: str = "") -> dict[str, Tensor]:
    named = {
        f"{name}.{key}" if name else key: buffer
        for name, module in modules
        for key, buffer in module.named_buffers(recurse=False)
    }
    kept = root.state_dict(keep_vars=True) if named else {}
    return {f"{prefix}{name}": buffer for name, buffer in named.items() if name in kept}


def construct_buffers(model: Any) -> str:
    """Give the buffers on `meta` of a model of `transformers` the values of a new model of its class and config.

    The class is constructed once more, on the CPU and in the model's dtype; its parameters stay on `meta` and are not
    initialized. Buffers that this leaves without values stay on `meta`. Buffers that the constructor draws at random
    have the same values on every rank, and under any seed of the run. What `from_pretrained` keeps in fp32, such as the
    biases of routers, is in fp32.

    Returns why the class cannot be constructed, or an empty text.
    """
    lost = [(name, module) for name, module in model.named_modules() if on_meta(module)]
    if not lost:
        return ""
    try:
        made = _constructed(model)
    except Exception as error:  # a class with arguments of its own, or one that computes with its parameters
        return f"{type(model).__name__}(config) fails: {type(error).__name__}: {error}"
    values = dict(made.named_buffers(remove_duplicate=False))
    moved: dict[Tensor, Tensor] = {}
    in_fp32 = kept_in_fp32(model, model.dtype)
    for name, module in lost:
        for key, buffer in on_meta(module).items():
            plain = f"{name}.{key}".replace(".base_layer.", ".").removeprefix(".")
            value = values.get(plain)
            if value is None or value.is_meta or value.shape != buffer.shape or _has_nan(value):
                continue
            if buffer not in moved:
                dtype = torch.float32 if buffer.is_floating_point() and in_fp32(plain) else buffer.dtype
                moved[buffer] = value.detach().to(dtype, copy=True).contiguous()
            setattr(module, key, moved[buffer])
    return ""


def constructed_constants(model: Any) -> dict[str, Tensor]:
    """Return the small parameters to which the constructor of a model of `transformers` gives the same values whatever
    the seed, by name. Activations have such parameters, and `_init_weights` does not set them."""
    try:
        one, two = (dict(_constructed(model, seed=seed, keeps=_SMALL).named_parameters()) for seed in (0, 1))
    except Exception:  # the caller names the parameters that stay without values
        return {}
    return {
        name: value.detach()
        for name, value in one.items()
        if not value.is_meta and not _has_nan(value) and torch.equal(value, two[name])
    }


def _constructed(model: Any, seed: int = 0, keeps: int = 0) -> nn.Module:
    """Construct a model again. keeps: elements up to which parameters keep what the constructor gives them."""
    from transformers.initialization import no_init_weights

    before = torch.get_default_dtype()
    dtype = model.dtype if model.dtype in _DEFAULTS else before
    config = copy.deepcopy(model.config)
    config.dtype = dtype  # a config that has been saved has its name
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # said when the model itself was constructed
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(dtype)
        torch.default_generator.manual_seed(seed)
        stack.enter_context(torch.device("cpu"))
        stack.callback(register_module_parameter_registration_hook(partial(_small, keeps)).remove)
        with _NoMemoryAsFound(), no_init_weights():
            made: Any = type(model)(config)
        # The family's rule for buffers, and for nothing else: modules and parameters that are marked are skipped.
        for module in made.modules():
            module._is_hf_initialized = not any(True for _ in module.buffers(recurse=False))
        for parameter in made.parameters():
            parameter._is_hf_initialized = True
        made.initialize_weights()
    found: nn.Module = made
    return found


def _small(keeps: int, module: nn.Module, name: str, parameter: Any) -> Any:
    """Return a parameter on `meta` in place of one that is registered, or None to leave it."""
    if parameter is None or parameter.is_meta or parameter.numel() <= keeps:
        return None
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)


class _NoMemoryAsFound(TorchFunctionMode):
    """Mode in which uninitialized tensors are `_unwritten_like`, and large ones, which become parameters, on `meta`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _UNINITIALIZED:
            return func(*args, **kwargs)
        planned = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        on_meta = "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "meta"
        return planned if on_meta or planned.numel() > _MOST else _unwritten_like(planned)


_UNINITIALIZED = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
)
_SMALL = 1 << 12
"""Elements of a parameter that may be a constant of an activation."""
_MOST = 1 << 20
"""Elements of a buffer that a constructor may begin without values: parameters are as large, and are not allocated."""

_DEFAULTS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def kept_in_fp32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return which tensors a model of `transformers` has in fp32 if it is loaded in a half precision."""
    plan: dict[str, torch.dtype] = getattr(model, "_get_dtype_plan", lambda dtype: {})(dtype)
    patterns = [re.compile(str(each).replace("*", ".*")) for each in plan]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def on_meta(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own buffers on `meta`."""
    return {key: buffer for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta}


def _has_nan(buffer: Tensor) -> bool:
    if not (buffer.is_floating_point() or buffer.is_complex()):
        return False
    wide = buffer if buffer.is_complex() or buffer.dtype in _DEFAULTS else buffer.float()
    return bool(wide.isnan().any())


@contextmanager
def written(
    modules: Iterable[tuple[str, nn.Module]], *, read: Container[str] = (), why: str = "", made: dict[Tensor, Tensor]
) -> Iterator[None]:
    """Context that gives buffers on `meta` memory on the CPU, which what runs inside must fill; others keep their
    values.

    read: names of buffers whose values are read afterwards.  why: reason for an error.  made: buffer on `meta` -> its
    replacement, so that a shared buffer stays shared.

    Raises PlanError with the names of buffers that were not written.
    """
    kept: list[tuple[nn.Module, str, Tensor]] = []
    empty: list[tuple[str, nn.Module, str, Tensor, Callable[[], bool]]] = []
    for name, module in modules:
        for key, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                kept.append((module, key, buffer))
                setattr(module, key, buffer.clone())
                continue
            if buffer not in made:
                made[buffer] = _unwritten_like(buffer)
            setattr(module, key, made[buffer])
            full = f"{name}.{key}" if name else key
            empty.append((full, module, key, made[buffer], writes_to(made[buffer])))
    try:
        yield
    finally:
        for module, key, buffer in kept:
            setattr(module, key, buffer)
    lost = []
    for full, module, key, given, is_written in empty:
        now = getattr(module, key)
        if full not in read and ((now is given and not is_written()) or _has_nan(now)):
            lost.append(f"{full} ({type(module).__name__})")
    if lost:
        raise PlanError(
            f"{len(lost)} buffers were built on the meta device, and nothing sets them: {', '.join(lost[:_SHOWN])}"
            f"{', ...' if len(lost) > _SHOWN else ''}{f' ({why})' if why else ''}; build the model on the CPU, or set "
            "them in their modules' reset_parameters() or in the adapter's initialise()"
        )


def _unwritten_like(buffer: Tensor) -> Tensor:
    """Return memory that nobody can take for values: NaN, or zeros where there is none."""
    made = torch.zeros_like(buffer, device="cpu", memory_format=torch.contiguous_format)
    return made.fill_(torch.nan) if buffer.is_floating_point() or buffer.is_complex() else made
