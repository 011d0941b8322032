"""Checkpoints and run folders: no run is lost; `load_model` loads a model for use in Python."""

from checkpointing.checkpoint import load_model

__all__ = ["load_model"]
