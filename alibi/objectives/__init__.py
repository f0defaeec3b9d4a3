"""Objectives for training and evaluation: from tokens to inputs and targets. No JAX in here."""

from alibi.config import Config
from alibi.objectives.answers import Answers
from alibi.objectives.base import Batch, Objective, Sequences
from alibi.objectives.documents import IsolatedDocuments
from alibi.objectives.masked import Masked
from alibi.objectives.next_token import NextToken

__all__ = [
    "Answers",
    "Batch",
    "IsolatedDocuments",
    "Masked",
    "NextToken",
    "Objective",
    "Sequences",
    "make_objective",
]


def make_objective(config: Config, *, vocab_size: int, boundary_id: int) -> Objective:
    """Returns a config's objective, for texts with this vocabulary and boundary."""
    text, options = (vocab_size, boundary_id), config.objective
    objective: Objective = NextToken(*text)
    if options.name == "masked":
        if options.mask_id >= vocab_size:
            raise ValueError(
                f"objective.mask_id={options.mask_id} is no token of the vocabulary's {vocab_size:,}; use the id of "
                "its mask token, or -1 for a new one"
            )
        rates = options.mask_rate, options.mask_random, options.mask_kept
        objective = Masked(*text, *rates, options.mask_id)
    elif options.name == "answers":
        objective = Answers(*text)
    if positions := config.data.isolate_documents:
        return IsolatedDocuments(*text, objective, restart=positions == "restart")
    return objective
