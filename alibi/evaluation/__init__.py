"""Evaluators: what is measured of a trained run, at any sequence length."""

from alibi.evaluation.base import Evaluator, NoResultError, option

__all__ = ["Evaluator", "NoResultError", "option"]
