"""Objectives of training and evaluation: a block of tokens -> inputs and targets; no JAX in here."""

from alibi.config import ObjectiveConfig
from alibi.objectives.base import Batch, Objective, Sequences
from alibi.objectives.masked import Masked
from alibi.objectives.next_token import NextToken

__all__ = ["Batch", "Masked", "NextToken", "Objective", "Sequences", "make_objective"]


def make_objective(config: ObjectiveConfig, *, vocab_size: int, boundary_id: int) -> Objective:
    """Returns the objective of a config for texts of this vocabulary and boundary."""
    if config.name == "masked":
        shares = config.mask_rate, config.mask_random, config.mask_kept
        return Masked(vocab_size, boundary_id, *shares)
    return NextToken(vocab_size, boundary_id)
