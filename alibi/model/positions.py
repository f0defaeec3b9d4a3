"""Positions and query scales that a model combines with any position method."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from alibi.positions.base import Params, PositionMethod
from alibi.positions.shapes import KnownPositions, Positions, Queries


def randomised_positions(
    positions: KnownPositions, length: int, max_position: int, batch: int, key: PRNGKeyArray | None
) -> Int[Array, "*batch length"]:
    """Returns randomised positions of tokens in sequences of `length` (Ruoss et al. 2023, arXiv
    2305.16843).

    With a key, in training, each sequence gets a sorted sample without replacement of 0, ...,
    max_position - 1. Without a key positions are evenly spread, at the means of such samples. The
    authors' code draws in tests too, which was worse in one run of rotary (2,000 updates: bits per
    byte 2.28 in place of 2.24 at L, 2.56 in place of 2.46 at 4 L).
    """
    if key is None:
        spread = np.arange(1, length + 1, dtype=np.int64) * (max_position + 1) // (length + 1) - 1
        return jnp.asarray(spread.astype(np.int32))[jnp.asarray(positions)]
    lots = jax.random.uniform(key, (batch, max_position))
    drawn = jnp.sort(jax.lax.top_k(lots, length)[1], axis=-1)
    positions = jnp.broadcast_to(jnp.asarray(positions), (batch, np.shape(positions)[-1]))
    return jnp.take_along_axis(drawn, positions, axis=-1)


def init_layer(position: PositionMethod, logit_scale: str, key: PRNGKeyArray) -> Params:
    """Returns the initial parameters of positions in one layer: the method's, and the scale of
    SSMax's logits.
    """
    params = position.init_layer(key)
    if logit_scale != "ssmax":
        return params
    # of ln n over n = 1, ..., L
    mean = math.lgamma(position.train_length + 1) / position.train_length
    return {**params, "ssmax": jnp.full(position.num_heads, 1 / mean)}


def scaled_queries(
    logit_scale: str, train_length: int, params: Params, query: Queries, positions: Positions
) -> Queries:
    """Returns the queries times a function of n, the number of keys that each sees: its position
    plus one.

    Softmax over more keys is flatter; this sharpens it. "log_n": max(1, ln n / ln L), L the
    training length (Chiang and Cholak 2022, arXiv 2202.12172); "ssmax": s ln n, s learned by each
    head of each layer (Nakanishi 2025, arXiv 2501.19399), with an initial mean of 1 over the
    training length.
    """
    count = jnp.maximum(positions + 1, 1)  # padding has positions below 0
    log_n = jnp.expand_dims(jnp.log(count.astype(jnp.float32)), (-1, -2))
    if logit_scale == "log_n":
        scale = jnp.maximum(log_n / math.log(train_length), 1.0)
    else:
        scale = (
            params["ssmax"].astype(jnp.float32).reshape((1,) * (log_n.ndim - 2) + (-1, 1)) * log_n
        )
    scale = scale.reshape((1,) * (query.ndim - scale.ndim) + scale.shape)
    return (query.astype(jnp.float32) * scale).astype(query.dtype)
