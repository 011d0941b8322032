"""Checkpoints and the run folder: what makes sure that no run is lost."""
