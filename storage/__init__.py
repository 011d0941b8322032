"""The output of a run: checkpoints, its folder, the log; `checkpoint.load_model` for Python."""
