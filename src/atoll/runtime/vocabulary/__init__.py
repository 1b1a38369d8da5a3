"""Embedding and head split by rows over the pipeline ranks."""

from atoll.runtime.vocabulary import plays as plays
