"""Evaluators: what is measured of a trained run, at any sequence length."""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])

from alibi.evaluation.base import Evaluator, NoResultError, option

__all__ = ["Evaluator", "NoResultError", "option"]
