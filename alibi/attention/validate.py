"""The checks of a call of attention, all in one place."""

import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.positions.bias import KnownPositions, Part
from alibi.positions.distance import check_integers


def validate(call: AttentionCall) -> None:
    """Raises ValueError, which names the argument, if arguments of a call are out of range or don't fit together."""
    query, key, value = call.query, call.key, call.value
    shapes = f"got query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(f"query, key and value must be [*batch, length, heads, head_dim], all of one rank; {shapes}")
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"batch dimensions of query, key and value, and lengths of key and value, must agree; {shapes}"
        )
    if query.shape[-1] != key.shape[-1] or query.shape[-2] % key.shape[-2]:
        raise ValueError(f"query and key need one head_dim, and key heads that divide the query heads; {shapes}")
    _check_options(call.options)
    _check_bias(call)
    _check_sides(call)
    if call.mask is not None:
        sizes = zip(call.mask.shape[::-1], call.weights_shape[::-1], strict=False)
        if call.mask.ndim > len(call.weights_shape) or any(size not in (1, full) for size, full in sizes):
            raise ValueError(
                f"mask has shape {call.mask.shape}; it must broadcast to [*batch, heads, q, k] = {call.weights_shape}"
            )
    needed = (*key.shape[:-3], key.shape[-2])
    if call.key_norm is not None and call.key_norm.shape != needed:
        raise ValueError(f"key_norm has shape {call.key_norm.shape}; it must be {needed}")


def _check_options(options: AttentionOptions) -> None:
    window, epsilon, sharding = options.window, options.skip_epsilon, options.sharding
    is_whole = isinstance(window, int | np.integer) and not isinstance(window, bool)
    if window is not None and not (is_whole and 1 <= window < 2**31):
        raise ValueError(
            f"window={window!r} must be a whole number of positions, known when the call is traced, of at least 1 "
            "(a query sees its own), or None for no window"
        )
    is_number = isinstance(epsilon, numbers.Real) and not isinstance(epsilon, bool)
    if epsilon is not None and not (is_number and 0 <= epsilon < 1):
        raise ValueError(f"skip_epsilon={epsilon!r} must be a number from 0 to below 1, or None to skip nothing")
    if sharding is None:
        return
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"sharding is {sharding}; it must be a jax.sharding.NamedSharding(mesh, P(...)), or None on one device"
        )
    batch, length, heads, features = (*sharding.spec, None, None, None, None)[:4]
    if len(sharding.spec) > 4 or length is not None or features is not None:
        raise ValueError(
            f"sharding has spec {sharding.spec}; of [batch, length, heads, head_dim] it may split batch and heads "
            f"alone: P({batch!r}, None, {heads!r})"
        )


def _check_bias(call: AttentionCall) -> None:
    if call.bias is None:
        return
    # Without this check a tile at a head that the bias lacks would silently get the last head.
    position, first = jax.ShapeDtypeStruct((1,), jnp.int32), Part(queries=(0, 1), keys=(0, 1))
    block = jax.eval_shape(lambda bias, *sides: bias.cut(first)(*sides), call.bias, position, position)
    if block.shape[-3] != call.query.shape[-2]:
        raise ValueError(
            f"the bias has {block.shape[-3]} heads and the query {call.query.shape[-2]}; they must be the same"
        )
    epsilon, slopes = call.options.skip_epsilon, call.known_slopes
    # With epsilon 0 such a slope is allowed: its head skips nothing, and training may lead a slope through zero.
    if epsilon and slopes is not None and np.any(slopes < 0):
        raise ValueError(
            f"slopes={slopes.tolist()} have a value below zero, which favours far keys; skip_epsilon={epsilon} needs "
            "slopes of at least 0: use skip_epsilon=0, which skips nothing for such a head"
        )


def _check_sides(call: AttentionCall) -> None:
    if (call.query_segments is None) != (call.key_segments is None):
        raise ValueError("segment_ids were given for one side alone; give (queries', keys'), or one array for both")
    for name, x, positions, segments in (
        ("query", call.query, call.query_positions, call.query_segments),
        ("key", call.key, call.key_positions, call.key_segments),
    ):
        check_integers(name, positions)
        for argument, side in ((f"{name}_positions", positions), ("segment_ids", segments)):
            if side is not None and not _fits(side, x):
                length = x.shape[-3]
                raise ValueError(
                    f"{argument} have shape {side.shape}; {name} needs {[length]} or {[*x.shape[:-3], length]}"
                )


def _fits(side: KnownPositions, x: Array) -> bool:
    """Whether positions or segments of the tokens `x` are `[length]` or broadcast to `[*batch, length]`."""
    batch, needed = side.shape[:-1][::-1], x.shape[:-3][::-1]
    broadcasts = all(size in (1, full) for size, full in zip(batch, needed, strict=False))
    return side.ndim > 0 and side.shape[-1] == x.shape[-3] and len(batch) <= len(needed) and broadcasts
