"""Stages, and the executor of their programs."""
