"""Training: configuration, the step, the loop, checkpoints, memory."""
