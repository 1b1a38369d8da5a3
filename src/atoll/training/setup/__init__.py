"""What a run is made of before its first step: model, optimizer, learning rates, samples, and the chosen plan."""
