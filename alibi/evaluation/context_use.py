"""The use of longer contexts: the same tokens scored with more and more tokens before them.

In windows that don't overlap, longer windows are better because fewer of their tokens have little
context (the early token curse; paper, appendix B): even a model without use for more than a hundred
tokens gains. If the same tokens are scored at each length
(`alibi.evaluation.windows.same_token_windows`), the gain is due to the context alone.
"""

import dataclasses

import numpy as np

from alibi.evaluation.perplexity import Score
from alibi.reporting.intervals import interval, part_sums, six_digits
from alibi.reporting.rows import ContextUse


def gain_of(shortest: Score, score: Score) -> ContextUse:
    """Returns the gain of the windows of `score` over the `shortest` ones on the same tokens, in
    nats per token.

    Its interval is of the differences between the two lengths, so hard and easy windows cancel. The
    shortest length gains nothing by definition, and has no interval.
    """
    use = ContextUse(len(score.windows), shortest.windows.length, 0.0)
    if score is shortest:
        return use
    saved = shortest.nll_nats.astype(np.float64) - score.nll_nats
    parts = part_sums(saved.reshape(use.windows, -1).sum(axis=1))
    tokens = part_sums(np.full(use.windows, score.windows.stride))
    found = interval(parts[None], tokens)
    return dataclasses.replace(
        use,
        gain_nats=float(saved.mean()),
        interval=found.bounds if found else None,
        parts=six_digits(parts),
    )
