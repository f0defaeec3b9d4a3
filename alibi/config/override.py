"""Changes of a run's config under which the trained model is tested."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Override:
    """Values that replace those a run was trained with; None keeps the run's own.

    Attributes:
      position: name of a position method.
      options: options of `position`; without a `position`, options of the run's own method.
      window: number of tokens that each layer's attention reaches back; 0: all.
    """

    position: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    window: int | None = None

    def __str__(self) -> str:
        """Returns for example "as rotary_ntk(factor=4) with window 256"; the same for 4 and 4.0."""
        options = ", ".join(f"{name}={_short(value)}" for name, value in sorted(self.options))
        method = f"as {self.position}" + (f"({options})" if options else "") if self.position else ""
        return " ".join(filter(None, [method, "" if self.window is None else f"with window {self.window}"]))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Override":
        options = tuple((name, _without_lists(value)) for name, value in content["options"].items())
        return cls(content["position"], options, content["window"])

    def to_json(self) -> dict[str, Any]:
        return {"position": self.position, "options": dict(self.options), "window": self.window}


def _without_lists(value: Any) -> Any:
    """Returns the value with tuples in place of JSON's lists, at any depth."""
    return tuple(map(_without_lists, value)) if isinstance(value, list) else value


def _short(value: Any) -> str:
    """Returns the shortest text of a number, so that 4 and 4.0 are equal; a tuple as on a command line, 0.5:0.25."""
    if isinstance(value, tuple):
        return ":".join(map(_short, value))
    return f"{value:.12g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
