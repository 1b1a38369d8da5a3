"""Embedding and head split by their rows over the pipeline's ranks: everything that this adds to a step."""
