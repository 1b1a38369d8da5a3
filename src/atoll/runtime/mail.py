"""Send and receive of activations and gradients between a stage and its neighbours.

[Note: who waits for whom] Receives are posted before their action, at the program's POST, in the order of the rank's
actions, which is the sender's order for each pair of ranks; the action itself waits. NCCL has no tags: it matches the
n-th receive of a link with its n-th send. So no receive may be posted while one before it is not, also if that one
cannot be: two messages of one shape would change places without an error. The computing thread never waits for a send:
a gloo send completes only when its receiver is ready, and waiting would deadlock 1F1B. The transport's outbox waits,
and releases sent buffers.

[Note: shapes] A stage's output shape is determined by the microbatch's shapes. The first time a rank sees a kind of
microbatch, the sender puts the shape and whether a gradient is expected in a header before the tensor; from then on
both sides know, and receives are posted early. Until then they, and all behind them, are posted when they are waited
for.

[Note: received buffers] Buffers are reused after the microbatch's W, if nothing refers to them: W may keep the
received activation or gradient itself.

[Note: coded hops] Between ranks of different nodes `Codecs.hop` applies to what has a gradient, activation and gradient
alike: both ends know the form and the peer, so no message says that it is coded. A hop is encoded once, and each rank
of a tensor-parallel group encodes the same bits. A coded message is decoded where it is waited for, not where it
arrives, on the stream of the computation; its bytes are freed then.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from atoll.base.errors import CostWarning, RunError
from atoll.plans.ir import Action, Op
from atoll.plans.layouts import NO_CODECS, Codec, Codecs
from atoll.plans.plan import Plan
from atoll.runtime.models.batch import Batch, tensors_in
from atoll.runtime.sharding.coding import decode, encode
from atoll.runtime.transport import Channel, Message, Tag, Transport, shared_memory

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 12


@dataclass(frozen=True, slots=True)
class Wire:
    """Message between two stages for one kind of microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


@dataclass(frozen=True, slots=True)
class Parcel:
    """Message of a split vocabulary, whose contents both sides know."""

    peer: int
    tag: Tag
    wire: Wire


@dataclass(slots=True)
class _Expected:
    """Message that a posted receive waits for. codec: of the buffer, None for elements as they are."""

    op: Op
    stage: int
    microbatch: int
    kind: tuple[int, int]
    peer: int
    tag: Tag
    wire: Wire | None = None
    message: Message | None = None
    buffer: torch.Tensor | None = None
    codec: Codec | None = None

    def is_for(self, action: Action) -> bool:
        """Return True if the message belongs to this action."""
        return (self.op, self.stage, self.microbatch) == (action.op, action.stage, action.microbatch)


class Mail:
    """Messages of one rank. `rank_of` gives the world rank of a stage.

    codecs: of hops to and from the world ranks `far`.
    """

    def __init__(
        self,
        transport: Transport,
        rank_of: Callable[[int], int],
        *,
        codecs: Codecs = NO_CODECS,
        far: Collection[int] = (),
    ) -> None:
        self._transport = transport
        self._rank_of = rank_of
        self._codecs, self._far = codecs, far
        self._wires: dict[tuple[int, int], Wire] = {}
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}
        self._known: dict[tuple[object, ...], int] = {}
        self._kinds: Sequence[int] = ()
        self._expected: list[_Expected] = []
        # Places in `_expected`: what is waited for next, what is posted next, and the end of what the program has asked
        # to post. Between the last two lies what cannot be posted yet, and what is behind it.
        self._next = self._posted = self._due = 0

    def begin(
        self,
        row: Sequence[Action],
        batches: Sequence[Batch],
        *,
        training: bool,
        parcels: Callable[[Action], list[Parcel] | None] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Begin a program.

        batches: of each microbatch that actions count.  lengths: of the parts of sequences that are computed of each.
        parcels: contents of the receives of a split vocabulary; None for those of a stage.
        """
        parts = lengths if lengths is not None else [0] * len(batches)
        self._kinds = [
            self._kind_of((training, part, _shapes(batch))) for part, batch in zip(parts, batches, strict=True)
        ]
        self._expected = []
        for action in row:
            if action.op in _RECEIVES:
                known = None if parcels is None else parcels(action)
                self._expected += [self._expect(action)] if known is None else _expect_parcels(action, known)
        self._next = self._posted = self._due = 0

    def _kind_of(self, described: tuple[object, ...]) -> int:
        """Return the number of a kind of microbatch: nested tuples are slow to look up for every message."""
        return self._known.setdefault(described, len(self._known))

    def _expect(self, action: Action) -> _Expected:
        assert action.microbatch is not None, "messages have microbatches"
        is_forward = action.op is Op.RECV_F
        sender = action.stage - 1 if is_forward else action.stage + 1
        kind = sender if is_forward else action.stage, self._kinds[action.microbatch]
        tag = Tag(Channel.FORWARD if is_forward else Channel.BACKWARD, sender, action.microbatch)
        return _Expected(action.op, action.stage, action.microbatch, kind=kind, peer=self._rank_of(sender), tag=tag)

    def begin_again(self, stale: Sequence[tuple[Action, int]]) -> None:
        """Begin the same program again after a false start.

        stale: receives that the program did not reach, and the ranks whose false starts sent their messages. No others
        are posted: those behind the verdict are posted behind it (`atoll.program.end`).
        """
        for action, peer in stale:
            expected = next(each for each in self._expected if each.is_for(action) and each.peer == peer)
            received = self._take(expected)
            if received is not None:
                self.recycle(*received)
        self._next = self._posted = self._due = 0

    def end(self) -> None:
        """Raise the first error of a sent message."""
        self._transport.check()

    # ---- sends

    def send_forward(self, stage: int, microbatch: int, output: torch.Tensor) -> None:
        """Send a stage's output to the next stage's rank."""
        peer = self._rank_of(stage + 1)
        kind = stage, self._kinds[microbatch]
        if kind not in self._wires:
            self._wires[kind] = Wire(tuple(output.shape), output.dtype, output.requires_grad)
            header = self._encode(self._wires[kind])
            self._transport.post(header, peer, Tag(Channel.SHAPE, stage, microbatch))
        send = self._send_coded if self._wires[kind].has_gradient else self.send
        send(output.detach().contiguous(), peer, Tag(Channel.FORWARD, stage, microbatch))

    def send_backward(self, stage: int, microbatch: int, gradient: torch.Tensor) -> None:
        """Send the gradient of a stage's input to the previous stage's rank."""
        self._send_coded(gradient.contiguous(), self._rank_of(stage - 1), Tag(Channel.BACKWARD, stage, microbatch))

    def _send_coded(self, tensor: torch.Tensor, peer: int, tag: Tag) -> None:
        """Send a contiguous tensor, encoded if the hop is: [Note: coded hops]."""
        codec = self._codec(tensor, peer)
        if codec is not None:
            values, tensor = tensor.view(-1), self._coded(codec, tensor.numel())
            encode(codec, values, tensor)
        self.send(tensor, peer, tag)

    def _coded(self, codec: Codec, numel: int) -> torch.Tensor:
        return torch.empty(codec.nbytes(numel), dtype=torch.uint8, device=self._transport.device)

    def _codec(self, like: torch.Tensor | Wire, peer: int) -> Codec | None:
        """Return the codec of a hop with a gradient; None where elements are sent as they are."""
        return self._codecs.hop_of(like.shape[-1], like.dtype.itemsize) if peer in self._far else None

    def send(self, tensor: torch.Tensor, peer: int, tag: Tag) -> None:
        """Send a contiguous tensor to a world rank that knows its shape."""
        self._transport.post(tensor, peer, tag)

    # ---- receives

    def receive(self, op: Op, stage: int) -> tuple[torch.Tensor, Wire] | None:
        """Wait for the next message, which `op` on `stage` needs. Return None for a gradient that is not needed."""
        expected = self._expected[self._next]
        assert (expected.op, expected.stage) == (op, stage), "receives are asked for in the order of the row"
        self._next += 1
        received = self._take(expected)
        # Its form is known now, and so may be that of the ones behind it.
        self._posted = max(self._posted, self._next)
        self._post_due()
        return received

    def _take(self, expected: _Expected) -> tuple[torch.Tensor, Wire] | None:
        """Wait for a message, which is posted now if it was not yet."""
        if self._wire(expected) is None:
            self._wires[expected.kind] = self._ask(expected)
        wire = self._wire(expected)
        assert wire is not None, "it is known since its header"
        if not _is_sent(expected, wire):
            return None
        if expected.message is None:
            self._start(expected, wire)
        message, buffer = expected.message, expected.buffer
        assert message is not None, "it has just been posted"
        assert buffer is not None, "it has just been posted"
        expected.message = expected.buffer = None
        message.wait()
        if expected.codec is not None:
            coded, buffer = buffer, self._buffer(wire)
            decode(expected.codec, coded, buffer.view(-1))
        return buffer, wire

    def recycle(self, buffer: torch.Tensor, wire: Wire) -> None:
        """Keep a received buffer for reuse."""
        self._free.setdefault((wire.shape, wire.dtype), []).append(buffer)

    def post(self, action: Action) -> None:
        """Post the receives of an action, the next one that is due, behind all those before it."""
        while self._due < len(self._expected) and self._expected[self._due].is_for(action):
            self._due += 1
        self._post_due()

    def _post_due(self) -> None:
        """Post what is due, up to the first message whose form is unknown."""
        while self._posted < self._due:
            expected = self._expected[self._posted]
            wire = self._wire(expected)
            if wire is None:
                return
            if expected.message is None and _is_sent(expected, wire):
                self._start(expected, wire)
            self._posted += 1

    def _wire(self, expected: _Expected) -> Wire | None:
        return expected.wire or self._wires.get(expected.kind)

    def _start(self, expected: _Expected, wire: Wire) -> None:
        # A message of a split vocabulary is no hop, and has its form from the beginning.
        is_hop = expected.wire is None and wire.has_gradient
        codec = expected.codec = self._codec(wire, expected.peer) if is_hop else None
        buffer = self._buffer(wire) if codec is None else self._coded(codec, math.prod(wire.shape))
        expected.message = self._transport.receive(buffer, expected.peer, expected.tag)
        expected.buffer = buffer

    def _buffer(self, wire: Wire) -> torch.Tensor:
        """Return a buffer for what a message has, which `recycle` takes back."""
        free = self._free.get((wire.shape, wire.dtype))
        return free.pop() if free else torch.empty(wire.shape, dtype=wire.dtype, device=self._transport.device)

    def _ask(self, expected: _Expected) -> Wire:
        """Return the form of a new kind of message, from the header that precedes it."""
        stage, _ = expected.kind
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self._transport.device)
        tag = Tag(Channel.SHAPE, stage, expected.microbatch)
        self._transport.receive(header, self._rank_of(stage), tag).wait()
        return self._decode(header)

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


def _is_sent(expected: _Expected, wire: Wire) -> bool:
    """Return True if the message is sent: a gradient is where its activation needs one."""
    return expected.wire is not None or expected.op is not Op.RECV_B or wire.has_gradient


_RECEIVES = frozenset({Op.RECV_F, Op.RECV_B, Op.RECV_S, Op.RECV_T, Op.RECV_G})


def _expect_parcels(action: Action, parcels: Sequence[Parcel]) -> list[_Expected]:
    assert action.microbatch is not None, "messages have microbatches"
    return [
        _Expected(
            action.op, action.stage, action.microbatch, kind=(-1, -1), peer=each.peer, tag=each.tag, wire=each.wire
        )
        for each in parcels
    ]


def _shapes(batch: Batch) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the key that determines a stage's output shape. It includes labels and an encoder-decoder's input."""
    return tuple(sorted((name, tuple(value.shape)) for name, value in tensors_in(batch)))


def far_ranks(plan: Plan, transport: Transport) -> frozenset[int]:
    """Return the world ranks of this rank's pipeline whose hops to and from it are coded. All ranks call it together.

    Pipeline ranks are near where they share a machine in every pipeline: the ranks of a tensor-parallel group have the
    same activations and encode all of them, or none.
    """
    codecs, place, mesh = plan.codecs, transport.place, plan.mesh
    peers = place.peers("pp")
    if codecs.hop is None or codecs.near:
        return frozenset(peers if codecs.hop is not None else ())
    machines = torch.zeros(mesh.world, dtype=torch.float64)
    machines[place.rank] = shared_memory.host()
    axis = [*mesh.sizes].index("pp")
    at = transport.total(machines).view(*mesh.sizes.values()).movedim(axis, 0).flatten(1)
    # A machine without a number is 0, and near nobody.
    near = ((at == at[place.pp]) & (at > 0)).all(1).tolist()
    found = frozenset(rank for rank, is_near in zip(peers, near, strict=True) if not is_near)
    if not found and place.rank == 0 and mesh.pipeline > 1:
        words = f"parallel.codecs.hop = {codecs.hop.name!r} has no effect: stages are on one machine; set near = true"
        warnings.warn(words, CostWarning, stacklevel=5)
    return found
