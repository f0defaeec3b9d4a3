"""Attention with a position bias: the entry `attend`, its closures for Flax, and the backends."""

from alibi.attention.attend import attend
from alibi.attention.call import AttentionOptions
from alibi.attention.flax import alibi_attention_fn, method_attention_fn
from alibi.attention.reference import reference_attention

__all__ = [
    "AttentionOptions",
    "alibi_attention_fn",
    "attend",
    "method_attention_fn",
    "reference_attention",
]
