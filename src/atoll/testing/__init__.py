"""Test helpers, used by Atoll's own tests and shipped for yours."""

from atoll.testing.pool import RankPool, run_ranks

__all__ = ["RankPool", "run_ranks"]
