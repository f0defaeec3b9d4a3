"""The registry of position methods: each is a name here or in an installed package, or a class from
anywhere as `package.module:Class`.
"""

import functools
import importlib.metadata
import inspect
import numbers
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from alibi.config.classes import load_class
from alibi.config.fields import annotations, did_you_mean, read, without_lists
from alibi.positions.alibi import AlibiBias, alibi_bias
from alibi.positions.base import Params, PositionMethod
from alibi.positions.bias import (
    Bias,
    Blocks,
    MissingFunctionError,
    Part,
    per_head,
    per_key,
    per_query,
    shared,
    static,
)
from alibi.positions.distance import DistanceBias

# The group of entry points by which installed packages name their methods.
GROUP = "alibi.positions"

# The class of each method, which is imported when the method is used.
METHODS = {
    "alibi": "alibi.positions.alibi:Alibi",
    "alibi_learned": "alibi.positions.alibi_learned:AlibiLearned",
    "alibi_interpolated": "alibi.positions.alibi_stretched:AlibiInterpolated",
    "alibi_ntk": "alibi.positions.alibi_stretched:AlibiNtk",
    "t5": "alibi.positions.t5:T5",
    "kerple_log": "alibi.positions.kerple:KerpleLog",
    "kerple_power": "alibi.positions.kerple:KerplePower",
    "sandwich": "alibi.positions.sandwich:Sandwich",
    "fire": "alibi.positions.fire:Fire",
    "fox": "alibi.positions.fox:Fox",
    "shaw": "alibi.positions.shaw:Shaw",
    "deberta": "alibi.positions.deberta:Deberta",
    "rotary": "alibi.positions.rotary:Rotary",
    "rotary_interpolated": "alibi.positions.rotary_stretched:RotaryInterpolated",
    "rotary_ntk": "alibi.positions.rotary_stretched:RotaryNtk",
    "yarn": "alibi.positions.rotary_stretched:Yarn",
    "xpos": "alibi.positions.xpos:XPos",
    "pope": "alibi.positions.pope:Pope",
    "selective_rope": "alibi.positions.selective_rope:SelectiveRope",
    "sinusoidal": "alibi.positions.sinusoidal:Sinusoidal",
    "learned": "alibi.positions.learned:Learned",
    "none": "alibi.positions.none:NoPosition",
}

# Names in papers and other libraries, for suggestions.
OTHER_NAMES = {
    "rope": "rotary",
    "nope": "none",
    "kerple": "kerple_log",
    "t5_bias": "t5",
    "forgetting_transformer": "fox",
    "position_interpolation": "rotary_interpolated",
    "dynamic_ntk": "rotary_ntk",
}

# The results of functions that a method or its bias overrides, for errors.
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
}

__all__ = [
    "METHODS",
    "AlibiBias",
    "Bias",
    "Blocks",
    "DistanceBias",
    "Params",
    "Part",
    "PositionMethod",
    "alibi_bias",
    "changed_options",
    "installed_methods",
    "known_options",
    "make_position",
    "method_class",
    "method_names",
    "per_head",
    "per_key",
    "per_query",
    "shared",
    "static",
]


def make_position(
    name: str | type[PositionMethod],
    *,
    num_heads: int,
    head_dim: int,
    width: int,
    train_length: int,
    causal: bool = True,
    options: Mapping[str, Any] | None = None,
) -> PositionMethod:
    """Returns the method called `name`, with `options` for the fields that its class adds.

    Args:
      name: in the registry `METHODS`, or of an installed package's method, or
        `package.module:Class` for a method defined elsewhere; or the class.
      causal: a token sees only the tokens before it.
      options: by name.

    Raises:
      ValueError: an unknown name or option (the nearest is suggested); an option or size that the
        method refuses; a class that can't be imported or is no position method; a method
        whose bias attention can't take; an error in a function of a method defined elsewhere, with
        its file and line.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> method = make_position("t5", num_heads=8, head_dim=32, width=256, train_length=128)
      >>> params = method.init(jax.random.key(0))  # learned; add it to your model's parameters
      >>> method.bias(params)(jnp.arange(4), jnp.arange(4)).shape
      (8, 4, 4)
    """
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(
            f"options={options!r:.60} of position method {name!r} must be a mapping of names to values, such as "
            "{'share': 0.25} for rotary"
        )
    method = method_class(name)
    name = name if isinstance(name, str) else method.__name__
    known, annotated, options = method.options(), annotations(method), dict(options or {})
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"position method {name!r} has no option {option!r}{_suggestion(option, known)}"
            )
        given = f"option {option}={without_lists(value)!r} of position method {name!r}"
        options[option] = read(given, value, annotated[option], known[option])
    sizes = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "width": width,
        "train_length": train_length,
    }
    for size, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(
                f"{size}={value!r} of position method {name!r} must be a whole number of at least 1"
            )
    made = method(**sizes, causal=causal, **options)
    try:
        _check_bias(name, made)
    except MissingFunctionError as error:
        raise ValueError(
            f"the bias of position method {name!r} lacks a function: {error}"
        ) from error
    except Exception as error:
        if fault := _own_fault(made, error):
            raise ValueError(f"position method {name!r}: {fault}") from error
        raise
    return made


def method_class(name: str | type[PositionMethod]) -> type[PositionMethod]:
    """Returns the class of a position method by its name (in `METHODS`, in `installed_methods`, or
    `package.module:Class`), or ValueError; a class itself is only checked.
    """
    if not isinstance(name, str):
        return _checked(getattr(name, "__name__", repr(name)), name)
    place = METHODS.get(name, name)
    if name in METHODS and (other := installed_methods().get(name)):
        warnings.warn(
            f"position={name} is this library's method. An installed package gives the same name to {other}; write "
            f"position={other} for that method",
            stacklevel=2,
        )
    if ":" not in place:
        known = {**installed_methods(), **METHODS}
        if name not in known:
            word = name.lower().replace("-", "_")
            meant = _suggestion(OTHER_NAMES.get(word, word), known)
            raise ValueError(f"unknown position method {name!r}{meant}")
        place = known[name]
    return _checked(name, load_class(f"position={name}", place))


@functools.cache
def installed_methods() -> dict[str, str]:
    """Returns the classes, as `package.module:Class`, that installed packages name in the group of
    entry points `alibi.positions`, by their names there; a name in `METHODS` stays the library's.
    """
    return {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}


def method_names(position: str) -> tuple[str, ...]:
    """Returns the names in a config's `position`, a name or a list of them."""
    return tuple(position.split(","))


def known_options(position: str) -> dict[str, Any]:
    """Returns the options of a config's `position` with their defaults, "its own" for an option
    whose default differs between the methods of a list.
    """
    known: dict[str, Any] = {}
    for name in dict.fromkeys(method_names(position)):
        for option, default in method_class(name).options().items():
            known[option] = default if known.get(option, default) == default else "its own"
    return known


def changed_options(
    position: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Returns the options of a config's `position` that differ between two configs, each with its
    two values.

    Args:
      before, now: the options in each config; the others have their defaults.
    """
    defaults = known_options(position)
    before, now = (defaults | without_lists(given) for given in (before, now))
    return {
        option: (before[option], now[option])
        for option in defaults
        if before[option] != now[option]
    }


def _checked(name: str, found: Any) -> type[PositionMethod]:
    """Returns `found`; ValueError if it is no position method."""
    if not (isinstance(found, type) and issubclass(found, PositionMethod)):
        raise ValueError(
            f"position={name} is no subclass of alibi.positions.PositionMethod, but {found!r}"
        )
    if (
        lost := inspect.get_annotations(found).keys()
        - getattr(found, "__dataclass_fields__", {}).keys()
    ):
        raise ValueError(
            f"position={name} has {', '.join(sorted(lost))}, which are no options of it; put "
            "@dataclasses.dataclass(frozen=True) above the class"
        )
    return found


def _check_bias(name: str, method: PositionMethod) -> None:
    """Raises ValueError for parameters of equal names, or a bias that attention can't take;
    computes nothing.
    """
    heads, q, k = method.num_heads, 2, 3
    _check_signatures(type(method), PositionMethod)

    def tile() -> Any:
        shared, of_layer = (init(jax.random.key(0)) for init in (method.init, method.init_layer))
        if twice := sorted(shared.keys() & of_layer.keys()):
            raise ValueError(
                f"position method {name!r}: init and init_layer both make {', '.join(twice)}; rename one"
            )
        params, positions = {**shared, **of_layer}, jnp.arange(k)
        jax.tree.map(lambda leaf: _check_shape(method.init, leaf, jnp.shape(leaf)), shared)
        jax.tree.map(lambda leaf: _check_shape(method.init_layer, leaf, jnp.shape(leaf)), of_layer)
        x, keys = (
            jnp.zeros((1, k, *features), jnp.float32)
            for features in ((method.width,), (heads, method.head_dim))
        )
        _check_shape(method.embed, method.embed(params, x, positions), x.shape)
        kept = method.keep(params, x, keys, padding=None, before=None)
        for turn in (method.queries, method.keys):
            _check_shape(turn, turn(params, keys, positions, kept), keys.shape[:-1])
        bias = method.content_bias(
            params, keys[:, :q], jax.tree.map(lambda x: x[:, :q], kept), kept
        )
        if bias is None:
            return None
        if not isinstance(bias, Bias):
            got = (
                f"an array of shape {bias.shape}" if hasattr(bias, "shape") else type(bias).__name__
            )
            raise ValueError(
                f"the bias of position method {name!r} must be an alibi.positions.Bias, and is {got}"
            )
        _check_signatures(type(bias), DistanceBias if isinstance(bias, DistanceBias) else Bias)
        if isinstance(bias, DistanceBias):
            _check_shape(bias.at, bias.at(jnp.zeros((q, k), jnp.int32)), (heads, q, k))
        if bias.bounded:
            one = jnp.zeros((1, 1, 1), jnp.int32)
            blocks = Blocks(one, one, 1, 1, key_count=one[None], first_query=one[0])
            bias.upper_bound(blocks)
            bias.log_sum_bound(blocks)
        if bias.adds_values:
            bias.of_values(jnp.zeros((1, heads, q, k), jnp.float32), jnp.arange(q), jnp.arange(k))
        return bias(jnp.arange(q), jnp.arange(k))

    block = jax.eval_shape(tile)
    if block is not None and (
        block.shape not in ((heads, q, k), (1, heads, q, k))
        or block.dtype not in ("float32", "float64")
    ):
        raise ValueError(
            f"the bias of position method {name!r} gives a block {block.dtype}{list(block.shape)} for {q} queries, "
            f"{k} keys and {heads} heads; it must be [heads, q, k], here float32{[heads, q, k]}, or that for each "
            "sequence"
        )


def _check_signatures(kind: type, contract: type) -> None:
    """Raises ValueError if a function that a class overrides takes other arguments than that of the
    contract.
    """
    for name, result in RESULTS.items():
        own, needed = getattr(kind, name, None), getattr(contract, name, None)
        if own is needed or own is None or needed is None:
            continue
        if not callable(own):
            raise ValueError(
                f"{kind.__name__}.{name}={own!r} hides a function of that name; give the option another one"
            )
        given, wanted = inspect.signature(own), inspect.signature(needed)
        try:
            given.bind(*wanted.parameters)
        except TypeError:
            code = inspect.unwrap(own).__code__
            raise ValueError(
                f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) takes "
                f"({', '.join(given.parameters)}); it must take ({', '.join(wanted.parameters)}) and return {result}"
            ) from None


def _check_shape(function: Callable[..., Any], result: Any, shape: tuple[int, ...]) -> None:
    """Raises ValueError if the shape of a function's result does not begin with `shape`, or if it is no
    float32.
    """
    found = getattr(result, "shape", None)
    if (
        found is None
        or found[: len(shape)] != shape
        or len(found) - len(shape) > 1
        or result.dtype not in ("float32", "float64")
    ):
        code = inspect.unwrap(function).__code__
        got = f"{result.dtype}{list(found)}" if found is not None else type(result).__name__
        raise ValueError(
            f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) returned {got}; it must return "
            f"{RESULTS[code.co_name]}, here float32{list(shape)}"
        )


def _own_fault(method: PositionMethod, error: Exception) -> str:
    """Returns the last line of the method's package in a traceback, and the result that its function
    needs; "" for a method of this library, or if the package is not in the traceback.
    """
    package = type(method).__module__.partition(".")[0]
    lines = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] == package != "alibi"
    ]
    if not lines:
        return ""
    code, line = lines[-1]
    reason = str(error).strip().partition("\n")[0].removesuffix(".")
    needed = next((RESULTS[of.co_name] for of, _ in lines[::-1] if of.co_name in RESULTS), "")
    return (
        f"{code.co_qualname} ({code.co_filename}:{line}) fails: {type(error).__name__}: {reason}"
        + (f"; it must return {needed}" if needed else "")
    )


def _suggestion(word: str, known: Mapping[str, Any]) -> str:
    there = f"there are: {', '.join(known)}"
    return f"; {did_you_mean(word, known)}{there}" if known else "; it has none"
