"""Attention with a position bias: the entry `attend`, its closures for Flax, and the backends."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alibi.attention.call import AttentionOptions
    from alibi.attention.dispatch import attend
    from alibi.attention.flax import alibi_attention_fn, method_attention_fn
    from alibi.attention.named import attention_fn, position_params
    from alibi.attention.reference import reference_attention

__all__ = [
    "AttentionOptions",
    "alibi_attention_fn",
    "attend",
    "attention_fn",
    "method_attention_fn",
    "position_params",
    "reference_attention",
]
_MODULES = {
    "AttentionOptions": "call",
    "alibi_attention_fn": "flax",
    "attend": "dispatch",
    "attention_fn": "named",
    "method_attention_fn": "flax",
    "position_params": "named",
    "reference_attention": "reference",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use: backends in `alibi.cpu` import modules of this folder
    while the table of backends imports them.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"alibi.attention.{_MODULES[name]}"), name)
