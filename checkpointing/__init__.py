"""Checkpoints, the run folder, and the import and export of models."""
