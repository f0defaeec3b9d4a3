"""The base for every experiment: `alibi.config.base`, which config files outside this clone import too.
alibi/config/tree.py has every key with its default, range, unit and meaning.
"""

from alibi.config.base import apply, get_config, set_key, whole_sequences

__all__ = ["apply", "get_config", "set_key", "whole_sequences"]
