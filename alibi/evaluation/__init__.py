"""Perplexity of token streams at any sequence length, each token scored exactly once."""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])

from alibi.evaluation.perplexity import Score, Scorer, model_nll
from alibi.evaluation.windows import Windows, windows_of

__all__ = ["Score", "Scorer", "Windows", "model_nll", "windows_of"]
