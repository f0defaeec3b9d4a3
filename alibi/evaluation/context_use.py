"""The use of longer contexts: the same tokens scored with more and more tokens before them.

In windows that don't overlap, longer windows are better because fewer of their tokens have little
context (the early token curse; paper, appendix B): even a model without use for more than a hundred
tokens gains. If the same tokens are scored at each length
(`alibi.evaluation.windows.same_token_windows`), the gain is due to the context alone.
"""

import numpy as np
from jaxtyping import Float, Integer
from scipy.special import ndtri, stdtrit

from alibi.evaluation.perplexity import Score
from alibi.reporting.rows import ContextUse

RESAMPLES = 1000
MAX_BLOCKS = 2000  # more windows are resampled in blocks of neighbours: no slower, and safe
OUTSIDE = 0.025  # on each side of an interval


def gain_of(shortest: Score, score: Score) -> ContextUse:
    """Returns the gain of the windows of `score` over the `shortest` ones on the same tokens, in
    nats per token.

    Its interval resamples the differences between the two lengths, so hard and easy windows cancel.
    The shortest length gains nothing by definition, and has no interval.
    """
    saved = (shortest.nll_nats.astype(np.float64) - score.nll_nats).reshape(
        -1, score.windows.stride
    )
    counts = np.full(len(saved), saved.shape[1])
    between = None if score is shortest else interval(saved.sum(axis=1), counts)
    return ContextUse(len(saved), shortest.windows.length, float(saved.mean()), between)


def interval(
    sums: Float[np.ndarray, " windows"], counts: Integer[np.ndarray, " windows"]
) -> tuple[float, float] | None:
    """Returns a 95% interval of a mean over tokens, by the bootstrap's percentiles.

    Tokens of a window depend on each other, so whole windows are drawn. Percentiles of few windows
    are too narrow; they are widened as Student's t widens a normal interval (Hesterberg 2015, arXiv
    1411.5279, section 5.2). None if a single window has tokens: all its draws are equal, which
    would look like certainty.

    Args:
      sums: the sum over the tokens of each window.
      counts: the tokens of each window; may be 0.
    """
    random, used = np.random.default_rng(0), np.flatnonzero(counts)
    if used.size < 2:
        return None
    blocks = min(used.size, MAX_BLOCKS)
    starts = np.arange(blocks) * used.size // blocks
    sums, counts = (np.add.reduceat(values[used], starts) for values in (sums, counts))
    drawn = (random.integers(0, blocks, blocks) for _ in range(RESAMPLES))
    means = [sums[windows].sum() / counts[windows].sum() for windows in drawn]
    mean = sums.sum() / counts.sum()
    wider = (blocks / (blocks - 1)) ** 0.5 * stdtrit(blocks - 1, OUTSIDE) / ndtri(OUTSIDE)
    low, high = mean + wider * (np.quantile(means, (OUTSIDE, 1 - OUTSIDE)) - mean)
    return float(low), float(high)
