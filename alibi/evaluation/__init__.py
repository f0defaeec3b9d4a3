"""Perplexity of a stream of tokens at any sequence length, each token scored exactly once."""

from alibi.evaluation.perplexity import Metrics, Score, Scorer, metrics, model_nll
from alibi.evaluation.windows import Windows, plan

__all__ = ["Metrics", "Score", "Scorer", "Windows", "metrics", "model_nll", "plan"]
