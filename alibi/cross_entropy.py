"""The negative log-likelihood of tokens under a softmax over the vocabulary, in bounded memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Head = Callable[[Float[Array, "batch length width"]], Float[Array, "batch length vocabulary"]]


def chunked_token_nll(
    head: Head,
    features: Float[Array, "batch length width"],
    targets: Int[Array, "batch length"],
    chunk_tokens: int,
) -> Float[Array, "batch length"]:
    """-log p of each target in nats, float32; 0 where a target is negative (there is none).

    The logits of about `chunk_tokens` tokens exist at one time; those of further chunks
    are computed after them, and again in the backward pass. A chunk is a range of
    positions of all sequences, so that a sharded batch stays as it is.

    Args:
      head: features to logits.
    """
    batch, length = targets.shape
    # A batch larger than a chunk is folded, neighbouring rows into one: rows stay on their devices.
    folds = next(n for n in range(1, batch + 1) if batch % n == 0 and batch // n <= max(chunk_tokens, 1))
    if folds > 1:
        features, folded = (x.reshape(batch // folds, folds * length, *x.shape[2:]) for x in (features, targets))
        return chunked_token_nll(head, features, folded, chunk_tokens).reshape(batch, length)
    chunk = max(1, chunk_tokens // batch)
    if chunk >= length:
        return token_nll(head(features), targets)
    chunks = -(-length // chunk)
    padding = ((0, 0), (0, chunks * chunk - length))
    features = jnp.pad(features, (*padding, (0, 0))).reshape(batch, chunks, chunk, -1)
    padded = jnp.pad(targets, padding, constant_values=-1).reshape(batch, chunks, chunk)
    nll = jax.lax.map(
        jax.checkpoint(lambda part: token_nll(head(part[0]), part[1])),
        (jnp.moveaxis(features, 1, 0), jnp.moveaxis(padded, 1, 0)),
    )
    return jnp.moveaxis(nll, 0, 1).reshape(batch, -1)[:, :length]


def token_nll(
    logits: Float[Array, "batch length vocabulary"], targets: Int[Array, "batch length"]
) -> Float[Array, "batch length"]:
    """-log softmax(logits)[target] in nats, float32; 0 where a target is negative."""
    logits = logits.astype(jnp.float32)
    # A comparison instead of a gather: its gradient is one fused pass and no scatter.
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    of_target = jnp.where(is_target, logits, 0.0).sum(axis=-1)
    nll = jax.nn.logsumexp(logits, axis=-1) - of_target
    return jnp.where(targets < 0, 0.0, nll)
