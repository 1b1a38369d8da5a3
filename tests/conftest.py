"""What holds for every test."""

from hypothesis import HealthCheck, settings

# Other work on the machine must not fail a law, and a run must say the same twice.
settings.register_profile("atoll", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")
