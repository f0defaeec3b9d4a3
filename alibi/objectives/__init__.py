"""Objectives for training and evaluation: from tokens to inputs and targets. No JAX in here."""

from alibi.config import Config
from alibi.config.classes import place_of
from alibi.objectives.base import (
    OBJECTIVES,
    REGISTRY,
    Batch,
    Objective,
    Sequences,
)
from alibi.objectives.checks import check_batch
from alibi.objectives.documents import IsolatedDocuments
from alibi.objectives.masked import Masked
from alibi.objectives.next_token import NextToken

__all__ = [
    "OBJECTIVES",
    "REGISTRY",
    "Batch",
    "IsolatedDocuments",
    "Masked",
    "NextToken",
    "Objective",
    "Sequences",
    "make_objective",
]

UNKNOWN = 2**20  # tokens of a vocabulary that is not known: more than any has


def make_objective(config: Config, *, vocab_size: int = UNKNOWN, boundary_id: int = 0) -> Objective:
    """Returns a config's objective, for texts with this vocabulary and boundary. Without these it can be
    asked what it is, but makes no batch of a text.

    Raises:
      ValueError: an unknown objective or option, or a config or class that is refused.
    """
    text = {"vocab_size": vocab_size, "boundary_id": boundary_id}
    name, section = config.objective.name, config.objective
    objective: Objective = REGISTRY.make(name, section.options, section, **text)
    objective.check(config)
    if not (objective.causal or objective.both_sides):
        raise ValueError(
            f"objective {name!r} ({place_of(type(objective))}) has causal=False and both_sides=False; "
            "set one of them to True"
        )
    # tests hold this library's to it
    if vocab_size != UNKNOWN and not type(objective).__module__.startswith("alibi."):
        check_batch(name, objective)
    if positions := config.data.isolate_documents:
        return IsolatedDocuments(**text, objective=objective, restart=positions == "restart")
    return objective
