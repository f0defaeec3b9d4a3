"""Position methods: the contract, biases and the registry."""

from alibi.positions.alibi import AlibiBias, alibi_bias
from alibi.positions.base import Params, PositionMethod
from alibi.positions.bias import Bias, Blocks, Part, per_head, per_key, per_query, shared, static
from alibi.positions.distance import DistanceBias
from alibi.positions.registry import (
    METHODS,
    changed_options,
    known_options,
    make_position,
    method_class,
    method_names,
)

__all__ = [
    "METHODS",
    "AlibiBias",
    "Bias",
    "Blocks",
    "DistanceBias",
    "Params",
    "Part",
    "PositionMethod",
    "alibi_bias",
    "changed_options",
    "known_options",
    "make_position",
    "method_class",
    "method_names",
    "per_head",
    "per_key",
    "per_query",
    "shared",
    "static",
]
