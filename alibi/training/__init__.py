"""Training: one jitted step over a device mesh, checkpoints, metrics and the loop."""
