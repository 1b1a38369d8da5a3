"""Output of a run: its folder with lock and files, loggers, and progress on stderr."""
