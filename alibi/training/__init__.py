"""Training: a jitted step over a device mesh, its optimizer, metrics and the loop."""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])
