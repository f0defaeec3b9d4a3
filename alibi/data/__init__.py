"""From text to batches: corpora -> tokenizers -> tokens (files with a manifest) -> batches; no JAX
in here.
"""
