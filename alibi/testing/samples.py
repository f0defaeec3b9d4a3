"""What the checks of position methods work on: sizes, parameters, inputs, and one layer's attention."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from alibi.attention import AttentionOptions, method_attention_fn
from alibi.positions import Bias, PositionMethod

HEADS, HEAD_DIM, TRAIN_LENGTH = 4, 8, 16
WIDTH = HEADS * HEAD_DIM
TOKENS = 19  # of the sequences that go through a model, at most: more than those of training
LENGTH, BLOCK = 40, 16  # of those that go through attention, and of its tiles: three, the last one filled up

# With these, XLA for CPUs compiles the programs of the checks, which are small and run once, in half the time.
QUICK: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
}


class PositionMethodError(AssertionError):
    """A position method lacks what it must hold, or what it declares."""


def fail(method: PositionMethod, what: str) -> None:
    raise PositionMethodError(f"position method {type(method).__name__}: {what}")


@functools.cache
def _compiler_options() -> dict[str, bool | int] | None:
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=QUICK)()
    except jax.errors.JaxRuntimeError:  # another version of XLA, which lacks one of them
        return None
    return QUICK


def jit(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """`jax.jit` of a program that runs so little that compiling takes all the time."""
    return jax.jit(function, compiler_options=_compiler_options(), **how)


def params_of(method: PositionMethod) -> dict[str, Any]:
    """Parameters off their start, where some are zero and would hide mistakes."""
    shared, of_layer = jax.random.split(jax.random.key(0))
    params = {**method.init(shared), **method.init_layer(of_layer)}
    return jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)


def inputs_of(length: int, scale: float = 1.0) -> dict[str, Float[Array, "..."]]:
    """What an attention layer works on: its input and its queries, keys and values, for two sequences."""
    rng = np.random.default_rng(0)
    heads = (2, length, HEADS, HEAD_DIM)
    shapes = {"x": (2, length, WIDTH), "query": heads, "key": heads, "value": heads}
    sizes = {"x": 1.0, "query": scale, "key": scale, "value": 1.0}
    return {name: jnp.asarray(sizes[name] * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def attend(
    method: PositionMethod, options: AttentionOptions, params: Any, inputs: dict[str, Array], queries: int = LENGTH
) -> Array:
    """One layer's attention, at positions from 3 on; of the last `queries` tokens."""
    positions = np.arange(inputs["x"].shape[1]) + 3
    attention = method_attention_fn(
        method.at_length(positions.size),
        params,
        inputs["x"].astype(jnp.float32),
        query_positions=positions[-queries:],
        key_positions=positions,
        options=options,
    )
    return attention(inputs["query"][:, -queries:], inputs["key"], inputs["value"])


def bias_of(method: PositionMethod, params: Any, inputs: dict[str, Array]) -> Bias | None:
    method = method.at_length(inputs["x"].shape[1])
    kept = method.keep(params, inputs["x"], inputs["key"], padding=None, before=None)
    return method.content_bias(params, inputs["query"], kept, kept)


def is_bounded(method: PositionMethod) -> bool:
    @jit
    def bounded() -> bool:
        bias = bias_of(method, params_of(method), inputs_of(LENGTH))
        return bias is not None and bias.bounded

    return bool(bounded())


def compare(method: PositionMethod, what: str, got: PyTree, expected: PyTree, tolerance: float) -> None:
    for (path, right), value in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        right, value = np.asarray(right, np.float64), np.asarray(value, np.float64)
        error = np.abs(value - right).max() / (1.0 + np.abs(right).max())
        if not error <= tolerance:
            place = jax.tree_util.keystr(path, simple=True, separator="/")
            fail(method, f"{what} differs from the dense formula in {place} by {error:.2g} of the largest")
