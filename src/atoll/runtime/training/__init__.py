"""The parts of a training run: folder, display, optimizer, data, text and the loop itself."""
