"""What a run writes and shows: its folder and lock, the files in it, loggers, and the lines on stderr."""
