"""Perplexity of a stream of tokens at any sequence length, each token scored exactly once."""


from alibi.evaluation.windows import Windows, plan

__all__ = ["Score", "Scorer", "Windows", "metrics", "plan"]
