"""The base of every experiment: a config file sets other values, and ends with `return
base.apply(config, arg)`, so that `--config=configs/NAME.py:position=alibi,length=512` works for
all.

alibi/config/tree.py has every key, with its default, range, unit and meaning.
"""

import ml_collections

from alibi.config import Config, apply, as_config_dict, set_key, whole_sequences

__all__ = ["apply", "get_config", "set_key", "whole_sequences"]


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Returns a small decoder on the embedded books, with every key."""
    return apply(as_config_dict(Config()), arg)
