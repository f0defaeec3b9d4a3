"""A cache of counts (Kuhn & De Mori 1990, doi 10.1109/34.56193): the words of the last tokens are more
likely to come again.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, Integer


def cache_probabilities(
    documents: Sequence[Integer[np.ndarray, " tokens"]],
    width: int,
    otherwise: Float[np.ndarray, " tokens"],
) -> tuple[Float[np.ndarray, " tokens"], Float[np.ndarray, " tokens"]]:
    """Returns the probability of each token by the unigrams and by the bigrams in the `width` tokens
    before it, in its document.

    Args:
      otherwise: probability of each token where its document has no token before it. Where the token
        before it is new in the cache, the unigrams take the place of the bigrams.
    """
    unigrams, bigrams, start = otherwise.copy(), otherwise.copy(), 0
    for document in documents:
        tokens, places = np.asarray(document, np.int64), np.arange(document.size)
        own = slice(start, start := start + document.size)
        first = np.maximum(places - width, 0)
        known = np.minimum(places, width)
        unigram = np.where(known, _earlier(tokens, first) / np.maximum(known, 1), otherwise[own])
        # pairs that lie in the cache as a whole; the first token has no pair, and a number of its own
        before = np.append(-1, tokens[:-1])
        contexts = _earlier(before, first + 1)
        pairs = _earlier(before * (tokens.max(initial=0) + 1) + tokens, first + 1)
        unigrams[own] = unigram
        bigrams[own] = np.where(contexts, pairs / np.maximum(contexts, 1), unigram)
    return unigrams, bigrams


def _earlier(
    keys: Int[np.ndarray, " places"], first: Int[np.ndarray, " places"]
) -> Int[np.ndarray, " places"]:
    """Returns how many places from `first` on, before each place, have its key."""
    numbers = np.unique(keys, return_inverse=True)[1] * (keys.size + 1)
    places = np.sort(numbers + np.arange(keys.size))
    upto = np.searchsorted(places, numbers + np.arange(keys.size))
    return upto - np.minimum(upto, np.searchsorted(places, numbers + first))


def fitted_weights(
    probabilities: Float[np.ndarray, "models tokens"], rounds: int = 100
) -> Float[np.ndarray, " models"]:
    """Returns the weights of a mixture that make the tokens likeliest, by expectation maximisation."""
    weights = np.full(len(probabilities), 1 / len(probabilities))
    for _ in range(rounds):
        joint = weights[:, None] * probabilities
        weights = (joint / joint.sum(axis=0)).mean(axis=1)
    return weights
