"""The training run around an engine: process, folder, display, optimizer, data, text and the loop."""
