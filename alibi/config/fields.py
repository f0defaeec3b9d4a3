"""One reader of values: from a flag's text or from Python to the type and the range of a dataclass
field.
"""

import ast
import contextlib
import dataclasses
import difflib
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

# The sizes of normal float32 numbers: smaller ones may count as 0 on the devices.
SMALLEST, LARGEST = 1.1754943508222875e-38, 3.4028234663852886e38
INT32 = 2**31 - 1  # counts and positions on the devices are int32


_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


def number(default: float | None, *, or_all: int | None = None, **bounds: float) -> Any:
    """Returns a dataclass field of a number.

    Args:
      or_all: a number out of bounds; it means "all".
      bounds: of at_least, above, at_most and below.
    """
    return dataclasses.field(default=default, metadata={"bounds": bounds, "or_all": or_all})


def choice(default: str, names: tuple[str, ...], **reasons: str) -> Any:
    """Returns a dataclass field that holds one of `names`; `reasons` says why other names are not
    among them.
    """
    return dataclasses.field(default=default, metadata={"names": names, "reasons": reasons})


def _violated(limits: Mapping[str, Any], value: Any) -> str:
    """Returns the limits of a field, for an error, if `value` violates them; else ""."""
    if names := limits.get("names"):
        if value in names:
            return ""
        reason = f"; {limits['reasons'][value]}" if value in limits["reasons"] else ""
        return f"one of {', '.join(name or repr(name) for name in names)}{reason}"
    bounds, or_all = limits.get("bounds", {}), limits.get("or_all")
    if value == or_all or all(_BOUNDS[name](value, bound) for name, bound in bounds.items()):
        return ""
    words = " and ".join(f"{name.replace('_', ' ')} {bound:,}" for name, bound in bounds.items())
    return words if or_all is None else f"{words}, or {or_all} for all"


def annotations(kind: type) -> dict[str, Any]:
    """Returns the type of each field of a dataclass: its annotation, or if Python can't evaluate
    it, its default's.
    """
    fields = dataclasses.fields(kind)
    # text as an annotation may name something absent, and raise any error
    with contextlib.suppress(Exception):
        hints = typing.get_type_hints(kind)
        return {field.name: hints[field.name] for field in fields}
    unknown = (None, dataclasses.MISSING)
    return {
        field.name: Any if field.default in unknown else type(field.default) for field in fields
    }


def parsed(text: str, annotation: Any = Any) -> Any:
    """Returns the value of a flag's text: None, True, a number, a name, or a tuple such as
    0.5:0.25 or 32,0.
    """
    if annotation is str:
        return text
    if str in typing.get_args(annotation):  # a name or several
        return tuple(text.split(",")) if "," in text else text
    if annotation is bool and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    parts = [_literal(part) for part in text.split(":")]
    several = len(parts) > 1 and all(type(part) in (int, float) for part in parts)
    return tuple(parts) if several else without_lists(_literal(text))


def read(
    given: str,
    value: Any,
    annotation: Any,
    default: Any = None,
    limits: Mapping[str, Any] | None = None,
) -> Any:
    """Returns `value` as the type of a field.

    Lists become tuples, since a frozen dataclass is hashed; a number becomes a tuple if the field
    holds tuples, and a whole number a float if it holds floats. None is also taken if it is the
    default.

    Args:
      given: names the value in an error, such as "model.width=3".

    Raises:
      ValueError: a value of another type or out of the field's limits, or a number outside float32.
    """
    value = without_lists(value)
    if value is None and default is None:
        return None
    try:
        found = _read(value, annotation)
    except TypeError:
        plain = isinstance(annotation, type) and not typing.get_args(annotation)
        needed = annotation.__name__ if plain else str(annotation).replace("typing.", "")
        if default is not None and default is not dataclasses.MISSING:
            example = ":".join(map(str, default)) if isinstance(default, tuple) else repr(default)
            needed += f", such as {example}"
        raise ValueError(f"{given} must be of type {needed}") from None
    except OverflowError:
        sizes = f"0 or of a size from {SMALLEST:.2g} to {LARGEST:.2g}, as in float32"
        raise ValueError(f"{given} must be {sizes}") from None
    for each in found if isinstance(found, tuple) else [found]:
        if needed := _violated(limits or {}, each):
            raise ValueError(f"{given} must be {needed}")
    return found


def without_lists(value: Any) -> Any:
    """Returns `value` with tuples in place of lists at any depth: values from JSON equal the values
    written to it.
    """
    if isinstance(value, Mapping):
        return {name: without_lists(inner) for name, inner in value.items()}
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return tuple(map(without_lists, value)) if several else value


def takes_several(annotation: Any) -> bool:
    """Returns whether a field of this type holds tuples: a tuple for it is a value, not a list of
    values.
    """
    return annotation is Any or any(map(_is_several, (annotation, *typing.get_args(annotation))))


def as_text(value: Any) -> str:
    """Returns a value as a flag takes it: several with commas."""
    several = isinstance(value, tuple) and len(value) > 1
    return ",".join(map(str, value)) if several else str(value)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the most similar word of `known`; "" if the similarity, from 0 to 1, is below
    `cutoff`.
    """
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a question for the nearest of `known`, to stand before another sentence; "" if none
    is near.
    """
    return f"did you mean {found!r}? " if (found := nearest(word, known)) else ""


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _read(value: Any, annotation: Any) -> Any:
    """Returns `value` as `annotation`; raises TypeError if it is of another type, OverflowError
    beyond float32.
    """
    kind: Any = typing.get_origin(annotation) or annotation
    arguments = typing.get_args(annotation)
    if kind in (typing.Union, types.UnionType):
        failure: Exception = TypeError()
        # A tuple last: any single value makes one.
        for option in sorted(arguments, key=_is_several):
            try:
                return _read(value, option)
            except OverflowError as error:
                failure = error
            except TypeError:
                pass
        raise failure
    if _is_several(annotation):
        values = value if isinstance(value, tuple) else (value,)
        if not arguments:
            return values
        same = kind is list or arguments[-1] is ...
        each = arguments[:1] * len(values) if same else arguments
        if len(each) != len(values):
            raise TypeError
        return tuple(map(_read, values, each))
    if kind is float and type(value) is not bool and isinstance(value, int | float):
        if value and not SMALLEST <= abs(value) <= LARGEST:
            raise OverflowError
        return float(value)
    if kind is Any or not isinstance(kind, type):
        return value
    # To Python a bool is an int.
    if not (type(value) is kind if kind in (bool, int) else isinstance(value, kind)):
        raise TypeError
    return value


def _is_several(annotation: Any) -> bool:
    kind: Any = typing.get_origin(annotation) or annotation
    return kind in (tuple, list)


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the config, whose values are read and checked when it is made.

    Raises:
      ValueError: a value of another type or out of its range.
    """

    types: ClassVar[dict[str, Any]]  # of the keys, by name

    def __init_subclass__(cls) -> None:
        cls.types = typing.get_type_hints(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, self.read(field.name, self[field.name]))

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a key whose name is known only at run time, such as a split."""
        return getattr(self, name)

    @classmethod
    def read(cls, name: str, value: Any) -> Any:
        """Returns `value`, or the value of a text, as the type of the key `name`; ValueError as
        above.
        """
        # "model" of ModelConfig, "" of Config
        section = cls.__name__.removesuffix("Config").lower()
        field, annotation = cls.__dataclass_fields__[name], cls.types[name]
        if isinstance(value, str):
            value = parsed(value, annotation)
        given = f"{section}.{name}={value!r}".removeprefix(".")
        return read(given, value, annotation, field.default, field.metadata)
