"""Attention with a position bias: one entry, its closures for Flax, and the backends."""

from alibi.attention.attend import attend
from alibi.attention.closure import alibi_attention_fn, attention_fn
from alibi.attention.reference import reference_attention

__all__ = ["alibi_attention_fn", "attend", "attention_fn", "reference_attention"]
