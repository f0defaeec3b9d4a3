"""Sizes, parameters and inputs for the checks, and a layer's attention."""

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
TOKENS = 19  # longest sequence of the model: more than in training
SHORT = 12  # tokens in the check before training
# tokens in a call of attention and in its tiles, the last of which is filled up
LENGTH, BLOCK = 40, 16

# The checks run small programs once. Without XLA's expensive passes, and with its older code
# generator for CPUs, compiling takes a sixth of the time. Later versions may lack that generator, and
# refuse unknown options.
QUICK: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
} | ({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {})


def jit(function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
    """Returns a jitted function that compiles quickly on CPUs."""
    return jax.jit(
        function,
        compiler_options=QUICK if jax.default_backend() == "cpu" else None,
        **arguments,
    )


class PositionMethodError(AssertionError, ValueError):
    """A position method breaks the contract or one of its declarations."""


def fail(method: PositionMethod, problem: str) -> None:
    raise PositionMethodError(f"position method {type(method).__name__}: {problem}")


def params_of(method: PositionMethod, moved: float = 0.1, seed: int = 0) -> dict[str, Any]:
    """Returns parameters moved at random off their initial values, since zeros would hide mistakes."""
    shared, of_layer = jax.random.split(jax.random.key(0))
    params = random_moves({**method.init(shared), **method.init_layer(of_layer)}, moved, seed)
    return {
        name: jnp.clip(x, *method.limits[name]) if name in method.limits else x
        for name, x in params.items()
    }


def random_moves(params: PyTree, size: float, seed: int = 0) -> PyTree:
    """Returns parameters plus normal numbers with this standard deviation."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + (size * rng.normal(size=x.shape)).astype(x.dtype), params)


def inputs_of(method: PositionMethod, length: int) -> dict[str, Float[Array, "..."]]:
    """Returns an attention layer's input, queries, keys and values, for two sequences."""
    rng = np.random.default_rng(0)
    heads = (2, length, method.num_heads, method.head_dim)
    shapes = {"x": (2, length, method.width), "query": heads, "key": heads, "value": heads}
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }


def attend(
    method: PositionMethod,
    options: AttentionOptions,
    params: Any,
    inputs: dict[str, Array],
    queries: int = LENGTH,
    first: int = 3,
) -> Array:
    """Returns a layer's attention for the last `queries` tokens, at positions from `first` on."""
    positions = np.arange(inputs["x"].shape[1]) + first
    attention = method_attention_fn(
        method,
        params,
        inputs["x"].astype(jnp.float32),
        query_positions=positions[-queries:],
        key_positions=positions,
        options=options,
    )
    return attention(inputs["query"][:, -queries:], inputs["key"], inputs["value"])


def bias_of(method: PositionMethod, params: Any, inputs: dict[str, Array]) -> Bias | None:
    """Returns the method's bias for these inputs."""
    kept = method.keep(params, inputs["x"], inputs["key"], padding=None, before=None)
    positions = jnp.arange(inputs["x"].shape[1])
    queries = method.queries(params, inputs["query"], positions, kept)
    return method.content_bias(params, queries, kept, kept)


@functools.cache
def declared(method: PositionMethod) -> Bias:
    """Returns the method's bias for what it declares, without numbers, or a plain `Bias`."""
    made = list[Bias | None]()
    jax.eval_shape(lambda: made.append(bias_of(method, params_of(method), inputs_of(method, 9))))
    return made[0] or Bias()


def compare(
    method: PositionMethod, result: str, got: PyTree, expected: PyTree, tolerance: float
) -> None:
    """Raises PositionMethodError if `got` is off by more than the tolerance times the largest value."""
    for (path, right), value in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True
    ):
        right, value = np.asarray(right, np.float64), np.asarray(value, np.float64)
        error = np.abs(value - right).max() / (1.0 + np.abs(right).max())
        if not error <= tolerance:
            leaf = jax.tree_util.keystr(path, simple=True, separator="/")
            fail(
                method,
                f"{result} differs from the dense formula in {leaf} by {error:.2g} of the largest"
                if np.isfinite(right).all()
                else f"attention's {leaf} is not finite by the dense formula",
            )
