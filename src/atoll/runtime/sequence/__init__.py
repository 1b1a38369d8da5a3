"""Sequences that ranks divide: each computes its positions, and its heads of whole sequences in attention."""
