"""Changes of a run's config under which the trained model is tested."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from alibi.config.fields import as_text, without_lists

MODEL_KEYS = ("window", "logit_scale", "max_position", "test_draws")


@dataclasses.dataclass(frozen=True)
class Override:
    """Values that replace those a run was trained with. None keeps the run's own.

    Attributes:
      position: a position method's name, or a list as in a config.
      options: options for `position`, or for the run's own method without one.
      window, logit_scale, max_position, test_draws: keys of `config.model`.
    """

    position: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    window: int | tuple[int, ...] | None = None
    logit_scale: str | tuple[str, ...] | None = None
    max_position: int | None = None
    test_draws: int | None = None

    @property
    def model(self) -> dict[str, Any]:
        """The replaced keys of `config.model`."""
        return {key: value for key in MODEL_KEYS if (value := getattr(self, key)) is not None}

    def __str__(self) -> str:
        """Returns, for example, "as rotary_ntk(factor=4) with window 256", also for 4.0."""
        options = ", ".join(f"{name}={_short(value)}" for name, value in sorted(self.options))
        method = (
            f"as {self.position}" + (f"({options})" if options else "") if self.position else ""
        )
        model = ", ".join(
            f"{key.replace('_', ' ')} {as_text(value or 'off')}"
            for key, value in self.model.items()
        )
        return " ".join(filter(None, [method, model and f"with {model}"]))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Override":
        """Returns the override of a row."""
        content = without_lists(content)
        model = {key: content.get(key) for key in MODEL_KEYS}
        return cls(content["position"], tuple(content["options"].items()), **model)

    def to_json(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "options": dict(self.options),
            "window": self.window,
        } | self.model


def _short(value: Any) -> str:
    """Returns a number's shortest text, the same for 4 and 4.0, and a tuple as 0.5:0.25."""
    if isinstance(value, tuple):
        return ":".join(map(_short, value))
    return (
        f"{value:.12g}"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else str(value)
    )
