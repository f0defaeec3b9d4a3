"""Attention with a position bias: the entry `attend`, its closures for Flax, and the backends."""

from alibi.attention.call import AttentionOptions
from alibi.attention.dispatch import attend
from alibi.attention.flax import alibi_attention_fn
from alibi.attention.methods import method_attention_fn
from alibi.attention.named import attention_fn, position_params
from alibi.attention.reference import reference_attention

__all__ = [
    "AttentionOptions",
    "alibi_attention_fn",
    "attend",
    "attention_fn",
    "method_attention_fn",
    "position_params",
    "reference_attention",
]
