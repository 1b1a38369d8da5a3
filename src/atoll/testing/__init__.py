"""What Atoll's own tests stand on, shipped for yours."""

from atoll.testing.pool import RankPool, run_ranks

__all__ = ["RankPool", "run_ranks"]
