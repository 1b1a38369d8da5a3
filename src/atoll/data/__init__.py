"""Text to token arrays, and the order in which samples are taken. No torch."""

from atoll.data.corpus import Source, documents, find_source, fingerprint
from atoll.data.masking import hide
from atoll.data.order import IGNORED_LABEL, Batch, SampleOrder, batch, sample_count, validation_batches
from atoll.data.store import Corpus, expected_ids, prepare, preview
from atoll.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

__all__ = [
    "IGNORED_LABEL",
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "FileTokenizer",
    "SampleOrder",
    "Source",
    "Tokenizer",
    "batch",
    "documents",
    "expected_ids",
    "find_source",
    "fingerprint",
    "hide",
    "prepare",
    "preview",
    "sample_count",
    "validation_batches",
]
