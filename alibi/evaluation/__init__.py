"""Perplexity of a stream of tokens at any sequence length, each token scored exactly once."""

from alibi.evaluation.perplexity import Figures, Score, Scorer, figures, model_nll
from alibi.evaluation.windows import Windows, plan

__all__ = ["Figures", "Score", "Scorer", "Windows", "figures", "model_nll", "plan"]
