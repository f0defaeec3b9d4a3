"""Dense attention a block of queries at a time: memory linear in the length, on any device, for any bias and mask."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from alibi.attention.call import AttentionCall, dense

ROWS = 128  # queries in a block


def attention_by_rows(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """The call by `reference_attention`, `ROWS` queries at a time; the backward pass computes their weights again."""
    length = call.query.shape[-3]
    blocks = -(-length // ROWS)
    parts = {
        "query": _split(call.query, -3, blocks),
        "query_positions": _split(jnp.asarray(call.query_positions), -1, blocks),
        "query_segments": None if call.query_segments is None else _split(call.query_segments, -1, blocks),
        "mask": _split(call.mask, -2, blocks) if call.mask is not None and call.mask.shape[-2] > 1 else None,
        "dropout_rng": jax.random.split(call.dropout_rng, blocks) if call.dropout_rng is not None else None,
    }
    parts = {name: part for name, part in parts.items() if part is not None}
    attended = jax.lax.map(jax.checkpoint(lambda part: dense(dataclasses.replace(call, **part))), parts)
    attended = jnp.moveaxis(attended, 0, -4)
    return attended.reshape(*attended.shape[:-4], -1, *attended.shape[-2:])[..., :length, :, :]


def _split(x: Array, axis: int, blocks: int) -> Array:
    """The blocks of `axis` as a new first axis; the last one is filled up with its last row."""
    axis %= x.ndim
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, blocks * ROWS - x.shape[axis])
    x = jnp.pad(x, padding, mode="edge")
    return jnp.moveaxis(x.reshape(*x.shape[:axis], blocks, ROWS, *x.shape[axis + 1 :]), axis, 0)
