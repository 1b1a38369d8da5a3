"""Communication between ranks: messages, gathers and reductions of flat buffers, and small sums."""

from atoll.runtime.transport.base import Channel, DirectSum, GroupMemory, Later, Message, Outbox, Peers, Tag, Transport
from atoll.runtime.transport.gloo import GlooTransport, StagedTransport
from atoll.runtime.transport.nccl import Collective, NcclTransport, StreamOutbox
from atoll.runtime.transport.world import connect, join, leave, world_rank, world_size, world_store

__all__ = [
    "Channel",
    "Collective",
    "DirectSum",
    "GlooTransport",
    "GroupMemory",
    "Later",
    "Message",
    "NcclTransport",
    "Outbox",
    "Peers",
    "StagedTransport",
    "StreamOutbox",
    "Tag",
    "Transport",
    "connect",
    "join",
    "leave",
    "world_rank",
    "world_size",
    "world_store",
]
