"""Training: the step, optimizers, schedule, evaluation, and several processes."""
