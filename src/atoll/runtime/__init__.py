"""Execution of a plan on torch.distributed."""
