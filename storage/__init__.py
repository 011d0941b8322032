"""The output of a run: checkpoints, its folder, the log. `load_model` loads a model for Python."""

from storage.checkpoint import load_model

__all__ = ["load_model"]
