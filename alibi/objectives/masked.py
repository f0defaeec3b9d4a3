"""Masked tokens predicted from both sides (BERT; Devlin et al. 2019, arXiv 1810.04805, section 3.1)."""

import dataclasses

import numpy as np
from jaxtyping import UInt64

from alibi.objectives.base import Batch, Objective, Sequences


@dataclasses.dataclass(frozen=True)
class Masked(Objective):
    """Some tokens are predicted, and most of these are replaced in the inputs.

    Each token has four random numbers, a pure function of seed, step and its place in the text. So the
    same tokens are masked in windows of every length and on any number of hosts.

    Attributes:
      rate: share of tokens that are predicted.
      random: share among them replaced by a token drawn uniformly from the text's vocabulary.
      kept: share among them left as they are. All others become the mask token.
      mask_id: the mask token's id. -1 is the id after the text's vocabulary, which is never predicted.
    """

    causal = False
    selects = True

    rate: float
    random: float
    kept: float
    mask_id: int = -1

    @property
    def mask_token(self) -> int:
        """The id that stands for a hidden token in the inputs."""
        return self.vocab_size if self.mask_id < 0 else self.mask_id

    def batch(self, sequences: Sequences, seed: int = 0, step: int = 0) -> Batch:
        tokens = sequences.tokens[:, 1:]
        of_rows = [_lots(first, tokens.shape[1], seed, step) for first in sequences.first]
        lots = np.array(of_rows, np.uint64).reshape(*tokens.shape, 4)
        kind, drawn = _uniform(lots[..., 1]), lots[..., 2] % np.uint64(self.vocab_size)
        hidden = np.where(kind < self.random, drawn.astype(np.int32), np.int32(self.mask_token))
        hidden = np.where((kind >= self.random) & (kind < self.random + self.kept), tokens, hidden)
        predicted = (_uniform(lots[..., 0]) < self.rate) & (tokens >= 0)
        shown = np.where(tokens < 0, np.int32(self.boundary_id), tokens)
        return Batch(np.where(predicted, hidden, shown), np.where(predicted, tokens, np.int32(-1)))


def _lots(first: int, count: int, seed: int, step: int) -> UInt64[np.ndarray, "count four"]:
    """Returns four random numbers for each of `count` tokens from the place `first` on.

    They are a block from the counter-based generator Philox (Salmon et al. 2011), with the place as its
    counter.
    """
    generator = np.random.Philox(key=[seed, step], counter=int(first))
    return generator.random_raw(4 * count).reshape(count, 4)


def _uniform(lots: UInt64[np.ndarray, "*shape"]) -> np.ndarray:
    """Returns numbers from 0 to below 1, float64."""
    return (lots >> np.uint64(11)) * 2.0**-53
