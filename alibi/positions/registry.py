"""The registry: a position method is a name here or in an installed package, or a class as
`package.module:Class`.
"""

import numbers
from collections.abc import Mapping
from typing import Any

from alibi.config.classes import Registry
from alibi.config.fields import without_lists
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
POSITIONS = Registry(
    "position",
    "position method",
    METHODS | OF_IMAGES,
    "alibi.positions:PositionMethod",
    GROUP,
    OTHER_NAMES,
)


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
      options: values for the fields that the class adds, under their names.

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
    method = POSITIONS.load(name)
    options = POSITIONS.options(name, options)
    name = name if isinstance(name, str) else method.__name__
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
    """Returns the class of a position method, from a name in `METHODS` or of an installed package,
    from `package.module:Class`, or from the class itself.

    Raises:
      ValueError: an unknown name, or a class that can't be imported or is no position method.
    """
    return POSITIONS.load(name)


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
