"""Sharding of the model state: levels, layouts, precision, nested shards, memory and traffic."""

from atoll.layouts.accounting import (
    Footprint,
    PublishedMemory,
    Traffic,
    footprint,
    published_memory,
    traffic,
)
from atoll.layouts.flat import Box, Entry, FlatMap, Nest, Shape, Slice, boxes
from atoll.layouts.layout import ALIASES, ALL, EFFECTIVE, Layout
from atoll.layouts.level import (
    GATHER_INTER,
    GATHER_INTRA,
    GATHER_PARAMETER,
    REDUCE_GRADIENT,
    REDUCE_INTER,
    REDUCE_INTRA,
    SYNC_GRADIENT,
    SYNC_PARAMETER,
    Axis,
    Kind,
    Level,
    Move,
    Moves,
)
from atoll.layouts.precision import ITEM_BYTES, PRESETS, Precision
from atoll.layouts.storage import SegmentShape, Sharding, Stored
from atoll.layouts.working import AT_ONCE, WorkingMemory, reduced_at_once, working_memory

__all__ = [
    "ALIASES",
    "ALL",
    "AT_ONCE",
    "EFFECTIVE",
    "GATHER_INTER",
    "GATHER_INTRA",
    "GATHER_PARAMETER",
    "ITEM_BYTES",
    "PRESETS",
    "REDUCE_GRADIENT",
    "REDUCE_INTER",
    "REDUCE_INTRA",
    "SYNC_GRADIENT",
    "SYNC_PARAMETER",
    "Axis",
    "Box",
    "Entry",
    "FlatMap",
    "Footprint",
    "Kind",
    "Layout",
    "Level",
    "Move",
    "Moves",
    "Nest",
    "Precision",
    "PublishedMemory",
    "SegmentShape",
    "Shape",
    "Sharding",
    "Slice",
    "Stored",
    "Traffic",
    "WorkingMemory",
    "boxes",
    "footprint",
    "published_memory",
    "reduced_at_once",
    "traffic",
    "working_memory",
]
