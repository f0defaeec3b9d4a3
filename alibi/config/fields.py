"""Dataclass fields with ranges, and the reader for their values, from flags or from Python."""

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


# The roles of keys; a key without one belongs to what the model or its training is.
COMPUTED = "computed"  # how a run is computed and watched: may change as a run goes on
TRAINED = "trained"  # only training, or how parameters are stored: may change from a parent
CHANGED = "changed"  # the function of the model, which users change in a run from a parent
ADAPTIVE = "adaptive"  # matters for model.embedding=adaptive alone

_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


def setting(default: Any, role: str, **limits: Any) -> Any:
    """Returns a dataclass field with a role, such as `COMPUTED`."""
    return dataclasses.field(default=default, metadata={"role": role, **limits})


def number(default: Any, *, or_all: int | None = None, role: str = "", **bounds: float) -> Any:
    """Returns a dataclass field for a number.

    Args:
      or_all: a number out of bounds that means "all".
      bounds: at_least, above, at_most and below.
    """
    return setting(default, role, bounds=bounds, or_all=or_all)


def choice(default: str, names: tuple[str, ...], *, role: str = "", **reasons: str) -> Any:
    """Returns a dataclass field for one of `names`, with `reasons` why others are missing."""
    return setting(default, role, names=names, reasons=reasons)


def _violated(limits: Mapping[str, Any], value: Any) -> str:
    """Returns the limits that `value` violates, for an error, or "" if none."""
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
    """Returns the type of each field: its annotation, or its default's if that can't be evaluated."""
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
    """Returns the value of a flag's text: None, True, a number, a name, a tuple (0.5:0.25 or 32,0)."""
    if annotation is str:
        return text
    if str in typing.get_args(annotation):  # a name or several
        return tuple(text.split(",")) if "," in text else text
    if annotation is bool and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    parts = [_literal(part) for part in text.split(":")]
    several = len(parts) > 1 and all(type(part) in (int, float) for part in parts)
    return tuple(parts) if several else without_lists(_literal(text))


def checked(
    name: str,
    value: Any,
    annotation: Any,
    default: Any = None,
    limits: Mapping[str, Any] | None = None,
) -> Any:
    """Returns `value` as a field's type: lists become tuples, and where needed a number a tuple, and a
    whole number a float. None passes if it is the default.

    Args:
      name: names the value in an error, such as "model.width=3".

    Raises:
      ValueError: another type, out of the field's limits, or outside float32.
    """
    value = without_lists(value)
    if value is None and default is None:
        return None
    try:
        typed = _as(value, annotation)
    except TypeError:
        plain = isinstance(annotation, type) and not typing.get_args(annotation)
        needed = annotation.__name__ if plain else str(annotation).replace("typing.", "")
        if default is not None and default is not dataclasses.MISSING:
            example = ":".join(map(str, default)) if isinstance(default, tuple) else repr(default)
            needed += f", such as {example}"
        raise ValueError(f"{name} must be of type {needed}") from None
    except OverflowError:
        sizes = f"0 or of a size from {SMALLEST:.2g} to {LARGEST:.2g}, as in float32"
        raise ValueError(f"{name} must be {sizes}") from None
    for each in typed if isinstance(typed, tuple) else [typed]:
        if needed := _violated(limits or {}, each):
            raise ValueError(f"{name} must be {needed}")
    return typed


def without_lists(value: Any) -> Any:
    """Returns `value` with tuples in place of lists, at any depth, as it was before JSON."""
    if isinstance(value, Mapping):
        return {name: without_lists(inner) for name, inner in value.items()}
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return tuple(map(without_lists, value)) if several else value


def takes_several(annotation: Any) -> bool:
    """Returns whether a tuple is one value for a field with this type."""
    return annotation is Any or any(map(_is_several, (annotation, *typing.get_args(annotation))))


def as_text(value: Any) -> str:
    """Returns a value as a flag's text: several with commas, a list over updates as 0:64;100:128."""
    several = isinstance(value, tuple) and len(value) > 1
    if several and isinstance(value[0], tuple):
        return ";".join(f"{update}:{as_text(each)}" for update, each in value)
    return ",".join(map(str, value)) if several else str(value)


def nearest(word: str, names: Iterable[str]) -> str:
    """Returns the word in `names` most similar to `word`, or "" if none is."""
    return next(iter(difflib.get_close_matches(word, list(names), n=1)), "")


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Returns "did you mean ...? " for the nearest word in `names`, or ""."""
    return f"did you mean {similar!r}? " if (similar := nearest(word, names)) else ""


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _as(value: Any, annotation: Any) -> Any:
    """Returns `value` as `annotation`. Raises TypeError, or OverflowError beyond float32."""
    kind: Any = typing.get_origin(annotation) or annotation
    arguments = typing.get_args(annotation)
    if kind in (typing.Union, types.UnionType):
        failure: Exception = TypeError()
        # A tuple last: any single value makes one.
        for option in sorted(arguments, key=_is_several):
            try:
                return _as(value, option)
            except OverflowError as error:
                failure = error
            except TypeError:
                pass
        raise failure
    if _is_several(annotation):
        values = value if isinstance(value, tuple) else (value,)
        if not arguments:
            return values
        repeated = kind is list or arguments[-1] is ...
        each = arguments[:1] * len(values) if repeated else arguments
        if len(each) != len(values):
            raise TypeError
        return tuple(map(_as, values, each))
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
    """A part in the config tree, which checks its values when it is made.

    Raises:
      ValueError: a value with another type or out of range.
    """

    types: ClassVar[dict[str, Any]]  # type of each key

    def __init_subclass__(cls) -> None:
        cls.types = typing.get_type_hints(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, self.read(field.name, self[field.name]))

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a key."""
        return getattr(self, name)

    @classmethod
    def read(cls, name: str, value: Any) -> Any:
        """Returns `value`, or a text's value, as the type that key `name` has. Raises ValueError."""
        # "model" of ModelConfig, "" of Config
        section = cls.__name__.removesuffix("Config").lower()
        field, annotation = cls.__dataclass_fields__[name], cls.types[name]
        if isinstance(value, str):
            value = parsed(value, annotation)
        named = f"{section}.{name}={value!r}".removeprefix(".")
        return checked(named, value, annotation, field.default, field.metadata)
