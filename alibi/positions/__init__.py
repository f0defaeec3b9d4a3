"""The registry of position methods: a method is a file of this package and a line here, or a class of any other one."""

import difflib
import importlib
import inspect
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from alibi.config.fields import annotations, read, without_lists
from alibi.positions.alibi import Alibi, AlibiBias, alibi_bias
from alibi.positions.alibi_interpolated import AlibiInterpolated
from alibi.positions.alibi_learned import AlibiLearned
from alibi.positions.alibi_ntk import AlibiNtk
from alibi.positions.base import Params, PositionMethod
from alibi.positions.bias import Bias, Blocks, MissingFunctionError, Part, per_head, per_key, per_query, shared, static
from alibi.positions.deberta import Deberta
from alibi.positions.distance import DistanceBias
from alibi.positions.fire import Fire
from alibi.positions.fox import Fox
from alibi.positions.kerple_log import KerpleLog
from alibi.positions.kerple_power import KerplePower
from alibi.positions.learned import Learned
from alibi.positions.none import NoPosition
from alibi.positions.randomised import Randomised
from alibi.positions.rotary import Rotary
from alibi.positions.rotary_interpolated import RotaryInterpolated
from alibi.positions.rotary_ntk import RotaryNtk
from alibi.positions.sandwich import Sandwich
from alibi.positions.scaled_logits import ScaledLogits
from alibi.positions.shaw import Shaw
from alibi.positions.sinusoidal import Sinusoidal
from alibi.positions.t5 import T5, T5Bias
from alibi.positions.xpos import XPos
from alibi.positions.yarn import Yarn

METHODS: dict[str, type[PositionMethod]] = {
    "alibi": Alibi,
    "alibi_learned": AlibiLearned,
    "alibi_interpolated": AlibiInterpolated,
    "alibi_ntk": AlibiNtk,
    "t5": T5,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "sandwich": Sandwich,
    "fire": Fire,
    "fox": Fox,
    "shaw": Shaw,
    "deberta": Deberta,
    "rotary": Rotary,
    "rotary_interpolated": RotaryInterpolated,
    "rotary_ntk": RotaryNtk,
    "yarn": Yarn,
    "xpos": XPos,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "none": NoPosition,
    "randomised": Randomised,
}

LOGIT_SCALE = "logit_scale"  # an option of every method

__all__ = [
    "LOGIT_SCALE",
    "METHODS",
    "AlibiBias",
    "Bias",
    "Blocks",
    "DistanceBias",
    "Params",
    "Part",
    "PositionMethod",
    "T5Bias",
    "alibi_bias",
    "changed_options",
    "make_position",
    "method_class",
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
    """The method called `name`, with `options` for the fields that its class adds.

    Args:
      name: of the registry `METHODS`, or `package.module:Class` for a method that is defined elsewhere; or the class.
      causal: whether a token sees only those before it.
      options: by name. Every method also takes `logit_scale`, "log_n" or "ssmax": see `ScaledLogits`.

    Raises:
      ValueError: an unknown name or option (the nearest is suggested), an option or size that the
        method refuses, a class that can't be imported or is no position method, or a method
        whose bias is none that attention can take.
    """
    method = method_class(name) if isinstance(name, str) else name
    name = name if isinstance(name, str) else getattr(name, "__name__", repr(name))
    _check_class(name, method)
    known, annotated, options = method.options(), annotations(method), dict(options or {})
    rule = options.pop(LOGIT_SCALE, "")
    rule = read(f"option {LOGIT_SCALE}={rule!r} of position method {name!r}", rule, str | None, "")
    for option, value in options.items():
        if option not in known:
            everywhere = {**known, LOGIT_SCALE: ""}
            raise ValueError(f"position method {name!r} has no option {option!r}{_suggestion(option, everywhere)}")
        given = f"option {option}={without_lists(value)!r} of position method {name!r}"
        options[option] = read(given, value, annotated[option], known[option])
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "width": width, "train_length": train_length}
    for size, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"{size}={value!r} of position method {name!r} must be a whole number of at least 1")
    made = method(**sizes, causal=causal, **options)
    if rule:
        made = ScaledLogits(**sizes, causal=causal, other=made, rule=rule)
    check_bias(name, made)
    return made


def method_class(name: str) -> Any:
    """The class of a position method by its name (of `METHODS`, or `package.module:Class`), or ValueError."""
    if ":" not in name:
        if name not in METHODS:
            raise ValueError(f"unknown position method {name!r}{_suggestion(name, METHODS)}")
        return METHODS[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"position={name}: {error}; write package.module:Class of a module that Python finds from here "
            "(PYTHONPATH names further directories)"
        ) from error
    return found


def changed_options(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The options of a position method that differ between two configs, each with its two values.

    Args:
      before, now: the options that each config gives; the others have their defaults.
    """
    defaults = {LOGIT_SCALE: "", **method_class(name).options()}
    before, now = (defaults | without_lists(given) for given in (before, now))
    return {option: (before[option], now[option]) for option in defaults if before[option] != now[option]}


def _check_class(name: str, found: Any) -> None:
    if not (isinstance(found, type) and issubclass(found, PositionMethod)):
        raise ValueError(f"position={name} is no subclass of alibi.positions.PositionMethod, but {found!r}")
    # With those of ClassVar, which are no options either.
    lost = inspect.get_annotations(found).keys() - getattr(found, "__dataclass_fields__", {}).keys()
    if lost:
        raise ValueError(
            f"position={name} has {', '.join(sorted(lost))}, which are no options of it; put "
            "@dataclasses.dataclass(frozen=True) above the class"
        )


def check_bias(name: str, method: PositionMethod) -> None:
    """Raises ValueError for parameters of equal names, or a bias that attention could not take; computes nothing."""
    heads, head_dim, width, q, k = method.num_heads, method.head_dim, method.width, 2, 3

    def make_block() -> Any:
        key = jax.random.key(0)
        of_all, of_layer = dict(method.init(key)), dict(method.init_layer(key))
        if twice := sorted(of_all.keys() & of_layer.keys()):
            raise ValueError(f"position method {name!r}: init and init_layer both make {', '.join(twice)}; rename one")
        params = of_all | of_layer
        keys = jnp.zeros((1, k, heads, head_dim))
        kept = method.keep(params, jnp.zeros((1, k, width)), keys, padding=None, before=None)
        bias = method.content_bias(params, keys[:, :q], jax.tree.map(lambda x: x[:, :q], kept), kept)
        if bias is not None and not isinstance(bias, Bias):
            got = f"an array of shape {bias.shape}" if hasattr(bias, "shape") else type(bias).__name__
            raise ValueError(
                f"the bias of position method {name!r} must be an alibi.positions.Bias, which gives any block of "
                f"itself, and is {got}"
            )
        for path, leaf in jax.tree.leaves_with_path(bias):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"field {jax.tree_util.keystr(path, simple=True)} of the bias of position method {name!r} is "
                    f"{leaf.dtype}; fields are floating-point arrays, or `static`"
                )
        if bias is None:
            return None
        if bias.bounded:
            one = jnp.zeros((1, 1, 1), jnp.int32)
            blocks = Blocks(behind=one, ahead=one, q_blocks=1, k_blocks=1, key_count=one[None])
            bias.upper_bound(blocks)
            bias.log_sum_bound(blocks)
        if bias.adds_values:
            bias.of_values(jnp.zeros((1, heads, q, k)), jnp.arange(q), jnp.arange(k))
        return bias(jnp.arange(q), jnp.arange(k))

    try:
        block = jax.eval_shape(make_block)
    except MissingFunctionError as error:
        raise ValueError(f"the bias of position method {name!r} lacks a function: {error}") from error
    if block is None:
        return
    if block.shape not in ((heads, q, k), (1, heads, q, k)):
        raise ValueError(
            f"the bias of position method {name!r} gives a block of shape {block.shape} for {q} queries, {k} keys "
            f"and {heads} heads; it must be [heads, q, k] = {(heads, q, k)}, or that for each sequence"
        )


def _suggestion(word: str, known: Mapping[str, Any]) -> str:
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.0)[0]
    return f"; did you mean {nearest!r}? There are: {', '.join(known)}"
