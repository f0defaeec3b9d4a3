"""From text to batches: corpora -> tokenizers -> tokens (files with a manifest) -> batches. No JAX
in here.
"""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])
