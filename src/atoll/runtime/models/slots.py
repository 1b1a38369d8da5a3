"""Stand-ins for the modules of a Hugging Face model while one stage's forward runs; see hugging_face.py.

[Note: one tensor for several blocks]
Each block has a graph of its own, and the layers of a decoder all take the encoder's output. The first layer of a stage
takes the tensor itself, the others a leaf in its place. The gradient accumulated in the leaf is added to that of the
first layer, whose backward is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from atoll.runtime.models.divided import DividedLayers
from atoll.runtime.models.probe import OutputShape, Stack, argument, hidden_argument, replace_argument, replace_hidden


class StageEnd(Exception):  # noqa: N818  (the end of a stage, not an error)
    """Ends a forward with the hidden state that its stage returns."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class LayerSlot(nn.Module):
    """Replaces a layer and has its attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer
        self._act: Callable[..., Any] | None = None

    def doing(self, act: Callable[..., Any]) -> LayerSlot:
        """Return this slot, with `act` as its forward until the next call."""
        self._act = act
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the slot's function in the present stage."""
        assert self._act is not None, "a slot stands in the model only with something to do"
        return self._act(*args, **kwargs)


class Stub(nn.Module):
    """Returns zeros of the shapes of a module's outputs, and has the module's attributes; has a `weight` without
    elements."""

    def __init__(self, shape: OutputShape, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["_module"] = module
        self._shape = shape
        self._sizes: Mapping[int, int] = {}
        self.weight = torch.empty(0)

    def doing(self, sizes: Mapping[int, int], like: Tensor) -> Stub:
        """Return this stub, for a batch of such sizes on the device and in the dtype of a hidden state."""
        self._sizes = sizes
        if self.weight.device != like.device or self.weight.dtype != like.dtype:
            self.weight = torch.empty(0, device=like.device, dtype=like.dtype)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros."""
        return self._shape.zeros(self._sizes, like=self.weight)


@dataclass(slots=True)
class EncoderOutput:
    """The encoder's output, for all decoder layers of one forward.

    See [Note: one tensor for several blocks].
    """

    leaf: Tensor | None = None

    def shared(self, encoded: Any) -> Any:
        """The encoder's output for the next layer."""
        if not encoded.requires_grad:
            return encoded
        if self.leaf is not None:
            return self.leaf
        leaf = self.leaf = encoded.detach().requires_grad_()

        def join(gradient: Tensor) -> Tensor:
            gathered, leaf.grad = leaf.grad, None
            return gradient if gathered is None else gradient + gathered

        joined = encoded.view_as(encoded)
        joined.register_hook(join)
        return joined


@dataclass(slots=True)
class PlacedStack:
    """A stack whose layers are blocks from `begin` on.

    stubs: replacements of the modules that run before it.  slots: replacements of its layers.
    """

    stack: Stack
    begin: int
    stubs: Mapping[str, Stub]
    slots: list[LayerSlot] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [LayerSlot(layer) for layer in self.stack.layers.children()]

    @property
    def end(self) -> int:
        """The block after its last layer."""
        return self.begin + len(self.slots)

    @property
    def run(self) -> range:
        """Its layers, as blocks."""
        return range(self.begin, self.end)


@dataclass(slots=True)
class StageRun:
    """Blocks first..last-1 during one forward. hidden: input of the first one, None for block 0.  divided: what layers
    are given of each sequence, if sequences are divided."""

    first: int
    last: int
    hidden: Tensor | None
    memory: EncoderOutput
    divided: DividedLayers | None = None

    def act(self, placed: PlacedStack, at: int, module: nn.Module) -> Callable[..., Any] | None:
        """Return the replacement of layer block `at`; None: the layer itself."""
        stack, hidden, memory, divided = placed.stack, self.hidden, self.memory, self.divided
        layer = module if self.first <= at < self.last else None
        if hidden is not None and self.first >= placed.end and at == placed.end - 1:
            return lambda *args, **kwargs: stack.form.wrap(hidden)
        enters = hidden is not None and at == self.first
        ends = self.last <= placed.end and at == max(self.last - 1, placed.begin)
        if layer is not None and stack.memory is None and divided is None and not enters and not ends:
            return None

        def run(*args: Any, **kwargs: Any) -> Any:
            if enters:
                args, kwargs = replace_hidden(args, kwargs, hidden)
            if divided is not None and layer is not None:
                args, kwargs = divided.given(at - placed.begin, args, kwargs)
            encoded = None if stack.memory is None else argument(args, kwargs, stack.memory)
            if layer is None:
                output = stack.form.wrap(hidden_argument(args, kwargs))
            elif stack.memory is None:
                output = layer(*args, **kwargs)
            else:
                args, kwargs = replace_argument(args, kwargs, stack.memory, memory.shared(encoded))
                output, encoded = layer(*args, **kwargs), memory.shared(encoded)
            if not ends:
                return output
            given = stack.form.unwrap(output)
            if divided is not None:  # of a stage without layers the model has a whole
                given = divided.own(given)
            raise StageEnd(given if encoded is None else torch.cat([encoded, given], dim=1))

        return run
