"""Seconds and bytes of a plan, the best plan, and what explains them."""
