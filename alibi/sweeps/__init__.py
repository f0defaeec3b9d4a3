"""Sweeps: the runs of an experiment, trained, evaluated and reported together, and continued after
a stop.
"""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])
