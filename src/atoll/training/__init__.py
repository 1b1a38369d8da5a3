"""The training run around an engine: process, folder, progress, optimizer, data, text generation and the loop."""
