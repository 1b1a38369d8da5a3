"""Embedding and head split by rows over the pipeline ranks, and the loss in chunks of tokens."""

from atoll.runtime.vocabulary import chunked as chunked
from atoll.runtime.vocabulary import plays as plays
