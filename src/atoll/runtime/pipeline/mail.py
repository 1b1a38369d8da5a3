"""What a stage sends to its neighbours and receives from them.

[Note: who waits for whom] Receives are posted ahead of their action, in the order of the row, which is the sender's
order for each pair of ranks; the action itself waits. Sends are never waited for by the rank that computes: a gloo
send ends only when its receiver is there, and a rank that waited would hang 1F1B. The transport's outbox waits, and
lets go of what has left.

[Note: shapes] A stage's output shape follows from the microbatch's shapes. The first time a rank sees a kind of
microbatch, the sender puts the shape and whether a gradient is expected in a header before the tensor; from then on
both sides know, and receives are posted early.

[Note: received buffers] Buffers are used again once nothing of the microbatch can look at them, after its W: what W
keeps may be the received activation or gradient itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from atoll.errors import RunError
from atoll.ir import Action, Op
from atoll.models import Batch
from atoll.runtime.transport import Channel, Message, Tag, Transport

AHEAD = 2
"""Receives that are posted beyond the one that is wanted next."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 12


@dataclass(frozen=True, slots=True)
class Wire:
    """What travels between two stages for one kind of microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


class Mail:
    """The messages of one rank. `rank_of` gives the world rank of a stage."""

    def __init__(self, transport: Transport, rank_of: Callable[[int], int]) -> None:
        self._transport = transport
        self._rank_of = rank_of
        self._wires: dict[tuple[int, int], Wire] = {}
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}
        self._known: dict[tuple[object, ...], int] = {}
        self._kinds: Sequence[int] = ()
        self._posted: dict[Action, tuple[Message, torch.Tensor]] = {}
        self._expected: list[Action] = []
        self._places: dict[Action, int] = {}
        self._next = 0

    def begin(self, row: Sequence[Action], batches: Sequence[Batch], *, training: bool) -> None:
        """Begin a row; the first receives are posted where their shapes are known."""
        self._kinds = [self._kind_of((training, _shapes(batch))) for batch in batches]
        self._expected = [action for action in row if action.op in (Op.RECV_F, Op.RECV_B)]
        self._places = {action: at for at, action in enumerate(self._expected)}
        self._next = 0
        self._posted.clear()
        self._post()

    def _kind_of(self, described: tuple[object, ...]) -> int:
        """The number of a kind of microbatch: messages are many, and nested tuples slow to look up."""
        return self._known.setdefault(described, len(self._known))

    def begin_again(self, stale: Sequence[Action]) -> None:
        """Begin the same row again after a false start.

        stale: receives that the row did not come to, of messages that their senders' false starts sent. Receives that
        are posted beyond those stay posted: the next messages of their tags are the right ones.
        """
        for action in stale:
            received = self.receive(action)
            if received is not None:
                self.recycle(received[0])
        self._next = 0
        self._post()

    def end(self) -> None:
        """Raise the first error of a message that was sent."""
        self._transport.check()

    # ---- sending

    def send_forward(self, stage: int, microbatch: int, output: torch.Tensor) -> None:
        """Send a stage's output to the next one's rank."""
        peer = self._rank_of(stage + 1)
        kind = stage, self._kinds[microbatch]
        if kind not in self._wires:
            self._wires[kind] = Wire(tuple(output.shape), output.dtype, output.requires_grad)
            header = self._encode(self._wires[kind])
            self._transport.post(header, peer, Tag(Channel.SHAPE, stage, microbatch))
        self._transport.post(output.detach().contiguous(), peer, Tag(Channel.FORWARD, stage, microbatch))

    def send_backward(self, stage: int, microbatch: int, gradient: torch.Tensor) -> None:
        """Send the gradient of a stage's input to the rank of the one before."""
        peer = self._rank_of(stage - 1)
        self._transport.post(gradient.contiguous(), peer, Tag(Channel.BACKWARD, stage, microbatch))

    # ---- receiving

    def receive(self, action: Action) -> tuple[torch.Tensor, Wire] | None:
        """Wait for what a RECV action names; None for a gradient that the stage does not need."""
        self._next = self._places[action] + 1
        wire = self._wire(action, ask=True)
        assert wire is not None, "the header was asked for"
        if action.op is Op.RECV_B and not wire.has_gradient:
            return None
        if action not in self._posted:
            self._posted[action] = self._start(action, wire)
        self._post()
        message, buffer = self._posted.pop(action)
        message.wait()
        return buffer, wire

    def recycle(self, buffer: torch.Tensor) -> None:
        """Take a received buffer back."""
        self._free.setdefault((tuple(buffer.shape), buffer.dtype), []).append(buffer)

    def _post(self) -> None:
        """Post the next receives, as far as their shapes are known."""
        for action in self._expected[self._next : self._next + AHEAD]:
            if action in self._posted:
                continue
            wire = self._wire(action, ask=False)
            if wire is None:
                return
            if action.op is Op.RECV_F or wire.has_gradient:
                self._posted[action] = self._start(action, wire)

    def _start(self, action: Action, wire: Wire) -> tuple[Message, torch.Tensor]:
        assert action.microbatch is not None, "messages have microbatches"
        free = self._free.get((wire.shape, wire.dtype))
        buffer = free.pop() if free else torch.empty(wire.shape, dtype=wire.dtype, device=self._transport.device)
        channel = Channel.FORWARD if action.op is Op.RECV_F else Channel.BACKWARD
        sender = action.stage - 1 if action.op is Op.RECV_F else action.stage + 1
        tag = Tag(channel, sender, action.microbatch)
        return self._transport.receive(buffer, self._rank_of(sender), tag), buffer

    def _wire(self, action: Action, *, ask: bool) -> Wire | None:
        """What a receive will bring; a forward of a new kind is asked for its header."""
        assert action.microbatch is not None, "messages have microbatches"
        stage = action.stage - 1 if action.op is Op.RECV_F else action.stage
        kind = stage, self._kinds[action.microbatch]
        if kind not in self._wires and ask:
            header = torch.zeros(_HEADER, dtype=torch.int64, device=self._transport.device)
            tag = Tag(Channel.SHAPE, stage, action.microbatch)
            self._transport.receive(header, self._rank_of(stage), tag).wait()
            self._wires[kind] = self._decode(header)
        return self._wires.get(kind)

    # ---- headers

    def _encode(self, wire: Wire) -> torch.Tensor:
        if len(wire.shape) > _HEADER - 3:
            raise RunError(f"a stage's output has {len(wire.shape)} dims; at most {_HEADER - 3} can be sent")
        values = [_DTYPES.index(wire.dtype), int(wire.has_gradient), len(wire.shape), *wire.shape]
        padded = values + [0] * (_HEADER - len(values))
        return torch.tensor(padded, dtype=torch.int64, device=self._transport.device)

    @staticmethod
    def _decode(header: torch.Tensor) -> Wire:
        dtype, has_gradient, dims, *sizes = header.tolist()
        return Wire(tuple(sizes[:dims]), _DTYPES[dtype], bool(has_gradient))


def _shapes(batch: Mapping[str, torch.Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """What the shape of a stage's output depends on."""
    return tuple((name, tuple(value.shape)) for name, value in sorted(batch.items()) if name != "labels")
