"""Builds a run before its first step: plan, model, optimizer, learning rates, samples."""
