"""Plans for a training run on devices elsewhere: memory, operations, time and checkpoints."""
