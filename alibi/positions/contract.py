"""The check of a method from outside: its functions return what the contract says."""

import contextlib
import inspect
import traceback
from typing import Any

import jax
import jax.numpy as jnp

from alibi.positions.base import PositionMethod
from alibi.positions.bias import Bias, Blocks, misfits
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
    "keys": "[batch, keys, key heads, features], or set takes_shared_keys = False if it needs keys of each head",
    "keep": "arrays [batch, length, heads, ...]",
    "bias": "an alibi.positions.Bias or None",
    "content_bias": "an alibi.positions.Bias or None",
    "of_rows": "[batch, heads, queries, keys]",
    "of_tile": "a tile [batch, heads, queries, keys] and a carry [batch, heads, queries, carried]",
    "upper_bound": "[heads, query blocks, key blocks]",
    "log_sum_bound": "[heads, query blocks, key blocks]",
    "of_values": "[batch, heads, queries, features]",
}


def check_contract(name: str, method: PositionMethod, kv_heads: int = 0) -> None:
    """Raises ValueError, with file and line, if a function of the method or its bias fails or returns
    an array of another shape or dtype, or if a field of the bias has no such axis as it declares. Traces
    the functions and computes nothing.

    Args:
      kv_heads: heads of keys. 0 means as many as of queries.
    """
    heads, q, k = method.num_heads, 2, 3

    def call(owner: Any, function: str, shape: tuple[int, ...] | None, *arguments: Any) -> Any:
        """Returns the result of the owner's function, after a check that its arrays begin with `shape`."""
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
            start = (
                1 if function in ("__call__", "of_rows", "of_tile") and len(dimensions) == 4 else 0
            )
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
        queries, keys = (
            jnp.zeros((1, k, count, method.head_dim), jnp.float32)
            for count in (heads, kv_heads or heads)
        )
        call(method, "embed", x.shape, params, x, positions)
        kept = call(method, "keep", None, params, x, keys, None, None)
        queries = call(method, "queries", queries.shape[:-1], params, queries, positions, kept)
        call(method, "keys", keys.shape[:-1], params, keys, positions, kept)
        of_queries = jax.tree.map(lambda leaf: leaf[:, :q], kept)
        bias = call(method, "content_bias", None, params, queries[:, :q], of_queries, kept)
        if bias is None:
            return
        if not isinstance(bias, Bias):
            got = "an array" if isinstance(bias, jax.Array) else type(bias).__name__
            raise ValueError(
                f"the bias of position method {name!r} must be an alibi.positions.Bias, and is {got}"
            )
        _check_fields(name, bias, {"batch": 1, "heads": heads, "queries": q, "keys": k})
        weights = jnp.zeros((1, heads, q, k), jnp.float32)
        if bias.reads_rows:
            row = weights, weights == 0, positions[:q], positions
            if bias.carried:
                carry = jnp.zeros((1, heads, q, bias.carried), jnp.float32)
                call(bias, "of_tile", (heads, q), *row, carry)
            call(bias, "of_rows", (heads, q, k), *row)
            return
        if isinstance(bias, DistanceBias):
            call(bias, "at", (heads, q, k), jnp.zeros((q, k), jnp.int32))
        call(bias, "__call__", (heads, q, k), positions[:q], positions)
        if bias.bounded:
            first = jnp.zeros((1, 1, 1), jnp.int32)
            blocks = Blocks(first, first, 1, 1, key_count=first[None], first_query=first[0])
            for bound in ("upper_bound", "log_sum_bound"):
                call(bias, bound, None, blocks)
        if bias.adds_values:
            call(bias, "of_values", None, weights, positions[:q], positions)

    jax.eval_shape(trace)


def _check_fields(name: str, bias: Bias, sizes: dict[str, int]) -> None:
    """Raises ValueError for a field that is no array, or has no such axis as it declares."""
    for owner, field, shape, needed in misfits(bias, sizes):
        value = getattr(owner, field.name)
        got = f"an array of shape {list(shape)}" if shape is not None else repr(value)
        raise ValueError(
            f"position method {name!r}: {type(owner).__name__}.{field.name} ({class_line(type(owner))}) is {got}, and "
            f"it declares {' and '.join(needed) or 'an array'}; declare it by per_head, per_query, per_key or shared "
            "as it lies, or by static if it is no array"
        )


def class_line(kind: type) -> str:
    """Returns the file and line of a class, or its module if no file has it."""
    with contextlib.suppress(OSError, TypeError):
        return f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    return kind.__module__


def _definition(owner: Any, function: str) -> str:
    """Returns the name of the owner's function, with the line that defines it."""
    code = getattr(inspect.unwrap(getattr(owner, function)), "__code__", None)
    line = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{type(owner).__name__}.{function}{line}"


def _last_line(method: type[PositionMethod], error: Exception) -> str:
    """Returns the last line of the method's package in the traceback of an error, or "" if it has
    none.
    """
    package = method.__module__.partition(".")[0]
    lines = [
        f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] == package
        and not frame.f_code.co_filename.startswith("<")  # made by dataclasses
    ]
    return lines[-1] if lines else ""
