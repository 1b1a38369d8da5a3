"""What happens while a run trains: the loop, checkpoints, results, restarts; and the reading of its measurements."""
