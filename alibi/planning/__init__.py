"""Plans: memory, operations, time and checkpoints of a training run on devices elsewhere."""
