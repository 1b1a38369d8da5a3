"""Experts that the ranks of a group divide: their division, the exchange of rows, and grouped products."""
