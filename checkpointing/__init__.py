"""Checkpoints and the run folder: no run is lost, and `load_model` reads one in Python."""

from checkpointing.checkpoint import load_model

__all__ = ["load_model"]
