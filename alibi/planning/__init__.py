"""Plans for a training run on devices elsewhere: memory, operations, time and checkpoints."""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])
