"""Measurement of a machine's devices and links, written as the TOML of an `atoll.prediction.cost.Cluster`."""
