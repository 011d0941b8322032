"""What a run writes besides its checkpoints: the log, and the pictures in it."""
