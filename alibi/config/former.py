"""Values that meant something else in configs and rows saved by earlier versions."""

from typing import Any

VERSION = 2  # of saved configs and overrides; without a version: 1

# Options whose default was a number in version 1, and follows the training length now.
DEFAULTS: dict[str, dict[str, Any]] = {
    "t5": {"max_distance": 128},
    "fire": {"threshold": 512},
    "xpos": {"scale_base": 512.0},
    "yarn": {"fast": 32.0},
}
BY_LENGTH = 0  # their default now

# Present names of `model.logit_scale`, with their names in version 1.
SCALES = {"log_n_beyond": "log_n", "ssmax_queries": "ssmax"}


def present_scale(value: Any) -> Any:
    """Returns the present name of a scale saved by version 1, or the names of a list."""
    if isinstance(value, list | tuple):
        return type(value)(map(present_scale, value))
    return {former: name for name, former in SCALES.items()}.get(value, value)


def hashed_scale(value: Any) -> Any:
    """Returns the name of a scale in hashes: version 1's, and for names that mean something else
    now those that it didn't know.
    """
    if isinstance(value, list | tuple):
        return type(value)(map(hashed_scale, value))
    return SCALES.get(value, present_scale(value))
