"""Conversion of text to token arrays, and the order of samples. Imports torch only for `loader`, on first access."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atoll.base.labels import IGNORED_LABEL
from atoll.training.data.corpus import Source, documents, find_source, fingerprint
from atoll.training.data.masking import hide
from atoll.training.data.order import SampleOrder, TokenBatch, batch, sample_count, validation_batches
from atoll.training.data.recipe import expected_ids
from atoll.training.data.rows import Packing, Rows, SplitTokens, rows_of
from atoll.training.data.store import Corpus, prepare, preview
from atoll.training.data.supply import Name, Supply, prepare_supply, preview_supply
from atoll.training.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

if TYPE_CHECKING:
    from atoll.training.setup.loader import loader

__all__ = [
    "IGNORED_LABEL",
    "ByteTokenizer",
    "Corpus",
    "FileTokenizer",
    "Name",
    "Packing",
    "Rows",
    "SampleOrder",
    "Source",
    "SplitTokens",
    "Supply",
    "TokenBatch",
    "Tokenizer",
    "batch",
    "documents",
    "expected_ids",
    "find_source",
    "fingerprint",
    "hide",
    "loader",
    "prepare",
    "prepare_supply",
    "preview",
    "preview_supply",
    "rows_of",
    "sample_count",
    "validation_batches",
]


def __getattr__(name: str) -> Any:
    if name == "loader":
        return import_module("atoll.training.setup.loader").loader
    raise AttributeError(f"module 'atoll.training.data' has no attribute {name!r}")
