"""The check of a method from outside: its functions return what the contract says."""

import inspect
import traceback
from typing import Any

import jax
import jax.numpy as jnp

from alibi.positions.base import PositionMethod
from alibi.positions.bias import Bias, Blocks
from alibi.positions.distance import DistanceBias

FLOATS = ("float32", "float64")

# What the functions of a method or its bias return, for errors.
RESULTS = {
    "at": "[heads, *distance.shape]",
    "__call__": "[heads, queries, keys]",
    "init": "a dictionary of float32 arrays",
    "init_layer": "a dictionary of float32 arrays",
    "embed": "[batch, length, width]",
    "queries": "[batch, queries, heads, features]",
    "keys": "[batch, keys, heads, features]",
    "keep": "arrays [batch, length, heads, ...]",
    "bias": "an alibi.positions.Bias or None",
    "content_bias": "an alibi.positions.Bias or None",
    "upper_bound": "[heads, query blocks, key blocks]",
    "log_sum_bound": "[heads, query blocks, key blocks]",
    "of_values": "[batch, heads, queries, features]",
}


def check_contract(name: str, method: PositionMethod) -> None:
    """Raises ValueError, with file and line, if a function of the method or its bias fails or returns
    an array of another shape or dtype. Traces the functions and computes nothing.
    """
    heads, q, k = method.num_heads, 2, 3

    def call(owner: Any, function: str, shape: tuple[int, ...] | None, *arguments: Any) -> Any:
        """Returns the result of the owner's function; its arrays begin with `shape`, if it is given."""
        try:
            result = getattr(owner, function)(*arguments)
        except Exception as error:
            line = _last_line(type(method), error) or _definition(owner, function)
            reason = str(error).strip().partition("\n")[0].removesuffix(".")
            raise ValueError(
                f"position method {name!r}: {line} fails: {type(error).__name__}: {reason}; it must return "
                f"{RESULTS[function]}"
            ) from error
        if shape is None:
            return result
        for array in jax.tree.leaves(result, is_leaf=lambda leaf: leaf is None):
            dtype, dimensions = getattr(array, "dtype", None), getattr(array, "shape", ())
            # a tile may have a batch dimension
            start = 1 if function == "__call__" and len(dimensions) == 4 else 0
            if dtype not in FLOATS or dimensions[start:][: len(shape)] != shape:
                got = type(array).__name__ if dtype is None else f"{dtype}{list(dimensions)}"
                here = f", here float32{list(shape)}" if shape else ""
                raise ValueError(
                    f"position method {name!r}: {_definition(owner, function)} returned {got}; it must return "
                    f"{RESULTS[function]}{here}"
                )
        return result

    def trace() -> None:
        params: dict[str, Any] = {}
        for init in ("init", "init_layer"):
            made = call(method, init, (), jax.random.key(0))
            if twice := sorted(params.keys() & made.keys()):
                raise ValueError(
                    f"position method {name!r}: init and init_layer both make {', '.join(twice)}; rename one"
                )
            params |= made
        positions = jnp.arange(k)
        x = jnp.zeros((1, k, method.width), jnp.float32)
        keys = jnp.zeros((1, k, heads, method.head_dim), jnp.float32)
        call(method, "embed", x.shape, params, x, positions)
        kept = call(method, "keep", None, params, x, keys, None, None)
        for turn in ("queries", "keys"):
            call(method, turn, keys.shape[:-1], params, keys, positions, kept)
        of_queries = jax.tree.map(lambda leaf: leaf[:, :q], kept)
        bias = call(method, "content_bias", None, params, keys[:, :q], of_queries, kept)
        if bias is None:
            return
        if not isinstance(bias, Bias):
            got = "an array" if isinstance(bias, jax.Array) else type(bias).__name__
            raise ValueError(
                f"the bias of position method {name!r} must be an alibi.positions.Bias, and is {got}"
            )
        if isinstance(bias, DistanceBias):
            call(bias, "at", (heads, q, k), jnp.zeros((q, k), jnp.int32))
        call(bias, "__call__", (heads, q, k), positions[:q], positions)
        if bias.bounded:
            first = jnp.zeros((1, 1, 1), jnp.int32)
            blocks = Blocks(first, first, 1, 1, key_count=first[None], first_query=first[0])
            for bound in ("upper_bound", "log_sum_bound"):
                call(bias, bound, None, blocks)
        if bias.adds_values:
            weights = jnp.zeros((1, heads, q, k), jnp.float32)
            call(bias, "of_values", None, weights, positions[:q], positions)

    jax.eval_shape(trace)


def _definition(owner: Any, function: str) -> str:
    """Returns the name of the owner's function, with the line that defines it."""
    code = getattr(inspect.unwrap(getattr(owner, function)), "__code__", None)
    line = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{type(owner).__name__}.{function}{line}"


def _last_line(method: type[PositionMethod], error: Exception) -> str:
    """Returns the last line of the method's package in the traceback of an error; "" if none."""
    package, last = method.__module__.partition(".")[0], ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if frame.f_globals.get("__name__", "").partition(".")[0] == package:
            last = f"{code.co_qualname} ({code.co_filename}:{line})"
    return last
