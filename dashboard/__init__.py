"""Everything that a run shows: the console, TensorBoard, and the plots in it."""
