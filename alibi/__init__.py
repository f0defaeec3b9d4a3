"""Train short, test long: attention with linear biases, and what it is compared with, in JAX and Flax."""

from alibi.attention import alibi_attention_fn, attend
from alibi.positions import METHODS, alibi_bias, make_position
from alibi.slopes import alibi_slopes

__all__ = ["METHODS", "alibi_attention_fn", "alibi_bias", "alibi_slopes", "attend", "make_position"]
