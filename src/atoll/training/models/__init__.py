"""Models in folders of others: their kinds, `transformers` models, and conversion to and from checkpoints."""
