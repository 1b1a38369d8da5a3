"""What `atoll train` does around an engine: process, folder, display, optimizer, data, text and the loop."""
