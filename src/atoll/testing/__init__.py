"""Helpers of Atoll's own tests, shipped for yours."""

from atoll.testing.pool import RankPool, run_ranks

__all__ = ["RankPool", "run_ranks"]
