"""The checks of a call's arguments."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.positions.bias import Bias, Part, misfits
from alibi.positions.distance import check_integers
from alibi.positions.shapes import LAYOUT


def validate(call: AttentionCall) -> None:
    """Raises ValueError with the argument's name if arguments exceed their range or don't fit."""
    query, key, value = call.query, call.key, call.value
    shapes = check_ranks(query, key, value)
    dtypes = [x.dtype for x in (query, key, value)]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise ValueError(
            f"query, key and value have dtypes {', '.join(map(str, dtypes))}; they must be floats: "
            "use x.astype(jnp.float32)"
        )
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"batch dimensions of query, key and value, and lengths of key and value, must agree; {shapes}"
        )
    if query.shape[-1] != key.shape[-1] or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"query and key need one head_dim, and key heads that divide the query heads; {shapes}; "
            f"{LAYOUT}"
        )
    if call.dropout_rng is not None and not 0 <= call.dropout_rate < 1:
        raise ValueError(
            f"dropout_rate={call.dropout_rate!r} must be at least 0 and below 1, such as 0.1"
        )
    _check_options(call.options)
    _check_bias(call)
    _check_sides(call)
    if call.mask is not None and not broadcasts(call.mask.shape, call.weights_shape):
        usual = {2: "[batch, k] give mask[:, None, None]", 3: "[batch, q, k] give mask[:, None]"}
        fits = query.ndim == 4 and call.mask.ndim in usual
        hint = f"; for {usual[call.mask.ndim]}" if fits else ""
        raise ValueError(
            f"mask has shape {call.mask.shape}; it must broadcast to [*batch, heads, q, k] = {call.weights_shape}{hint}"
        )
    heads = query.shape[-2:-1]
    if call.sink is not None and call.sink.shape != heads:
        raise ValueError(f"sink has shape {call.sink.shape}; it must be {heads}; {LAYOUT}")


def check_ranks(query: Any, key: Any, value: Any) -> str:
    """Returns the shapes in words.

    Raises:
      ValueError: arrays of several ranks, or of fewer than 3 dimensions.
    """
    shapes = f"got query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"query, key and value must be [*batch, length, heads, head_dim], all of one rank; {shapes}"
        )
    return shapes


def _check_options(options: AttentionOptions) -> None:
    window, epsilon, sharding = options.window, options.skip_epsilon, options.sharding
    if options.logit_cap is not None and not 0 < options.logit_cap < math.inf:
        raise ValueError(
            f"logit_cap={options.logit_cap!r} must be above 0 and finite, such as 50, or None for no cap"
        )
    is_whole = isinstance(window, int | np.integer) and not isinstance(window, bool)
    if window is not None and not (is_whole and 1 <= window < 2**31):
        raise ValueError(
            f"window={window!r} must be a whole number of positions, known when the call is traced, of at least 1 "
            "(a query sees its own), or None for no window"
        )
    is_number = isinstance(epsilon, numbers.Real) and not isinstance(epsilon, bool)
    if epsilon is not None and not (is_number and 0 <= epsilon < 1):
        raise ValueError(
            f"skip_epsilon={epsilon!r} must be a number from 0 to below 1, or None to skip nothing"
        )
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
    if call.bias is None or 0 in call.weights_shape:
        return
    if not isinstance(call.bias, Bias):
        got = type(call.bias).__name__
        got = f"an array of shape {call.bias.shape}" if hasattr(call.bias, "shape") else got
        raise ValueError(
            f"bias is {got}; it must be an alibi.positions.Bias, such as alibi.make_position(...).bias(params), or "
            "give slopes=alibi.alibi_slopes(num_heads) for ALiBi"
        )
    *batch, heads, q_length, k_length = call.weights_shape
    # Without this check a tile for a head that the bias lacks would silently get the last head.
    position, first = jax.ShapeDtypeStruct((1,), jnp.int32), Part(queries=(0, 1), keys=(0, 1))

    def tile(leaves: list[Any], *sides: Any) -> Any:
        bias: Bias = jax.tree.unflatten(tree, leaves)
        bias = bias.folded(len(batch))  # its axes count one batch dimension
        sizes = {"batch": math.prod(batch), "queries": q_length, "keys": k_length}
        for owner, field, shape, needed in misfits(bias, sizes):
            # a tile beyond it would silently read the numbers of other tokens
            raise ValueError(
                f"{type(owner).__qualname__}.{field.name} is an array of shape {list(shape or ())}, and the call has "
                f"{' and '.join(needed)}; both must be the same"
            )
        of_tile, one = bias.cut(first), jnp.zeros((math.prod(batch), heads, 1, 1), jnp.float32)
        return of_tile.of_rows(one, one == 0, *sides) if bias.reads_rows else of_tile(*sides)

    leaves, tree = jax.tree.flatten(call.bias)
    # without shardings on a mesh with Explicit axes, which a tile's other arrays lack
    bare = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
    block = jax.eval_shape(tile, bare, position, position)
    if block.shape[-3] != call.query.shape[-2]:
        raise ValueError(
            f"the bias has {block.shape[-3]} heads and the query {call.query.shape[-2]}; they must be the same; "
            f"{LAYOUT}"
        )
    named = f"{type(call.bias).__qualname__} of {type(call.bias).__module__}"
    of_rows = {
        name: getattr(call.bias, name) for name in ("carried", "gives_weights", "mixes_heads")
    }
    declared = ", ".join(f"{name}={value}" for name, value in of_rows.items() if value)
    if declared and not call.bias.reads_rows:
        raise ValueError(
            f"{named} declares {declared}, which only whole rows have; set reads_rows = True"
        )
    if call.bias.carried and call.bias.adds_values:
        raise ValueError(
            f"{named} declares carried={call.bias.carried}, and adds values, which tiles don't; leave carried at 0"
        )
    keys = call.key_positions
    if call.bias.reads_rows and isinstance(keys, np.ndarray) and np.any(np.diff(keys) < 0):
        raise ValueError(
            f"{named} reads whole rows, in the order of their positions, and key_positions fall; sort keys, values "
            "and key_positions by position"
        )
    if call.bias.gives_weights and call.sink is not None:
        raise ValueError(
            f"{named} gives weights, after which no softmax comes, and a sink is a key of the softmax; use "
            "model.normalizer=softmax, or give no sink"
        )
    epsilon, slopes = call.options.skip_epsilon, call.known_slopes
    # With epsilon 0 such a slope is allowed: its head skips nothing, and training may lead a slope
    # through zero.
    if epsilon and slopes is not None and np.any(slopes < 0):
        raise ValueError(
            f"slopes={slopes.tolist()} have a value below zero, which favours far keys; skip_epsilon={epsilon} needs "
            "slopes of at least 0: use skip_epsilon=0, which skips nothing for such a head"
        )


def _check_sides(call: AttentionCall) -> None:
    if (call.query_segments is None) != (call.key_segments is None):
        raise ValueError(
            "segment_ids were given for one side alone; give (queries', keys'), or one array for both"
        )
    for name, x, positions, segments in (
        ("key", call.key, call.key_positions, call.key_segments),
        ("query", call.query, call.query_positions, call.query_segments),
    ):
        check_integers(f"{name}_positions", positions)
        if segments is not None and jnp.result_type(segments) != jnp.bool_:
            check_integers("segment_ids", segments)
        for argument, side in ((f"{name}_positions", positions), ("segment_ids", segments)):
            length = x.shape[-3]
            if side is not None and not (
                side.shape[-1:] == (length,) and broadcasts(side.shape, x.shape[:-2])
            ):
                raise ValueError(
                    f"{argument} have shape {side.shape}; {name} needs {[length]} or {[*x.shape[:-3], length]}; "
                    f"{LAYOUT}"
                )


def broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Returns whether `shape` broadcasts to the shape `whole`."""
    sizes = zip(shape[::-1], whole[::-1], strict=False)
    return len(shape) <= len(whole) and all(size in (1, full) for size, full in sizes)
