"""Objectives of training and evaluation: a block of tokens -> inputs and targets; no JAX in here."""

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
    """Returns the objective of a config for texts of this vocabulary and boundary."""
    text, given = (vocab_size, boundary_id), config.objective
    objective: Objective = NextToken(*text)
    if given.name == "masked":
        objective = Masked(*text, given.mask_rate, given.mask_random, given.mask_kept)
    elif given.name == "answers":
        objective = Answers(*text)
    if positions := config.data.isolate_documents:
        return IsolatedDocuments(*text, objective, restart=positions == "restart")
    return objective
