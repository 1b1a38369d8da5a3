"""The training of a run: loop, checkpoints, results and restarts. Also reads the measurements of a run."""
