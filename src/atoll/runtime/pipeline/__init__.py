"""Stages, and the executor that plays a schedule on them."""
