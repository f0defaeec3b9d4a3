"""Dense attention for one query in each sequence, without copying the cache."""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from alibi.attention.call import AttentionCall
from alibi.attention.reference import dense


def cannot_single(call: AttentionCall) -> str:
    """Returns why `single_attention` can't do the call, or an empty string."""
    queries = call.query.shape[-3]
    return "" if queries == 1 else f"it is for one query of each sequence, and got {queries}"


def single_attention(call: AttentionCall) -> Float[Array, "*batch one heads value_dim"]:
    """Computes the dense formula with products that copy no float32 keys or values.

    With slots last, as in `KeyValues`, each head's product reads the cache in its own layout. With
    slots first, as in Flax's cache, XLA's CPU backend would copy all keys and values into another
    order at each token. So there products read matrices `[k, heads * features]`. They do `heads`
    times the arithmetic, which costs less than the copies. A key or value that is not finite reaches
    the results of all heads.
    """
    if not call.slots_last:
        call = call.with_own_heads()
    einsum = functools.partial(
        jnp.einsum, precision=call.precision, preferred_element_type=jnp.float32
    )
    logits_einsum, values_einsum = (_by_head if call.slots_last else _by_features)(einsum)

    def attended(*arrays: Array) -> Array:
        key, value = (jnp.moveaxis(x, -1, -3) if call.slots_last else x for x in arrays)
        return dense(
            dataclasses.replace(
                call,
                key=key,
                value=value,
                weights_einsum=logits_einsum,
                values_einsum=values_einsum,
            )
        )

    def zeros(*arrays: Array) -> Array:
        return jnp.zeros((*call.query.shape[:-1], call.value.shape[-1]), call.value.dtype)

    # A condition that always holds. Without it XLA fuses the products' reshapes with the write of
    # the new token, and copies the cache at each token.
    positions = jnp.asarray(call.query_positions, jnp.int32)
    always = positions.max(initial=0) > np.iinfo(np.int32).min
    arrays = (jnp.moveaxis(x, -3, -1) if call.slots_last else x for x in (call.key, call.value))
    return lax.cond(always, attended, zeros, *arrays)


def _by_head(einsum: Callable[..., Array]) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """Returns `reference_attention`'s two products for query heads that may share keys."""

    # XLA's CPU backend is slow at such products of a single row in half precision.
    def logits(
        _: str, query: Float[Array, "*batch one heads head_dim"], key: Array
    ) -> Float[Array, "*batch heads one k"]:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
        grouped = query.reshape(*key.shape[:-3], key.shape[-2], -1, key.shape[-1])
        products = einsum("...hgd,...hdk->...hgk", grouped, jnp.moveaxis(key, -3, -1))
        return products.reshape(*query.shape[:-3], query.shape[-2], 1, -1)

    def values(
        _: str, weights: Float[Array, "*batch heads one k"], value: Array
    ) -> Float[Array, "*batch one heads value_dim"]:
        weights, value = weights.astype(jnp.float32), value.astype(jnp.float32)
        grouped = weights.reshape(*value.shape[:-3], value.shape[-2], -1, value.shape[-3])
        attended = einsum("...hgk,...hdk->...hgd", grouped, jnp.moveaxis(value, -3, -1))
        return attended.reshape(*value.shape[:-3], 1, -1, value.shape[-1])

    return logits, values


def _by_features(einsum: Callable[..., Array]) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """Returns `reference_attention`'s two products over all heads' features."""

    def logits(
        _: str, query: Float[Array, "*batch one heads head_dim"], key: Array
    ) -> Float[Array, "*batch heads one k"]:
        # A column for each head, with zeros in the features of other heads.
        heads = query.shape[-2]
        identity = jnp.eye(heads, dtype=query.dtype)[:, None, :]
        columns = query[..., 0, :, :, None] * jnp.expand_dims(identity, range(query.ndim - 3))
        columns = columns.reshape(*key.shape[:-3], -1, heads)
        products = einsum("...kf,...fh->...kh", key.reshape(*key.shape[:-2], -1), columns)
        # Else XLA makes the transposed product, which takes five times as long.
        return lax.optimization_barrier(products).swapaxes(-1, -2)[..., None, :]

    def values(
        _: str, weights: Float[Array, "*batch heads one k"], value: Array
    ) -> Float[Array, "*batch one heads value_dim"]:
        joined = value.reshape(*value.shape[:-2], -1)
        crossed = einsum("...kh,...kf->...hf", weights[..., 0, :].swapaxes(-1, -2), joined)
        crossed = crossed.reshape(*crossed.shape[:-1], value.shape[-2], -1)
        return jnp.diagonal(crossed, axis1=-3, axis2=-2).swapaxes(-1, -2)[..., None, :, :]

    return logits, values
