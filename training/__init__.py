"""What train.py trains with: a run and its optimizers, evaluation, and several processes."""
