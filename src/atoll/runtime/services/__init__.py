"""What an engine owns besides its step: bad steps, checkpoints, parameters, buffers, timing."""
