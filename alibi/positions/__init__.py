"""The registry of position methods: a method is a file of this package and a line here."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from alibi.positions.alibi import Alibi, AlibiBias, alibi_bias
from alibi.positions.alibi_learned import AlibiLearned
from alibi.positions.base import Bias, PositionMethod
from alibi.positions.learned import Learned
from alibi.positions.none import NoPosition
from alibi.positions.rotary import Rotary
from alibi.positions.sinusoidal import Sinusoidal
from alibi.positions.t5 import T5, T5Bias

METHODS: dict[str, type[PositionMethod]] = {
    "alibi": Alibi,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "t5": T5,
    "none": NoPosition,
    "alibi_learned": AlibiLearned,
}

__all__ = ["METHODS", "AlibiBias", "Bias", "PositionMethod", "T5Bias", "alibi_bias", "make_position"]


def make_position(
    name: str,
    *,
    num_heads: int,
    head_dim: int,
    width: int,
    train_length: int,
    options: Mapping[str, Any] | None = None,
) -> PositionMethod:
    """The method called `name`, with `options` for the fields that its class adds.

    Raises:
      ValueError: an unknown name or option (the nearest is suggested), or an option
        that the method refuses.
    """
    if name not in METHODS:
        raise ValueError(f"unknown position method {name!r}{_suggestion(name, METHODS)}")
    method = METHODS[name]
    own = [field.name for field in dataclasses.fields(method)][len(dataclasses.fields(PositionMethod)) :]
    options = options or {}
    for option in options:
        if option not in own:
            raise ValueError(f"position method {name!r} has no option {option!r}{_suggestion(option, own)}")
        default = getattr(method, option)
        if type(options[option]) not in (type(default), *([int] if isinstance(default, float) else [])):
            raise ValueError(
                f"option {option}={options[option]!r} of position method {name!r} must be of type "
                f"{type(default).__name__}, such as {default!r}"
            )
    return method(num_heads=num_heads, head_dim=head_dim, width=width, train_length=train_length, **options)


def _suggestion(word: str, known: Mapping[str, Any] | list[str]) -> str:
    names = list(known)
    if not names:
        return "; it has none"
    nearest = difflib.get_close_matches(word, names, n=1, cutoff=0.0)[0]
    return f"; did you mean {nearest!r}? There are: {', '.join(names)}"
