"""What a program keeps from its forward pass for its backward pass, told from its trace alone.

On XLA's CPU backend a compiled program says nothing of that for other devices: `jax.checkpoint` changes neither its
memory nor its operations there. In the trace it does, and so does the attention that another platform takes.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend import core
from jaxtyping import PyTree

# Operations that XLA computes again inside what needs them rather than keep their results.
FUSED = frozenset({
    "abs", "add", "and", "broadcast_in_dim", "ceil", "clamp", "concatenate", "convert_element_type", "copy", "cos",
    "div", "eq", "erf", "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt", "integer_pow", "iota",
    "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad", "pow",
    "rem", "reshape", "rev", "round", "rsqrt", "select_n", "sharding_constraint", "sign", "sin", "slice", "split",
    "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose", "xor",
})  # fmt: skip
# Calls of a jaxpr that XLA sees through.
CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "shard_map"})
SMALL = 1 / 64  # of the largest result that is kept: what is computed from less counts as computed from nothing


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    """One array of a traced program.

    Attributes:
      size: bytes on one device.
      inputs: what it is computed from.
      fused: whether that takes only operations of `FUSED`.
    """

    shape: tuple[int, ...]
    size: float
    inputs: tuple["_Value", ...] = ()
    fused: bool = False


def kept_bytes(
    function: Callable[..., Any], *arguments: PyTree, share: Callable[[tuple[int, ...]], float], fuses: bool
) -> float:
    """Bytes on one device of what reverse-mode differentiation of `function(params, ...)` keeps; nothing is computed.

    Its first argument, which it is differentiated in, and results that are as they were given don't count.

    Args:
      arguments: arrays or their shapes and dtypes.
      share: of an array of this global shape, the part that one device holds.
      fuses: count of each value that is computed by elementwise operations from one other only the smaller of the
        two, since the compiler computes it again rather than keep it. False: all that JAX keeps, as of a loop.
    """
    params, *others = arguments

    def pullback(params: PyTree, *others: PyTree) -> Any:
        return jax.vjp(lambda params: function(params, *others), params)[1]

    traced = jax.make_jaxpr(pullback)(params, *others)
    given = [_Value(var.aval.shape, 0.0) for var in (*traced.jaxpr.constvars, *traced.jaxpr.invars)]
    kept = {*_values(traced.jaxpr, given, share)}.difference(given)
    if not fuses:
        return sum(value.size for value in kept)
    least = SMALL * max((value.size for value in kept), default=0.0)
    sources: dict[_Value, _Value | None] = {}
    needed: dict[_Value, float] = collections.defaultdict(float)
    for value in kept:
        if source := _source(value, least, sources):
            needed[source] += value.size
    return sum(min(source.size, size) for source, size in needed.items())


def _source(value: _Value, least: float, known: dict[_Value, _Value | None]) -> _Value | None:
    """The one large value that `value` can be computed again from: itself where that takes more; None: no large one."""
    if value not in known:
        if value.fused:
            sources = {source for one in value.inputs if (source := _source(one, least, known))}
            known[value] = value if len(sources) > 1 else next(iter(sources), None)
        else:
            known[value] = value if value.size > least else None
    return known[value]


def _values(jaxpr: Any, given: Iterable[_Value], share: Callable[[tuple[int, ...]], float]) -> list[_Value]:
    """The results of `jaxpr` of the values `given`, with all that calls hold in their place."""
    held = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))

    def value(var: Any) -> _Value:
        return _Value((), 0.0) if isinstance(var, core.Literal) else held[var]

    for equation in jaxpr.eqns:
        inputs = tuple(map(value, equation.invars))
        inner = _called(equation)
        if inner is not None:
            # Inside shard_map shapes are those of one device.
            own = (lambda shape: 1.0) if equation.primitive.name == "shard_map" else share
            consts = [_Value(var.aval.shape, 0.0) for var in inner.constvars]
            results = _values(inner, [*consts, *inputs], own)
        else:
            fused = equation.primitive.name in FUSED
            results = [_Value(var.aval.shape, _size(var.aval, share), inputs, fused) for var in equation.outvars]
        held |= dict(zip(equation.outvars, results, strict=True))
    return [value(var) for var in jaxpr.outvars]


def _called(equation: Any) -> Any:
    """The jaxpr that an equation calls with its own inputs; None where it is no such call."""
    if equation.primitive.name not in CALLS:
        return None
    found = next((equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params), None)
    inner = getattr(found, "jaxpr", found)
    return inner if inner is not None and len(inner.invars) == len(equation.invars) else None


def _size(aval: Any, share: Callable[[tuple[int, ...]], float]) -> float:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):  # keys of random numbers
        return 0.0
    return math.prod(aval.shape) * aval.dtype.itemsize * share(aval.shape)
