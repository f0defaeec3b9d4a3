"""Plans: memory, operations, time and checkpoints of a training run on devices elsewhere."""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])
