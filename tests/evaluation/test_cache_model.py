"""A cache of counts, beside counting by hand."""

import collections
import itertools

import numpy as np
import pytest

from alibi.evaluation.ngram import cache_probabilities, fitted_weights


@pytest.mark.parametrize("width", [1, 2, 5, 100])
def test_probabilities_are_counts_of_the_tokens_before(width):
    random = np.random.default_rng(width)
    documents = [random.integers(0, 4, size).astype(np.uint16) for size in (40, 0, 1, 25)]
    otherwise = random.uniform(size=66)
    unigrams, bigrams = cache_probabilities(documents, width, otherwise)
    place = 0
    for document in documents:
        for number, token in enumerate(document):
            seen = document[max(0, number - width) : number]
            expected = np.mean(seen == token) if seen.size else otherwise[place]
            assert unigrams[place] == pytest.approx(expected)
            after = collections.Counter(
                new for old, new in itertools.pairwise(seen) if old == seen[-1]
            )
            if after:
                expected = after[token] / after.total()
            assert bigrams[place] == pytest.approx(expected)
            place += 1


def test_weights_are_the_likeliest():
    probabilities = np.random.default_rng(0).uniform(0.01, 1, (3, 500))
    weights = fitted_weights(probabilities, rounds=2000)
    assert weights.sum() == pytest.approx(1)

    def nats(weights):
        return -np.log(weights @ probabilities).mean()

    for change in ((0.01, -0.01, 0), (-0.01, 0, 0.01), (0, 0.01, -0.01)):
        moved = np.clip(weights + change, 0, 1)
        assert nats(moved / moved.sum()) >= nats(weights) - 1e-9
