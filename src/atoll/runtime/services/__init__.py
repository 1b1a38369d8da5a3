"""Services of an engine besides its step: bad steps, checkpoints, parameters, buffers, timing."""
