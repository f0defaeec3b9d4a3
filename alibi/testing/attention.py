"""Checks on a layer's attention: it is finite and causal, and each backend agrees with the dense
formula in float32.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from alibi.attention import AttentionOptions
from alibi.positions import Bias, Part, PositionMethod
from alibi.positions.bias import MASKED, Blocks
from alibi.positions.contract import class_line
from alibi.testing.samples import (
    BLOCK,
    HEADS,
    LENGTH,
    SHORT,
    attend,
    bias_of,
    compare,
    declared,
    fail,
    inputs_of,
    jit,
    params_of,
)


def both_directions(method: PositionMethod) -> list[PositionMethod]:
    """Returns the method and, if it has a bias, its form with the other value of `causal`, unless the
    method refuses it.
    """
    directions = [method]
    if type(declared(method)) is not Bias:
        with contextlib.suppress(ValueError):
            directions.append(dataclasses.replace(method, causal=not method.causal))
    return directions


def check_finite(method: PositionMethod, moved: float = 0.1) -> None:
    """Checks that each query's bias is finite, or -inf for some of the keys that it sees.

    Args:
      moved: how far `params_of` moves the parameters.
    """
    if declared(method).reads_rows:
        return _check_rows(method, moved)
    every = np.arange(SHORT if method.reads_kept_of_keys else method.train_length)
    # without content in the bias, the first and the last query have all distances
    queries = every if method.reads_kept_of_keys else every[[0, -1]]

    @jit
    def tile() -> Any:
        bias = bias_of(method, params_of(method, moved), inputs_of(method, SHORT))
        return 0.0 if bias is None else bias(jnp.asarray(queries), jnp.asarray(every))

    seen = np.where((queries[:, None] < every) & method.causal, -np.inf, tile())
    wrong = np.argwhere(~np.isfinite(seen.max(axis=-1)))  # of nan, inf, or nothing but -inf
    if wrong.size:
        row, query = seen[tuple(wrong[0])], queries[wrong[0][-1]]
        key = min(
            np.flatnonzero(np.isnan(row) | (row == row.max())), key=lambda key: abs(query - key)
        )
        fail(
            method,
            f"its bias is {row[key]} in head {wrong[0][-2]} at distance {query - key} (query {query}, key {key}); it "
            "must be finite, or -inf for some of the keys that a query sees",
        )


def _check_rows(method: PositionMethod, moved: float) -> None:
    """Checks that what a bias makes from whole rows is finite where a key is seen, weights sum to at
    most 1, and a part of the rows is the whole's.
    """
    length, middle = SHORT, 5
    positions = jnp.arange(length)
    inputs = inputs_of(method, length)
    seen = np.tri(length, dtype=bool) | (not method.causal)

    @jit
    def rows() -> Any:
        bias = bias_of(method.at_length(length), params_of(method, moved), inputs)
        assert bias is not None
        logits = jnp.einsum("bqhd,bkhd->bhqk", inputs["query"], inputs["key"])
        visible = jnp.broadcast_to(seen, logits.shape)
        logits = jnp.where(visible, logits, MASKED)
        whole = bias.of_rows(logits, visible, positions, positions)
        heads = None if bias.mixes_heads else (1, 1)
        piece = bias.cut(Part((1, 1), heads, (middle, length - middle)))
        entries = np.s_[1:2, slice(None) if heads is None else slice(1, 2), middle:]
        cut = piece.of_rows(logits[entries], visible[entries], positions[middle:], positions)
        return whole, cut, whole[entries]

    whole, cut, right = jax.device_get(rows())
    kind = type(declared(method))
    name = f"{kind.__name__} ({class_line(kind)})"
    shown = np.where(seen, whole, 0.0)
    if not np.isfinite(shown).all():
        fail(method, f"{name} makes rows that are not finite from finite logits")
    most, least = shown.sum(axis=-1).max(), shown.min()
    if declared(method).gives_weights and (most > 1 + 1e-3 or least < 0):
        fail(
            method,
            f"{name} gives weights from {least:.3g} on, which sum to {most:.3g} for a query; they must be at least 0 "
            "and sum to at most 1",
        )
    got, needed = (np.where(seen[middle:], side, 0.0) for side in (cut, right))
    if got.shape != needed.shape or not np.allclose(got, needed, atol=1e-4):
        fail(
            method,
            f"rows of {name} for one head and the last queries are not those of the whole; declare its fields by "
            "per_head, per_query and per_key, as they lie",
        )


def check_few_tokens(method: PositionMethod) -> None:
    """Checks that attention over a few tokens is finite, with its gradient at the initial parameters,
    and that no token depends on the last one.
    """
    length = min(SHORT, method.train_length, method.max_length or SHORT)

    def attended(params: Any, count: int, last: float = 1.0) -> Array:
        inputs = {
            name: x.at[:, -1].multiply(last)[:, :count]
            for name, x in inputs_of(method, length).items()
        }
        inputs["x"] = method.embed(params, inputs["x"], np.arange(count))
        inputs["value"] += inputs["x"].sum(axis=-1)[..., None, None]
        return attend(method, AttentionOptions(backend="reference"), params, inputs, count, 0)

    @jit
    def look() -> Any:
        shorter = attended(params_of(method), max(length - 1, 1))
        # a large token, since a small one may be lost in a mean
        longer = attended(params_of(method), length, 100.0)[:, : shorter.shape[1]]
        total = jax.value_and_grad(lambda params: attended(params, length).sum())
        return total(params_of(method, 0.0)), jnp.abs(longer - shorter) > 1e-4

    (total, gradient), changed = jax.device_get(look())
    results = jax.tree.leaves_with_path({"attention": total, "gradient": gradient})
    if wrong := [path for path, x in results if not np.isfinite(x).all()]:
        fail(
            method,
            f"the {jax.tree_util.keystr(wrong[0], simple=True, separator=' by ')} of its first {length} tokens is not "
            "finite",
        )
    if method.causal and length > 1 and changed.any():
        fail(
            method,
            f"it is not causal: in a sequence of {length} tokens, token {np.nonzero(changed)[1].min()} depends on "
            f"token {length - 1}; objective=masked trains with both sides",
        )


def check_blocks(method: PositionMethod) -> None:
    """Checks that a part cut from a bias equals this part in the whole bias."""
    if declared(method).reads_rows or type(declared(method)) is Bias:
        return  # rows are checked by `check_finite`

    @jit
    def blocks() -> Any:
        bias: Any = bias_of(method.at_length(9), params_of(method), inputs_of(method, 9))
        positions = jnp.arange(9) + 3
        part = Part((1, 1), (2, 2), (4, 3), (1, 6))
        whole = bias(positions, positions)
        cut = bias.cut(part)(positions[4:7], positions[1:7])
        table = bias.tabulated(np.arange(9) + 3, np.arange(9) + 3)
        tabulated = table.cut(part)(positions[4:7], positions[1:7])
        return whole, cut, tabulated, bias.key_term

    whole, cut, tabulated, key_term = jax.device_get(blocks())
    whole = whole if whole.ndim == 4 else np.broadcast_to(whole, (2, *whole.shape))
    expected = whole[1:2, 2:4, 4:7, 1:7]
    visible = (np.arange(4, 7)[:, None] >= np.arange(1, 7)) | (not method.causal)
    for name, got in (("cut", cut), ("tabulated", tabulated)):
        got = got if got.ndim == 4 else got[None]
        if got.shape != expected.shape or not np.allclose(
            np.where(visible, got, 0), np.where(visible, expected, 0), atol=1e-5
        ):
            fail(
                method,
                f"its bias, {name} to heads 2 and 3, queries 4 to 6 and keys 1 to 6, is not that part of the whole; "
                "declare its fields by per_head, per_query and per_key, as they lie",
            )
    if key_term is not None:
        seen = np.tri(9, dtype=bool) | (not method.causal)
        of_query = np.where(seen, whole - np.moveaxis(key_term, 1, 2)[:, :, None], np.nan)
        if not np.nanmax(np.abs(of_query - of_query[..., :1])) < 1e-4:
            fail(method, "its bias less its key_term is not the same for all keys of a query")


def check_tiles(method: PositionMethod) -> None:
    """Checks that `blocked`, on 4 devices if there are so many, agrees with the dense formula."""
    params, inputs = params_of(method), inputs_of(method, LENGTH)

    @functools.partial(jit, static_argnums=2)
    def value_and_gradients(
        params: Any, inputs: dict[str, Array], options: AttentionOptions
    ) -> Any:
        def loss(params: Any, inputs: dict[str, Array]) -> tuple[Array, Array]:
            attended = attend(method.at_length(LENGTH), options, params, inputs)
            return jnp.sin(3.0 * attended).sum(), attended  # sin: each entry gets another gradient

        gradients, attended = jax.grad(loss, (0, 1), has_aux=True)(params, inputs)
        return {"value": attended, "parameters": gradients[0], "inputs": gradients[1]}

    expected = value_and_gradients(params, inputs, AttentionOptions(backend="reference"))
    way, blocked = "blocked", AttentionOptions(backend="blocked", block=BLOCK)
    if jax.device_count() >= 4:
        devices = np.asarray(jax.devices()[:4]).reshape(2, 2)
        mesh = jax.sharding.Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
        sharding = NamedSharding(mesh, P("data", None, "tensor"))
        way, blocked = "blocked on 4 devices", dataclasses.replace(blocked, sharding=sharding)
    ways = [(way, blocked), ("auto", AttentionOptions())]
    for name, options in ways[:1] if declared(method).reads_rows else ways:
        compare(
            method,
            f"attention by {name}",
            value_and_gradients(params, inputs, options),
            expected,
            2e-4,
        )


def check_half_precision(method: PositionMethod) -> None:
    """Checks that in bfloat16 only the rounded queries, keys and values change the result."""
    params, inputs = params_of(method), inputs_of(method, LENGTH)

    @jit
    def both() -> Any:
        half = {name: x.astype(jnp.bfloat16) for name, x in inputs.items()}
        rounded = {name: x.astype(jnp.float32) for name, x in half.items()}
        sized, options = method.at_length(LENGTH), AttentionOptions(backend="reference")
        return [attend(sized, options, params, each) for each in (half, rounded)]

    half, whole = (np.asarray(x, np.float64) for x in both())
    if not np.abs(half - whole).max() < 0.05:
        fail(
            method,
            f"in bfloat16 its result is off by {np.abs(half - whole).max():.2g}; compute in float32 inside",
        )


def check_level(method: PositionMethod) -> None:
    """Checks that a distance bias is one number of each head from `level_from` on."""
    level, length = declared(method).level_from, 512
    if level is None:
        return
    bias: Any = bias_of(method.at_length(length), params_of(method, 2.0), inputs_of(method, length))
    positions = np.arange(length)
    whole = np.asarray(bias(jnp.asarray(positions), jnp.asarray(positions)))
    far = whole[..., positions[:, None] - positions >= level]
    if far.size and not (far == far[..., :1]).all():
        fail(method, f"its bias changes beyond level_from={level}; give it None, which is exact")


def check_bounds(method: PositionMethod) -> None:
    """Checks that no bias exceeds the bounds that let attention leave out far keys."""
    if not declared(method).bounded:
        return
    length, block = 512, 32
    inputs = inputs_of(method, length)

    @jit
    def bounds(params: Any) -> Any:
        bias: Any = bias_of(method.at_length(length), params, inputs)
        positions = np.arange(length)
        first = positions.reshape(-1, block)[:, 0]
        behind = first[:, None] - first[None, :] - (block - 1)
        count = np.full((1, 1, 1, first.size), block)
        before, after = jnp.asarray(behind)[None], jnp.asarray(behind.T)[None]
        blocks = Blocks(before, after, first.size, first.size, count, first_query=first[None])
        whole = bias(jnp.asarray(positions), jnp.asarray(positions))
        return whole, bias.upper_bound(blocks), bias.log_sum_bound(blocks)

    # far from the initial values too, where a learned bias may rise
    for seed, size in enumerate((0.1, 2.0, 2.0)):
        computed = bounds(params_of(method, size, seed))
        _check_bound(method, block, *jax.device_get(computed))


def _check_bound(method: PositionMethod, block: int, whole: Any, bound: Any, log_sum: Any) -> None:
    """Checks a whole bias against its bounds for pairs of blocks."""
    length = whole.shape[-1]
    hidden = (
        np.arange(length)[:, None] < np.arange(length)
        if method.causal
        else np.zeros((length, length), bool)
    )
    tiles = np.where(hidden, -np.inf, whole).reshape(
        -1, HEADS, length // block, block, length // block, block
    )
    checks = {"upper_bound": (tiles.max(axis=(3, 5)), bound)}
    with np.errstate(divide="ignore"):
        checks["log_sum_bound"] = (np.log(np.exp(tiles).sum(axis=5)).max(axis=3), log_sum)
    for name, (largest, claimed) in checks.items():
        wrong = np.argwhere(largest > claimed + 1e-4 * (1.0 + np.abs(claimed)))
        if wrong.size:
            _, head, q_block, k_block = min(
                map(tuple, wrong), key=lambda index: index[2] - index[3]
            )
            fail(
                method,
                f"its bias exceeds {name} in head {head} between queries {q_block * block} to "
                f"{(q_block + 1) * block - 1} and keys {k_block * block} to {(k_block + 1) * block - 1}: up to "
                f"{largest[..., head, q_block, k_block].max():.4g} beyond its bound "
                f"{np.broadcast_to(claimed, largest.shape)[..., head, q_block, k_block].max():.4g}",
            )
