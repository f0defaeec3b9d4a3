"""From text to batches: corpora -> tokenizers -> tokens (files with a manifest) -> batches; no JAX
in here.
"""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])
