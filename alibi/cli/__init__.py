"""The command line of the entry points: flags in, exit codes and errors of a line out."""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])
