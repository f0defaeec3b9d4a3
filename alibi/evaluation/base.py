"""The contract of evaluators: an evaluator measures the cells of a run, and a report shows them.

An evaluator is a frozen dataclass. Its fields are its options, from which flags, keys of sweeps and
keys of rows follow. It fills in `cells`, `measure` and `kinds`, and more where it differs from the
defaults here and in `alibi.reporting.measure.Measure`. It is a file and a line in
`alibi.reporting.measure.EVALUATORS`, or a class anywhere, named as package.module:Class.

JAX takes seconds to import, and reports and sweeps don't need it: import it inside `measure`.
"""

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from alibi.config import Config
from alibi.config.fields import annotations, checked, parsed
from alibi.objectives import make_objective
from alibi.reporting.intervals import part_sums, six_digits
from alibi.reporting.measure import EVALUATORS, REGISTRY, Measure
from alibi.reporting.rows import Row
from alibi.storage.files import digest

if TYPE_CHECKING:
    from alibi.evaluation.subject import Subject, Text
else:
    Subject = Text = Any  # JAX would be imported with them

Cell = Mapping[str, Any]


class NoResultError(ValueError):
    """A cell has no result, for a reason that the row tells."""


def option(default: Any, meaning: str, *, of_row: bool = True, **limits: Any) -> Any:
    """Returns a field for an option.

    Args:
      meaning: the help of its flag.
      of_row: False if rows don't record the option: it changes no result, or other fields tell it.
      limits: at_least, above, at_most or below, with or_all, or names.

    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class Retrieval(Evaluator):
      ...     prompts: int = option(200, "prompts in each cell", at_least=1)
    """
    metadata: dict[str, Any] = {
        key: limits.pop(key) for key in ("or_all", "names") if key in limits
    }
    metadata |= {"reasons": {}, "bounds": limits, "meaning": meaning, "of_row": of_row}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Evaluator(Measure, abc.ABC):
    """A measurement with its options.

    Raises:
      ValueError: an option has another type or is out of its range.
    """

    @property
    def isolates(self) -> bool:
        """Whether each document is read alone, whatever the run's training."""
        return False

    @property
    def row_split(self) -> str:
        """The split of the text, as rows name it."""
        return "valid"

    def __post_init__(self) -> None:
        types = annotations(type(self))
        for field in dataclasses.fields(self):
            if hasattr(Evaluator, field.name):
                raise ValueError(
                    f"{type(self).__name__} has an option {field.name!r}, but evaluators have a part with this name; "
                    "rename the option"
                )
            kind, value = types[field.name], getattr(self, field.name)
            value = parsed(value, kind) if isinstance(value, str) else value
            value = checked(f"{field.name}={value!r}", value, kind, field.default, field.metadata)
            object.__setattr__(self, field.name, value)

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults and change results, as rows hold them."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if field.metadata.get("of_row", True)
            and (value := getattr(self, field.name)) != field.default
        }

    @classmethod
    def code(cls) -> str | None:
        """Returns a hash of an outside evaluator's files, for its rows."""
        from alibi.runs.code import code_files  # a report may lack the packages of training

        files = code_files(cls.__module__)
        return digest(files)[:12] if files else None

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        """Raises ValueError if no run of this config can be measured at `lengths`: called before
        training, too.
        """

    def cells(self, config: Config, lengths: Sequence[int]) -> list[Cell]:
        """Returns the cells of a run.

        Args:
          lengths: evaluation lengths in tokens, ascending.
        """
        return [{"length": length} for length in lengths]

    def note(self, config: Config) -> str:
        """Returns a warning about runs with this config, or ""."""
        return ""

    def text(self, subject: Subject, cell: Cell) -> Text:
        """Returns the text to score.

        Raises:
          ValueError: it can't be read.
        """
        return subject.text(self.row_split)

    def undefined(self, subject: Subject, cell: Cell) -> str:
        """Returns why the position method has no such cell, or ""."""
        return subject.run.undefined(cell["length"])

    def limit(self, subject: Subject, text: Text, cell: Cell) -> str:
        """Returns why the text has no such cell, or ""."""
        return text.too_short(cell["length"])

    def title(self, cell: Cell) -> str:
        """Returns the cell in words, after the run's name."""
        return f"at {cell['length']:,}"

    def is_done(self, subject: Subject, row: Row) -> bool:
        """Returns whether the files that `measure` writes beside the row exist."""
        return True

    @abc.abstractmethod
    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        """Returns the named results for a row's cell: numbers, or tuples of numbers.

        Raises:
          NoResultError: there is no number. The row will have the reason.
        """

    def summary(self, row: Row) -> str:
        """Returns the least and the greatest result in words, for a line on the terminal."""
        kind = self.kinds_of(row)[0]
        values = [kind.value(entry) for entry in self.entries(row) if kind.value]
        numbers = {value for value in values if value is not None}
        ends = dict.fromkeys((min(numbers), max(numbers)) if numbers else ())
        return f"{kind.title.lower()} {' to '.join(map(kind.write, ends)) or kind.missing}"


def mean_results(name: str, values: Float[np.ndarray, " items"]) -> dict[str, Any]:
    """Returns the results of a mean over a text: the mean as `name`, the number of values, and their
    sums over each part.

    Raises:
      NoResultError: a value is not finite.
    """
    if not np.isfinite(values).all():
        raise NoResultError("a value is not finite; the model overflows at this length")
    parts = six_digits(part_sums(values))
    return {name: float(values.mean(dtype=np.float64)), "tokens": values.size, "parts": parts}


def refuse_other_objectives(evaluator: str, config: Config, *, whole: bool = False) -> None:
    """Raises ValueError for a run that isn't scored as plain text, or with `whole` not in whole windows."""
    if not make_objective(config).scored_as_text:
        raise ValueError(
            f"objective={config.objective.name} with {evaluator}, which scores plain text from left to right, as "
            "objective=next_token does; leave it out"
        )
    if whole and config.data.isolate_documents:
        raise ValueError(
            f"documents are isolated, and {evaluator} is for models that see whole windows; leave it out"
        )


def options_by_name(names: Iterable[str]) -> dict[str, dataclasses.Field]:
    """Returns each option of the evaluators `names`."""
    return {
        field.name: field for name in names for field in dataclasses.fields(REGISTRY.load(name))
    }


def help_of(field: dataclasses.Field) -> str:
    """Returns what an option means, with its default, as flags and pages have it."""
    default = "" if field.default in (None, "", False) else f"; defaults to {field.default}"
    return field.metadata["meaning"] + default


def make_evaluators(names: Sequence[str], options: Mapping[str, Any]) -> list[Evaluator]:
    """Returns the evaluators `names`, each with the `options` that it has.

    Raises:
      ValueError: no name, a name or a value that is refused, or an option that none of them has.
    """
    if not names:
        raise ValueError(f"'evaluators' names nothing; give some of {', '.join(EVALUATORS)}")
    for key in options.keys() - options_by_name(names).keys():
        owners = [name for name in EVALUATORS if key in options_by_name([name])]
        raise ValueError(
            f"{key}={options[key]} is an option of {' or '.join(owners) or 'no evaluator here'}, not of "
            f"{', '.join(names)}; name its evaluator too, or leave {key} out"
        )
    return [
        REGISTRY.make(
            name, {key: options[key] for key in options_by_name([name]) if key in options}
        )
        for name in names
    ]
