"""Train short, test long: ALiBi and the position methods that it is compared with, in JAX and Flax."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alibi import linen, nnx
    from alibi.attention import alibi_attention_fn, attend, attention_fn, position_params
    from alibi.model.decoder import DecoderLM
    from alibi.positions import METHODS, alibi_bias, make_position
    from alibi.runs.trained import from_run
    from alibi.slopes import alibi_slopes

    __version__: str

__all__ = [
    "METHODS",
    "DecoderLM",
    "alibi_attention_fn",
    "alibi_bias",
    "alibi_slopes",
    "attend",
    "attention_fn",
    "from_run",
    "linen",
    "make_position",
    "nnx",
    "position_params",
]

_MODULES = {
    "METHODS": "positions",
    "DecoderLM": "model.decoder",
    "alibi_attention_fn": "attention",
    "alibi_bias": "positions",
    "alibi_slopes": "slopes",
    "attend": "attention",
    "attention_fn": "attention",
    "from_run": "runs.trained",
    "make_position": "positions",
    "position_params": "attention",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at first use: JAX and Flax take seconds, and a notebook that shows results
    needs neither.
    """
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("alibi.numerics")  # which checks the version of JAX
    module = importlib.import_module(f"alibi.{_MODULES.get(name, name)}")
    globals()[name] = public = getattr(module, name) if name in _MODULES else module
    return public


def _version() -> str:
    """Returns the installed package's version, or "0+clone" in a clone that is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version("alibi-jax")
    except importlib.metadata.PackageNotFoundError:
        return "0+clone"


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
