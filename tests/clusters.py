"""Files of clusters that several tests write."""

TWO_CPUS = """
[device]
memory = 8_000_000_000
bandwidth = 1e10
rates = { float32 = 3e10 }
[node]
devices = 2
link = { rate = 1e9, latency = 2e-5 }
"""
