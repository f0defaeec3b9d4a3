"""Dense attention of a single query for each sequence, with keys and values read as they lie in a
cache.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from alibi.attention.call import AttentionCall, dense


def cannot_single(call: AttentionCall) -> str:
    """Returns why `single_attention` can't do the call; the empty string if it can."""
    queries = call.query.shape[-3]
    return "" if queries == 1 else f"it is for one query of each sequence, and got {queries}"


def single_attention(call: AttentionCall) -> Float[Array, "*batch one heads value_dim"]:
    """Computes the dense formula by two matrix products over the features of all heads.

    XLA's CPU backend multiplies head by head, for which it copies all keys and values into another
    order at each token. Here each product takes them as matrices `[k, heads * head_dim]`. It does
    `heads` times the arithmetic, which costs less than the copies: memory is the limit. A key or
    value that is not finite reaches the results of all heads.
    """
    einsum = functools.partial(
        jnp.einsum, precision=call.precision, preferred_element_type=jnp.float32
    )
    heads = call.query.shape[-2]

    def logits(
        _: str, query: Float[Array, "*batch one heads head_dim"], key: Array
    ) -> Float[Array, "*batch heads one k"]:
        # A column for each head, which is zero but for the features of this head.
        own = jnp.eye(heads, dtype=query.dtype)[:, None, :]
        columns = query[..., 0, :, :, None] * jnp.expand_dims(own, range(query.ndim - 3))
        columns = columns.reshape(*key.shape[:-3], -1, heads)
        found = einsum("...kf,...fh->...kh", key.reshape(*key.shape[:-2], -1), columns)
        # Else XLA makes the transposed product, which takes five times as long.
        return lax.optimization_barrier(found).swapaxes(-1, -2)[..., None, :]

    def values(
        _: str, weights: Float[Array, "*batch heads one k"], value: Array
    ) -> Float[Array, "*batch one heads value_dim"]:
        joined = value.reshape(*value.shape[:-2], -1)
        found = einsum("...kh,...kf->...hf", weights[..., 0, :].swapaxes(-1, -2), joined)
        found = found.reshape(*found.shape[:-1], heads, -1)
        return jnp.diagonal(found, axis1=-3, axis2=-2).swapaxes(-1, -2)[..., None, :, :]

    def attended(key: Array, value: Array) -> Array:
        own = dataclasses.replace(
            call, key=key, value=value, weights_einsum=logits, values_einsum=values
        )
        return dense(own)

    def zeros(key: Array, value: Array) -> Array:
        return jnp.zeros((*call.query.shape[:-1], value.shape[-1]), value.dtype)

    # A condition that always holds. Without it XLA fuses the reshapes above with the write of the
    # new token into the cache, and copies the cache at each token.
    positions = jnp.asarray(call.query_positions, jnp.int32)
    always = positions.max(initial=0) > np.iinfo(np.int32).min
    return lax.cond(always, attended, zeros, call.key, call.value)
