"""The registry: a position method is a name here or in an installed package, or a class as
`package.module:Class`.
"""

import functools
import importlib.metadata
import inspect
import numbers
import warnings
from collections.abc import Mapping
from typing import Any

from alibi.config.classes import load_class
from alibi.config.fields import annotations, checked, did_you_mean, without_lists
from alibi.positions.base import PositionMethod
from alibi.positions.contract import check_contract

# The group of entry points by which installed packages name their methods.
GROUP = "alibi.positions"

# The class of each method, imported when the method is used.
METHODS = {
    "alibi": "alibi.positions.alibi:Alibi",
    "alibi_learned": "alibi.positions.alibi_learned:AlibiLearned",
    "alibi_interpolated": "alibi.positions.alibi_stretched:AlibiInterpolated",
    "alibi_ntk": "alibi.positions.alibi_stretched:AlibiNtk",
    "alibi_by_layer": "alibi.positions.alibi_by_layer:AlibiByLayer",
    "bam": "alibi.positions.bam:Bam",
    "t5": "alibi.positions.t5:T5",
    "kerple_log": "alibi.positions.kerple:KerpleLog",
    "kerple_power": "alibi.positions.kerple:KerplePower",
    "sandwich": "alibi.positions.sandwich:Sandwich",
    "fire": "alibi.positions.fire:Fire",
    "fox": "alibi.positions.fox:Fox",
    "cope": "alibi.positions.cope:Cope",
    "dape": "alibi.positions.dape:Dape",
    "stick_breaking": "alibi.positions.stick_breaking:StickBreakingAttention",
    "entmax": "alibi.positions.entmax:Entmax",
    "asentmax": "alibi.positions.entmax:AdaptiveEntmax",
    "shaw": "alibi.positions.shaw:Shaw",
    "deberta": "alibi.positions.deberta:Deberta",
    "rotary": "alibi.positions.rotary:Rotary",
    "rotary_interpolated": "alibi.positions.rotary_stretched:RotaryInterpolated",
    "rotary_ntk": "alibi.positions.rotary_stretched:RotaryNtk",
    "yarn": "alibi.positions.rotary_stretched:Yarn",
    "xpos": "alibi.positions.xpos:XPos",
    "pope": "alibi.positions.pope:Pope",
    "selective_rope": "alibi.positions.selective_rope:SelectiveRope",
    "repo": "alibi.positions.repo:RePo",
    "sinusoidal": "alibi.positions.sinusoidal:Sinusoidal",
    "learned": "alibi.positions.learned:Learned",
    "none": "alibi.positions.none:NoPosition",
}

# Methods for tokens in a grid, which no table of text models has.
OF_IMAGES = {"alibi_grid": "alibi.positions.alibi_grid:AlibiGrid"}

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
    """Returns the method called `name`.

    Args:
      name: a key of `METHODS`, `alibi_grid` for images, the name of an installed package's method,
        `package.module:Class`, or a class.
      causal: tokens see only earlier tokens.
      options: values for the fields that the class adds, by name.

    Raises:
      ValueError: an unknown name or option (the message suggests the nearest), an option or size that
        the method refuses, or a class that can't be imported. A method from outside that breaks the
        contract is named with file and line.

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
    defaults, types, options = method.options(), annotations(method), dict(options or {})
    fields = method.__dataclass_fields__
    for option, value in options.items():
        if option not in defaults:
            raise ValueError(
                f"position method {name!r} has no option {option!r}{_suggestion(option, defaults)}"
            )
        label = f"option {option}={without_lists(value)!r} of position method {name!r}"
        limits = fields[option].metadata
        options[option] = checked(label, value, types[option], defaults[option], limits)
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
    if not method.__module__.startswith("alibi."):  # tests hold this library's methods to it
        check_contract(name, made)
    return made


def method_class(name: str | type[PositionMethod]) -> type[PositionMethod]:
    """Returns the class of a position method, from a name in `METHODS` or `installed_methods`, from
    `package.module:Class`, or from the class itself.

    Raises:
      ValueError: an unknown name, or a class that can't be imported or is no position method.
    """
    if not isinstance(name, str):
        return _checked(getattr(name, "__name__", repr(name)), name)
    address = {**METHODS, **OF_IMAGES}.get(name, name)
    if name in METHODS and (other := installed_methods().get(name)):
        warnings.warn(
            f"position={name} is this library's method. An installed package gives the same name to {other}; write "
            f"position={other} for that method",
            stacklevel=2,
        )
    if ":" not in address:
        registered = {**installed_methods(), **METHODS, **OF_IMAGES}
        if name not in registered:
            word = name.lower().replace("-", "_")
            meant = _suggestion(OTHER_NAMES.get(word, word), registered)
            raise ValueError(f"unknown position method {name!r}{meant}")
        address = registered[name]
    return _checked(name, load_class(f"position={name}", address))


@functools.cache
def installed_methods() -> dict[str, str]:
    """Returns the methods that installed packages name in the entry points `alibi.positions`, as
    `package.module:Class` for each name. A name in `METHODS` stays the library's.
    """
    return {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}


def method_names(position: str) -> tuple[str, ...]:
    """Returns the names in a config's `position`, a name or a list of them."""
    return tuple(position.split(","))


def known_options(position: str) -> dict[str, Any]:
    """Returns the options for a config's `position` with their defaults, or "its own" for an option that
    has several defaults in a list of methods.
    """
    defaults: dict[str, Any] = {}
    for name in dict.fromkeys(method_names(position)):
        for option, default in method_class(name).options().items():
            same = defaults.get(option, default) == default
            defaults[option] = default if same else "its own"
    return defaults


def changed_options(
    position: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Returns the options for a config's `position` that differ between two configs, each with its two
    values.

    Args:
      before, now: the options in each config. All others have their defaults.
    """
    defaults = known_options(position)
    before, now = (defaults | without_lists(options) for options in (before, now))
    return {
        option: (before[option], now[option])
        for option in defaults
        if before[option] != now[option]
    }


def _checked(name: str, kind: Any) -> type[PositionMethod]:
    """Returns a class, or raises ValueError if it is no position method."""
    if not (isinstance(kind, type) and issubclass(kind, PositionMethod)):
        raise ValueError(
            f"position={name} is no subclass of alibi.positions.PositionMethod, but {kind!r}"
        )
    if (
        lost := inspect.get_annotations(kind).keys()
        - getattr(kind, "__dataclass_fields__", {}).keys()
    ):
        raise ValueError(
            f"position={name} has {', '.join(sorted(lost))}, which are no options of it; put "
            "@dataclasses.dataclass(frozen=True) above the class"
        )
    return kind


def _suggestion(word: str, names: Mapping[str, Any]) -> str:
    there = f"there are: {', '.join(names)}"
    return f"; {did_you_mean(word, names)}{there}" if names else "; it has none"
