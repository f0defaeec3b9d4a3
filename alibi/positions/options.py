"""Options of position methods, read as what the fields of their classes are annotated with."""

import contextlib
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LEAST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # what is smaller may count as 0


def annotations(method: type) -> Mapping[str, Any]:
    """What each field of a class may be; the type of its default where the annotation can't be evaluated."""
    fields = dataclasses.fields(method)
    with contextlib.suppress(Exception):  # one that is a string may name what isn't there, and raise anything
        hints = typing.get_type_hints(method)
        return {field.name: hints[field.name] for field in fields}
    unknown = (None, dataclasses.MISSING)
    return {field.name: Any if field.default in unknown else type(field.default) for field in fields}


def read_option(method: str, option: str, value: Any, annotation: Any, default: Any) -> Any:
    """An option's value as its field holds it, so that the method stays hashable.

    Lists become tuples, and one number where several are taken a tuple of it; whole numbers become floats where those
    are taken. None is also taken where it is the default.

    Raises:
      ValueError: a value of another type, or a number that is not finite in float32, or not normal.
    """
    value = without_lists(value)
    if value is None and default is None:
        return None
    given = f"option {option}={value!r} of position method {method!r}"
    try:
        return _read(value, annotation)
    except TypeError:
        such = "" if default is None or default is dataclasses.MISSING else f", such as {default!r}"
        raise ValueError(f"{given} must be of type {_told(annotation)}{such}") from None
    except OverflowError:
        raise ValueError(f"{given} must be 0 or of a size from {LEAST:.2g} to {LARGEST:.2g}, as in float32") from None


def without_lists(value: Any) -> Any:
    """The value with tuples in place of its lists, also within a dict, so that it is equal to one that had tuples."""
    if isinstance(value, Mapping):
        return {name: without_lists(one) for name, one in value.items()}
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return tuple(map(without_lists, value)) if several else value


def _read(value: Any, annotation: Any) -> Any:
    """`value` as one of what is annotated; TypeError where it is none, OverflowError where float32 can't hold it."""
    kind, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if kind in (typing.Union, types.UnionType):
        return _read_one_of(value, arguments)
    if _is_several(annotation):  # a list too as a tuple, as the method must be hashable
        each = (*arguments, ...) if kind is list and arguments else arguments
        return _read_all(value if isinstance(value, tuple) else (value,), each)
    if kind is float and type(value) is not bool and isinstance(value, int | float):
        if value and not LEAST <= abs(value) <= LARGEST:
            raise OverflowError
        return float(value)
    if kind is Any or not isinstance(kind, type):
        return value
    # A bool is an int to Python.
    if not (type(value) is kind if kind in (bool, int) else isinstance(value, kind)):
        raise TypeError
    return value


def _is_several(annotation: Any) -> bool:
    return (typing.get_origin(annotation) or annotation) in (tuple, list)


def _read_one_of(value: Any, annotations: tuple[Any, ...]) -> Any:
    # Of a tuple last, which anything can be made by itself.
    failure: Exception = TypeError()
    for annotation in sorted(annotations, key=_is_several):
        try:
            return _read(value, annotation)
        except OverflowError as error:
            failure = error
        except TypeError:
            pass
    raise failure


def _read_all(values: tuple[Any, ...], annotations: tuple[Any, ...]) -> tuple[Any, ...]:
    if not annotations:
        return values
    each = annotations[:1] * len(values) if annotations[-1] is ... else annotations
    if len(each) != len(values):
        raise TypeError
    return tuple(map(_read, values, each))


def _told(annotation: Any) -> str:
    plain = isinstance(annotation, type) and not typing.get_args(annotation)
    return annotation.__name__ if plain else str(annotation).replace("typing.", "")
