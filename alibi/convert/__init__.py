"""Readers of checkpoints of other code, which become work directories."""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])
