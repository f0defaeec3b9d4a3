"""Whether a model uses a longer context or only survives it: the same tokens, with ever more before them.

In windows that don't overlap, longer ones are better for having fewer tokens with little
context (the early token curse, paper, appendix B), and a model that ignores all but the
last hundred tokens gains by that too. Where the same tokens are scored at each length
(`alibi.evaluation.windows.plan_contexts`), what is gained is due to the context alone.
"""

import numpy as np
from jaxtyping import Float, Integer
from scipy.special import ndtri, stdtrit

from alibi.evaluation.perplexity import Score
from alibi.reporting.rows import ContextUse

RESAMPLES = 1000
# Windows that are drawn from; of more, neighbours are drawn together, which takes as long and is safe.
MOST_DRAWN = 2000
OUTSIDE = 0.025  # on each side of an interval


def gain_of(shortest: Score, score: Score) -> ContextUse:
    """The nats a token that the windows of `score` save beside the `shortest`, which score the same tokens.

    The differences between the two lengths are resampled, not the costs, so that hard and easy windows cancel.
    The shortest gains nothing by definition, and has no interval.
    """
    saved = shortest.nll_nats.astype(np.float64) - score.nll_nats
    counts = np.full(len(saved), saved.shape[1])
    between = None if score is shortest else interval(saved.sum(axis=1), counts)
    return ContextUse(len(saved), shortest.windows.length, float(saved.mean()), between)


def interval(
    sums: Float[np.ndarray, " windows"], counts: Integer[np.ndarray, " windows"]
) -> tuple[float, float] | None:
    """The interval that holds a mean over tokens with a probability of 95%, by the bootstrap's percentiles.

    Tokens of a window depend on each other, so that windows are drawn as wholes. Percentiles of few windows are too
    narrow; they are widened as Student's t widens a normal interval (Hesterberg 2015, arXiv 1411.5279, section 5.2).
    None where only one window has tokens: of that all draws are the same, which would look like certainty.

    Args:
      sums: what the mean is of, added up in each window.
      counts: how many tokens that were; a window may have none.
    """
    random, used = np.random.default_rng(0), np.flatnonzero(counts)
    if used.size < 2:
        return None
    blocks = min(used.size, MOST_DRAWN)
    starts = np.arange(blocks) * used.size // blocks
    sums, counts = (np.add.reduceat(values[used], starts) for values in (sums, counts))
    drawn = (random.integers(0, blocks, blocks) for _ in range(RESAMPLES))
    means = [sums[windows].sum() / counts[windows].sum() for windows in drawn]
    mean = sums.sum() / counts.sum()
    wider = (blocks / (blocks - 1)) ** 0.5 * stdtrit(blocks - 1, OUTSIDE) / ndtri(OUTSIDE)
    low, high = mean + wider * (np.quantile(means, (OUTSIDE, 1 - OUTSIDE)) - mean)
    return float(low), float(high)
