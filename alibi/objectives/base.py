"""The contract for an objective: which tokens a model reads, and which tokens it predicts.

An objective is a frozen dataclass. Its fields are its options. It knows tokens and no model, and serves
training and evaluation on the host. All that others know of an objective, they ask it. It is a file and
a line in `OBJECTIVES`, or a class anywhere, named as package.module:Class.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32, UInt64

from alibi.config import Config
from alibi.config.classes import Registry

# The class of each objective. A field without a default has the value of the key with its name in the
# config section `objective`.
OBJECTIVES = {
    "next_token": "alibi.objectives.next_token:NextToken",
    "masked": "alibi.objectives.masked:Masked",
    "answers": "alibi.objectives.answers:Answers",
    "after_separator": "alibi.objectives.after_separator:AfterSeparator",
    "fill_in_the_middle": "alibi.objectives.fill_in_the_middle:FillInTheMiddle",
    "prefix_lm": "alibi.objectives.prefix_lm:PrefixLM",
}
OTHER_NAMES = {"fim": "fill_in_the_middle", "mlm": "masked", "clm": "next_token"}
REGISTRY = Registry(
    "objective.name",
    "objective",
    OBJECTIVES,
    "alibi.objectives:Objective",
    "alibi.objectives",
    OTHER_NAMES,
)


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
      reach: the last position that each input sees, `[rows, length]`, for an objective that is causal
        and sees both sides. Defaults to the input's own position.
    """

    inputs: Any
    targets: Any
    positions: Any = None
    segment_ids: Any = None
    reach: Any = None


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """A rule from a text's sequences to inputs and targets. A subclass's fields are its options.

    Attributes:
      vocab_size: tokens in the text's vocabulary.
      boundary_id: the token that stands before the text.

    Example:
      >>> import dataclasses
      >>> from alibi.objectives import NextToken
      >>> @dataclasses.dataclass(frozen=True)
      ... class EachSecond(NextToken):
      ...     selects = True
      ...     def batch(self, sequences, seed=0, step=0, *, training=False):
      ...         batch = super().batch(sequences, seed, step)
      ...         targets = batch.targets.copy()
      ...         targets[:, ::2] = -1
      ...         return batch._replace(targets=targets)
    """

    vocab_size: int
    boundary_id: int

    @property
    @abc.abstractmethod
    def causal(self) -> bool:
        """Whether an input sees no later inputs beyond its `reach`. Only such a model can write text, and be
        scored in windows that overlap.
        """

    @property
    def both_sides(self) -> bool:
        """Whether inputs see later ones too, for which position methods must be defined."""
        return not self.causal

    @property
    def added_tokens(self) -> int:
        """The tokens of a model's vocabulary after the text's, which no text has and no model writes."""
        return 0

    @property
    def selects(self) -> bool:
        """Whether evaluation predicts only some tokens. The targets of the others are negative."""
        return False

    @property
    def scored_as_text(self) -> bool:
        """Whether evaluation predicts each token of plain text from those before it, so that its numbers
        compare with those of next_token.
        """
        return False

    @property
    def recorded(self) -> dict[str, Any] | None:
        """The name and options as rows hold them, or None if runs are scored as plain text."""
        if self.scored_as_text:
            return None
        kind = type(self)
        options = {name: getattr(self, name) for name in REGISTRY.fields(kind)}
        return {"name": REGISTRY.name_of(kind)} | options

    def check(self, config: Config) -> None:  # noqa: B027, most serve any
        """Raises ValueError for a config that the objective can't serve."""

    @abc.abstractmethod
    def batch(
        self, sequences: Sequences, seed: int = 0, step: int = 0, *, training: bool = False
    ) -> Batch:
        """Returns a model's batch, a pure function of the arguments. It has a target for each input.

        Args:
          seed, step: the run's seed and the update's number, for random objectives. Evaluation leaves
            them out, so that all runs predict the same tokens.
          training: the batch is for an update. Evaluation needs another one if `scored_as_text`.
        """


def random_lots(first: int, count: int, seed: int, step: int) -> UInt64[np.ndarray, "count four"]:
    """Returns four random numbers for each of `count` tokens from the place `first` on.

    They are a block from the counter-based generator Philox (Salmon et al. 2011), with the place as its
    counter.
    """
    generator = np.random.Philox(key=[seed, step], counter=int(first))
    return generator.random_raw(4 * count).reshape(count, 4)


def uniform(lots: UInt64[np.ndarray, "*shape"]) -> np.ndarray:
    """Returns numbers from 0 to below 1, float64."""
    return (lots >> np.uint64(11)) * 2.0**-53
