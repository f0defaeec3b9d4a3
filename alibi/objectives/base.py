"""The contract for an objective: which tokens a model reads, and which tokens it predicts.

An objective knows tokens and no model. It serves training and evaluation on the host.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32


class Sequences(NamedTuple):
    """Rows with consecutive tokens from a text.

    Attributes:
      tokens: in each row the token before it, then its own tokens. -1 is outside the text.
      first: where each row's first own token stands in the text, counted from 0.
    """

    tokens: Int32[np.ndarray, "rows length+1"]
    first: Int[np.ndarray, " rows"]


class Batch(NamedTuple):
    """The arguments for a model's `token_nll`, int32, as NumPy arrays on the host and JAX arrays on
    devices.

    Attributes:
      inputs: tokens that the model reads, `[rows, length]`.
      targets: tokens that it predicts at the last inputs, `[rows, scored]`. Negative ones are none.
      positions: the inputs' positions, `[rows, length]`. Defaults to 0, 1, ...
      segment_ids: the inputs' segments, `[rows, length]`. An input sees only its own segment. Defaults
        to a single one.
    """

    inputs: Any
    targets: Any
    positions: Any = None
    segment_ids: Any = None


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """A rule from a text's sequences to inputs and targets.

    Attributes:
      vocab_size: tokens in the text's vocabulary.
      boundary_id: the token that stands before the text.
    """

    vocab_size: int
    boundary_id: int

    @property
    @abc.abstractmethod
    def causal(self) -> bool:
        """Whether tokens are predicted from earlier tokens alone, not from both sides."""

    @abc.abstractmethod
    def batch(self, sequences: Sequences, seed: int = 0, step: int = 0) -> Batch:
        """Returns a model's batch, a pure function of the arguments.

        Args:
          seed, step: the run's seed and the update's number, for random objectives. Evaluation leaves
            them out, so that all runs predict the same tokens.
        """

    @property
    def selects(self) -> bool:
        """Whether only some tokens are predicted; the targets of the others are negative."""
        return False
