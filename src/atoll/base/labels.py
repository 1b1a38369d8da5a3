"""Labels of a batch."""

IGNORED_LABEL = -100
"""A label that does not count, as in torch.nn.CrossEntropyLoss."""
