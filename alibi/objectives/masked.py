"""Masked tokens predicted from both sides (BERT; Devlin et al. 2019, arXiv 1810.04805, section 3.1)."""

import dataclasses
from typing import Any

import numpy as np

from alibi.objectives.base import Batch, Objective, Sequences, random_lots, uniform


@dataclasses.dataclass(frozen=True)
class Masked(Objective):
    """Some tokens are predicted, and most of these are replaced in the inputs.

    Each token has four random numbers, a pure function of seed, step and its place in the text. So the
    same tokens are masked in windows of every length and on any number of hosts.

    Attributes:
      mask_rate: share of tokens that are predicted.
      mask_random: share among them replaced by a token drawn uniformly from the text's vocabulary.
      mask_kept: share among them left as they are. All others become the mask token.
      mask_id: the mask token's id. -1 is the id after the text's vocabulary, which is never predicted.
    """

    causal = False
    selects = True

    mask_rate: float
    mask_random: float
    mask_kept: float
    mask_id: int

    def __post_init__(self) -> None:
        if self.mask_id >= self.vocab_size:
            raise ValueError(
                f"objective.mask_id={self.mask_id} is no token of the vocabulary's {self.vocab_size:,}; use the id of "
                "its mask token, or -1 for a new one"
            )

    @property
    def added_tokens(self) -> int:
        return int(self.mask_id < 0)

    @property
    def recorded(self) -> dict[str, Any] | None:
        """Without the mask token's id, which changes no prediction's meaning."""
        recorded = super().recorded or {}
        return {name: value for name, value in recorded.items() if name != "mask_id"}

    @property
    def mask_token(self) -> int:
        """The id that stands for a hidden token in the inputs."""
        return self.vocab_size if self.mask_id < 0 else self.mask_id

    def batch(
        self, sequences: Sequences, seed: int = 0, step: int = 0, *, training: bool = False
    ) -> Batch:
        tokens = sequences.tokens[:, 1:]
        of_rows = [random_lots(first, tokens.shape[1], seed, step) for first in sequences.first]
        lots = np.array(of_rows, np.uint64).reshape(*tokens.shape, 4)
        kind, drawn = uniform(lots[..., 1]), lots[..., 2] % np.uint64(self.vocab_size)
        hidden = np.where(
            kind < self.mask_random, drawn.astype(np.int32), np.int32(self.mask_token)
        )
        hidden = np.where(
            (kind >= self.mask_random) & (kind < self.mask_random + self.mask_kept), tokens, hidden
        )
        # a tokenizer with a mask token has [SEP] between documents, which BERT's training shows
        predictable = (tokens >= 0) & ((self.mask_id < 0) | (tokens != self.boundary_id))
        predicted = (uniform(lots[..., 0]) < self.mask_rate) & predictable
        shown = np.where(tokens < 0, np.int32(self.boundary_id), tokens)
        return Batch(np.where(predicted, hidden, shown), np.where(predicted, tokens, np.int32(-1)))
