"""Embedding and head split by rows over the pipeline ranks."""
