"""Dense attention in float32: the formula every other backend must equal."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, PRNGKeyArray

from alibi.attention.call import AttentionCall
from alibi.positions.bias import MASKED, Bias, like
from alibi.positions.shapes import PerHead


def reference_attention(
    query: Float[Array, "*batch q heads head_dim"],
    key: Float[Array, "*batch k kv_heads head_dim"],
    value: Float[Array, "*batch k kv_heads value_dim"],
    *,
    bias: Bias | None,
    visible: Bool[Array, "*#batch #heads #q #k"] | None,
    query_positions: Integer[Array, "*#batch q"],
    key_positions: Integer[Array, "*#batch k"],
    keep: Float[Array, "*#batch #heads q k"] | None = None,
    precision: jax.lax.PrecisionLike = None,
    weights_einsum: Callable[..., Array] | None = None,
    values_einsum: Callable[..., Array] | None = None,
    sow: Callable[[Array], None] | None = None,
    sink: PerHead | None = None,
    logit_cap: float | None = None,
) -> Float[Array, "*batch q heads value_dim"]:
    """Returns softmax(query key^T / sqrt(head_dim) + bias) value, with all logits in memory (paper,
    section 3).

    A bias that reads rows changes the logits or gives the weights, and one that adds values changes the
    result too. Logits, bias and softmax are float32 for inputs in
    any dtype. The result has `value`'s dtype. A query without visible keys gives zeros.

    Args:
      visible: True where a query sees a key, or None if each query sees all keys.
      keep: dropout's factors for the weights, each 0 or 1 / (1 - rate).
      weights_einsum, values_einsum: replace `jnp.einsum` in the two products. Flax passes quantized
        ones. Without them each query head needs its own key head.
      sow: a function called with the weights, before dropout.
      sink, logit_cap: as in `alibi.attention.attend`.
    """
    einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    logits = (weights_einsum or einsum)("...qhd,...khd->...hqk", query, key).astype(
        jnp.float32
    ) * query.shape[-1] ** -0.5
    logits = capped(logits, logit_cap)
    if bias is not None and bias.reads_rows:
        seen = True if visible is None else like(visible, logits)
        seen = jnp.broadcast_to(seen, logits.shape)
        logits = bias.of_rows(jnp.where(seen, logits, MASKED), seen, query_positions, key_positions)
    elif bias is not None:
        logits = logits + like(bias(query_positions, key_positions), logits)
    if bias is not None and bias.gives_weights:
        weights = logits if visible is None else jnp.where(like(visible, logits), logits, 0.0)
    else:
        weights = _softmax(logits, visible, sink)
    if sow is not None:
        sow(weights)
    if keep is not None:
        weights = weights * keep
    attended = (values_einsum or einsum)(
        "...hqk,...khd->...qhd", weights.astype(value.dtype), value
    )
    if bias is not None and bias.adds_values:
        attended = attended + bias.of_values(weights, query_positions, key_positions).swapaxes(
            -3, -2
        )
    return attended.astype(value.dtype)


def capped(logits: Float[Array, "*shape"], most: float | None) -> Float[Array, "*shape"]:
    """Returns scaled logits z as c tanh(z / c), where `most` is c, or unchanged for None."""
    return logits if most is None else most * jnp.tanh(logits / most)


def _softmax(
    logits: Float[Array, "*batch heads q k"],
    visible: Bool[Array, "*#batch #heads #q #k"] | None,
    sink: PerHead | None = None,
) -> Float[Array, "*batch heads q k"]:
    """Returns weights for visible keys, or zeros for a query without any."""
    if sink is not None:  # the logit of one more key
        column = sink.astype(jnp.float32)[:, None, None]
        column = jnp.broadcast_to(column, (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, column], axis=-1)
        if visible is not None:
            visible = jnp.broadcast_to(visible, (*visible.shape[:-1], logits.shape[-1] - 1))
            added = [(0, 0)] * (visible.ndim - 1) + [(0, 1)]
            visible = jnp.pad(visible, added, constant_values=True)
        return _softmax(logits, visible)[..., :-1]
    if visible is None:
        return jax.nn.softmax(logits, axis=-1)
    visible = like(visible, logits)
    logits = jnp.where(visible, logits, MASKED)
    largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    exponentials = jnp.where(visible, jnp.exp(logits - largest), 0.0)
    total = exponentials.sum(axis=-1, keepdims=True)
    return exponentials / jnp.where(total == 0.0, 1.0, total)


def dropout_factors(
    rng: PRNGKeyArray, rate: float, shape: tuple[int, ...], broadcast: bool
) -> Float[Array, "*batch heads q k"]:
    """Returns an array with factors 0 or 1 / (1 - rate), with `broadcast` the same for all batch
    entries and heads.
    """
    if broadcast:
        shape = (1,) * (len(shape) - 2) + shape[-2:]
    return jax.random.bernoulli(rng, 1.0 - rate, shape).astype(jnp.float32) / (1.0 - rate)


def dense(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """Computes the call with `reference_attention`."""
    keep = None
    if call.dropout_rng is not None and call.dropout_rate > 0.0:
        keep = dropout_factors(
            call.dropout_rng, call.dropout_rate, call.weights_shape, call.broadcast_dropout
        )
    return reference_attention(
        call.query,
        call.key,
        call.value,
        bias=call.bias,
        visible=call.visible(),
        query_positions=jnp.asarray(call.query_positions),
        key_positions=jnp.asarray(call.key_positions),
        keep=keep,
        precision=call.precision,
        weights_einsum=call.weights_einsum,
        values_einsum=call.values_einsum,
        sow=call.sow,
        sink=call.sink,
        logit_cap=call.options.logit_cap,
    )
