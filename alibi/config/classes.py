"""Classes and their names: a name in a registry or of an installed package, or package.module:Class."""

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

from alibi.config.fields import (
    Section,
    annotations,
    checked,
    did_you_mean,
    parsed,
    without_lists,
)


@dataclasses.dataclass(frozen=True)
class Registry:
    """The classes that a config key can name.

    A class's options are the fields that its base class lacks. An option without a default has the
    value of the config key with its name.

    Attributes:
      key: the config key, such as "position".
      kind: the things that it names, such as "position method".
      names: the address of each class of the library, package.module:Class.
      base: their base class's address.
      group: the entry points in which installed packages name theirs, or "" for none.
      other_names: names in papers and other libraries, for suggestions.

    Example:
      >>> objectives = Registry("objective.name", "objective", {}, "alibi.objectives:Objective")
      >>> objectives.load("alibi.objectives:NextToken").__name__
      'NextToken'
    """

    key: str
    kind: str
    names: Mapping[str, str]
    base: str
    group: str = ""
    other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def address(self, name: str) -> str:
        """Returns package.module:Class for a name, without loading the class. Raises ValueError for an
        unknown name, with the nearest.
        """
        if name in self.names and (other := installed(self.group).get(name)):
            kind = self.kind.split()[-1]
            warnings.warn(
                f"{self.key}={name} is this library's {kind}. An installed package gives the same name to {other}; "
                f"write {self.key}={other} for that {kind}",
                stacklevel=2,
            )
        addresses = {**installed(self.group), **self.names}
        if ":" in name or name in addresses:
            return addresses.get(name, name)
        word = name.lower().replace("-", "_")
        meant = did_you_mean(self.other_names.get(word, word), addresses)
        raise ValueError(
            f"unknown {self.kind} {name!r}; {meant}there are: {', '.join(addresses)}; your own is named "
            "package.module:Class"
        )

    def load(self, name: Any) -> Any:
        """Returns a class from its name, its address, or itself.

        Raises:
          ValueError: as `address`, or a class that can't be imported, is of another kind, or has options
            that are no fields.
        """
        loaded, named = name, f"{self.key}={getattr(name, '__name__', name)}"
        if isinstance(name, str):
            loaded = load_class(named, self.address(name))
        base = load_class(self.key, self.base)
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            raise ValueError(
                f"{named} is no subclass of {self.base.replace(':', '.')}, but {loaded!r}"
            )
        fields = getattr(loaded, "__dataclass_fields__", {})
        annotated = {
            name
            for name, annotation in inspect.get_annotations(loaded).items()
            if "ClassVar" not in str(annotation)
        }
        if lost := sorted(annotated - fields.keys()):
            raise ValueError(
                f"{named} has {', '.join(lost)}, which are no options of it; put @dataclasses.dataclass above the "
                f"class, as its base has it ({place_of(loaded)})"
            )
        return loaded

    def name_of(self, kind: type) -> str:
        """Returns the name of a class in the library, or its address."""
        address = f"{kind.__module__}:{kind.__qualname__}"
        return next((name for name, listed in self.names.items() if listed == address), address)

    def fields(self, kind: Any) -> dict[str, dataclasses.Field]:
        """Returns each option of a class."""
        inherited = getattr(load_class(self.key, self.base), "__dataclass_fields__", {})
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        return {field.name: field for field in fields if field.init and field.name not in inherited}

    def options(
        self, name: Any, values: Mapping[str, Any] | None, section: Section | None = None
    ) -> dict[str, Any]:
        """Returns the options of a class with their types, to make it.

        Args:
          values: the value of each option, or a flag's text for it.
          section: has the values of options without a default.

        Raises:
          ValueError: an unknown option (the nearest is suggested), a refused value, or none for an option
            without a default.
        """
        kind = self.load(name)
        name = name if isinstance(name, str) else kind.__name__
        if not isinstance(values or {}, Mapping):
            raise ValueError(
                f"options={values!r:.60} of {self.kind} {name!r} must be a mapping of names to values"
            )
        fields, types, options = self.fields(kind), annotations(kind), dict[str, Any]()
        keys = getattr(section, "types", {})
        if hiding := [
            option for option, field in fields.items() if option in keys and _has_default(field)
        ]:
            raise ValueError(
                f"{self.kind} {name!r} has a default for {hiding[0]!r}, which is a key of its section and would be "
                f"ignored; leave the default out to take the key ({place_of(kind)})"
            )
        for option, value in (values or {}).items():
            if option not in fields:
                there = f"there are: {', '.join(fields)}" if fields else "it has none"
                meant = did_you_mean(option, fields) if fields else ""
                raise ValueError(f"{self.kind} {name!r} has no option {option!r}; {meant}{there}")
            if option in keys:
                raise ValueError(
                    f"option {option!r} of {self.kind} {name!r} is a key of its section; set the key"
                )
            value = parsed(value, types[option]) if isinstance(value, str) else value
            label = f"option {option}={without_lists(value)!r} of {self.kind} {name!r}"
            field = fields[option]
            options[option] = checked(label, value, types[option], field.default, field.metadata)
        for option, field in fields.items():
            if option not in options and not _has_default(field):
                if option not in keys:
                    raise ValueError(
                        f"{self.kind} {name!r} needs its option {option!r}, which has no default; give one "
                        f"({place_of(kind)})"
                    )
                options[option] = getattr(section, option)
        return options

    def make(
        self,
        name: Any,
        values: Mapping[str, Any] | None = None,
        section: Section | None = None,
        **base_fields: Any,
    ) -> Any:
        """Returns an instance, with `base_fields` for its base class. Raises ValueError as `options`, or with
        class and file if the class can't be made.
        """
        kind = self.load(name)
        options = self.options(name, values, section)
        try:
            return kind(**base_fields, **options)
        except (TypeError, AttributeError, LookupError) as error:
            if kind.__module__.startswith("alibi."):
                raise
            named = name if isinstance(name, str) else kind.__name__
            raise ValueError(
                f"{self.kind} {named!r} can't be made ({place_of(kind)}): {type(error).__name__}: {error}"
            ) from error


def _has_default(field: dataclasses.Field) -> bool:
    return not field.default is field.default_factory is dataclasses.MISSING


@functools.cache
def installed(group: str) -> dict[str, str]:
    """Returns the addresses that installed packages name in the entry points `group`. A name of the
    library stays the library's.
    """
    return {point.name: point.value for point in importlib.metadata.entry_points(group=group)}


def place_of(kind: type) -> str:
    """Returns a class's name, file and line."""
    try:
        return (
            f"{kind.__qualname__}, {inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
        )
    except (OSError, TypeError):  # typed into an interpreter
        return kind.__qualname__


def load_class(key: str, address: str) -> Any:
    """Returns the class at `address`, package.module:Class.

    Args:
      key: names it in an error, such as "position=mine:Bias".

    Raises:
      ValueError: there is no such module or attribute, or the module fails or ends the process.
    """
    module, _, attribute = address.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{key}: {error}; write package.module:Class of a module that Python finds from here "
            "(PYTHONPATH names further directories)"
        ) from error
    except (Exception, SystemExit) as error:  # what the module's own lines raise
        *_, last = traceback.extract_tb(error.__traceback__)
        at = "" if isinstance(error, SyntaxError) else f" ({last.filename}:{last.lineno})"
        raise ValueError(
            f"{key}: the import of {module} fails{at}: {type(error).__name__}: {error}; mend the module, "
            "or name another one"
        ) from error
