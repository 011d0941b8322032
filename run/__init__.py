"""The output of a run besides its checkpoints: the log, and the pictures in it."""
