"""Measures the devices and links of a machine by running, and writes them as the TOML of an `atoll.cost.Cluster`."""
