"""The contract of an objective: which tokens of a text a model reads, and which tokens it predicts.

An objective knows tokens alone, no model: it serves training and evaluation on the host.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32


class Sequences(NamedTuple):
    """Rows of consecutive tokens of a text.

    Attributes:
      tokens: of each row the token before it, then its own tokens; -1 outside of the text.
      first: the place in the text of each row's first own token, counted from 0.
    """

    tokens: Int32[np.ndarray, "rows length+1"]
    first: Int[np.ndarray, " rows"]


class Batch(NamedTuple):
    """The arguments of a model's `token_nll`, int32 rows: NumPy's on the host, JAX's on devices.

    Attributes:
      inputs: the tokens that the model reads, `[rows, length]`, as the last two.
      targets: the tokens that it predicts at the last inputs, `[rows, scored]`; negative: none.
      positions: of the inputs; None: 0, 1, ...
      segment_ids: of the inputs, which see only inputs of the same segment; None: they see all.
    """

    inputs: Any
    targets: Any
    positions: Any = None
    segment_ids: Any = None


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """A rule from sequences of a text to inputs and targets.

    Attributes:
      vocab_size: tokens of the text's vocabulary.
      boundary_id: the token that stands before the text.
    """

    vocab_size: int
    boundary_id: int

    @property
    @abc.abstractmethod
    def causal(self) -> bool:
        """Whether a token is predicted from the tokens before it alone, not from both sides."""

    @abc.abstractmethod
    def batch(self, sequences: Sequences, seed: int = 0, step: int = 0) -> Batch:
        """Returns a model's batch, a pure function of the arguments.

        Args:
          seed, step: of a random objective: the run's seed and the number of the update. Evaluation
            leaves them out, so that all runs predict the same tokens.
        """

    @property
    def selects(self) -> bool:
        """Whether only some tokens are predicted; the targets of the others are negative."""
        return False
