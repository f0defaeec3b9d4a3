"""The base of config files: a file sets other values of `base.get_config()`, and ends with `return
base.apply(config, arg)`, so that `--config=FILE.py:position=alibi,length=512` works for all.

alibi/config/tree.py has every key, with its default, range, unit and meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from alibi.config.files import apply, as_config_dict, set_key, whole_sequences
from alibi.config.tree import Config

if TYPE_CHECKING:
    import ml_collections

__all__ = ["apply", "get_config", "set_key", "whole_sequences"]


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Returns a small decoder on the embedded books, with every key."""
    return apply(as_config_dict(Config()), arg)
