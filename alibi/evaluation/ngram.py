"""Interpolated n-grams of any order: all orders and both smoothings from one sort.

The places of both texts are sorted in the order of the symbols that begin there. Places with the same n-gram are
then neighbours, for every order. The number of such a run is the n-gram's id, which ascends with
the id of its context, and its length is the count.

A cache of counts (Kuhn & De Mori 1990, doi 10.1109/34.56193) makes the words of the last tokens more
likely to come again.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

# KenLM's discounts of n-grams that occur once, twice and more often, where the formula has no value
FALLBACK = (0.5, 1.0, 1.5)

Documents = Sequence[Integer[np.ndarray, " symbols"]]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Each symbol's NLL under an order, which sees `order` - 1 symbols before it."""

    order: int
    grams: int  # distinct n-grams of this and the lower orders
    nats: dict[str, Float[np.ndarray, " symbols"]]  # by smoothing


def witten_bell(
    counts: Integer[np.ndarray, " grams"],
) -> tuple[Float[np.ndarray, " grams"], Float[np.ndarray, " grams"]]:
    """Returns what each n-gram keeps of its context's mass, its count, and what it gives to the lower
    order: 1 (Witten & Bell 1991).
    """
    return counts.astype(np.float64), np.ones(counts.size)


def kneser_ney(
    counts: Integer[np.ndarray, " grams"],
) -> tuple[Float[np.ndarray, " grams"], Float[np.ndarray, " grams"]]:
    """Returns what each n-gram keeps of its count, and the discount that it gives to the lower order
    (modified Kneser-Ney, Chen & Goodman 1999, equation 17).
    """
    once, twice, thrice, four = (np.count_nonzero(counts == times) for times in range(1, 5))
    discounts = FALLBACK
    if once and twice and thrice:
        share = once / (once + 2 * twice)
        formula = (
            1 - 2 * share * twice / once,
            2 - 3 * share * thrice / twice,
            3 - 4 * share * four / thrice,
        )
        discounts = formula if min(formula) > 0 else FALLBACK
    discounted = np.array((0.0, *discounts))[np.minimum(counts, 3)]
    return counts - discounted, discounted


def ngram_scores(
    train: Documents, scored: Documents, vocab_size: int, order: int = 8
) -> Iterator[Scores]:
    """Yields the NLL of the symbols in `scored` under n-grams of `train`, from order 1 to `order`.

    No n-gram joins two documents. A document's start is a symbol, which is seen but never predicted.
    Order 1 is interpolated with the uniform 1 / `vocab_size`. Lower orders of Kneser-Ney count the
    distinct symbols before an n-gram. At a document's start, with nothing before them, n-grams keep
    their counts.

    Raises:
      ValueError: a text has no symbols.
    """
    for name, documents in (("to count", train), ("to score", scored)):
        if not any(document.size for document in documents):
            raise ValueError(f"the text {name} is empty; n-grams need one symbol or more")
    # larger than all symbols, and also what follows both texts
    start = 1 + max(int(document.max(initial=0)) for document in (*train, *scored))
    mark = np.array([start], np.min_scalar_type(start))
    stream = np.concatenate(
        [
            piece.astype(mark.dtype, copy=False)
            for document in (*train, *scored)
            for piece in (mark, document)
        ]
        + [np.repeat(mark, order)]
    )
    first = sum(1 + document.size for document in train)
    symbols = stream[first:-order] != start

    witten = lower = np.full(symbols.size, 1 / vocab_size)
    total, shorter = 0, None
    for n, counted in enumerate(_orders(stream, first, order), start=1):
        if shorter is not None:
            continued = np.where(shorter.at_start, shorter.counts, counted.before)
            lower = shorter.interpolated(kneser_ney(continued), lower)
        shorter = counted
        total += counted.grams.size
        witten = counted.interpolated(witten_bell(counted.counts), witten)
        kneser = counted.interpolated(kneser_ney(counted.counts), lower)
        nats = {"witten-bell": -np.log(witten[symbols]), "kneser-ney": -np.log(kneser[symbols])}
        yield Scores(n, total, nats)


@dataclasses.dataclass(frozen=True)
class _Counted:
    """The distinct n-grams of an order in the train text, and those that end in a scored symbol.

    Attributes:
      grams: ids, ascending.
      contexts: the id of each one's context, an n-gram of the lower order.
      counts: how often each occurs.
      at_start: whether each begins a document.
      before: for each n-gram of the lower order, how many distinct symbols stand before it.
      places: the symbols in which the scored n-grams end, among the symbols and documents' starts.
      scored_grams, scored_contexts: their ids, neighbours near each other.
    """

    grams: Integer[np.ndarray, " grams"]
    contexts: Integer[np.ndarray, " grams"]
    counts: Integer[np.ndarray, " grams"]
    at_start: Bool[np.ndarray, " grams"]
    before: Integer[np.ndarray, " shorter"]
    places: Integer[np.ndarray, " scored"]
    scored_grams: Integer[np.ndarray, " scored"]
    scored_contexts: Integer[np.ndarray, " scored"]

    def interpolated(
        self,
        smoothed: tuple[Float[np.ndarray, " grams"], Float[np.ndarray, " grams"]],
        lower: Float[np.ndarray, " places"],
    ) -> Float[np.ndarray, " places"]:
        """Returns the probability of each symbol from this order and the `lower` probabilities, which
        stay where the context is shorter or was never seen.

        Args:
          smoothed: what each n-gram keeps, and what it gives to the lower order.
        """
        if not self.grams.size:  # all documents are shorter
            return lower
        kept, discounted = smoothed
        is_new = np.append(True, self.contexts[1:] != self.contexts[:-1])
        context_starts = np.flatnonzero(is_new)
        mass = np.add.reduceat(discounted, context_starts)
        whole = np.add.reduceat(kept, context_starts) + mass
        context, has_context = _find(self.contexts[context_starts], self.scored_contexts)
        gram, seen = _find(self.grams, self.scored_grams)
        below = lower[self.places]
        interpolated = (np.where(seen, kept[gram], 0) + mass[context] * below) / whole[context]
        probabilities = lower.copy()
        probabilities[self.places] = np.where(has_context, interpolated, below)
        return probabilities


def _orders(stream: Integer[np.ndarray, " symbols"], first: int, order: int) -> Iterator[_Counted]:
    """Yields the n-grams of each order, from 1 to `order`.

    Args:
      stream: documents after a start each, and `order` starts at the end.
      first: where the scored text begins. The train text is before it.
    """
    places = _ascending(stream, order)
    places = places[places < stream.size - order].astype(np.min_scalar_type(stream.size))
    ids, grams = np.zeros_like(places), np.zeros_like(places, shape=1)
    new, inside = np.arange(places.size) == 0, np.array(True)
    for n in range(1, order + 1):
        symbols = stream[n - 1 :][places]
        new[1:] |= symbols[1:] != symbols[:-1]
        # a start can be the first symbol before others, and nothing else
        inside = (symbols != stream[-1]) & (inside if n > 2 else True)
        del symbols
        longer = np.empty_like(ids)
        longer[places] = np.cumsum(new, dtype=ids.dtype) - 1
        starts = np.flatnonzero(new)
        counts = np.add.reduceat(inside & (places < first), starts, dtype=ids.dtype)
        shorter, grams = grams, np.flatnonzero(counts).astype(ids.dtype)
        one_place, counts = places[starts[grams]], counts[grams]
        del starts
        scored = places[inside & (places >= first)]
        distinct = np.bincount(ids[one_place + 1], minlength=int(shorter.max(initial=0)) + 1)
        yield _Counted(
            grams=grams,
            contexts=ids[one_place],
            counts=counts,
            at_start=stream[one_place] == stream[-1],
            before=distinct[shorter].astype(ids.dtype),
            places=scored + n - (first + 1),
            scored_grams=longer[scored],
            scored_contexts=ids[scored],
        )
        ids = longer


def _ascending(stream: Integer[np.ndarray, " symbols"], order: int) -> Int[np.ndarray, " symbols"]:
    """Returns all places, in the order of at least the `order` symbols from each on.

    Each round sorts by as many ranks of the round before as fit into 64 bits. In the first round these
    are symbols. Nothing follows the last symbol.
    """
    ranks, compared = stream, 1
    while True:
        bits = int(ranks.max()).bit_length()
        keys = ranks.astype(np.uint64)
        together = min(64 // bits, -(-order // compared))
        for ahead in range(compared, together * compared, compared):
            keys <<= bits
            keys[:-ahead] |= ranks[ahead:]
        places, compared = np.argsort(keys), together * compared
        if compared >= order:
            return places
        keys = keys[places]
        ranks = np.empty(keys.size, np.min_scalar_type(keys.size))
        ranks[places] = np.cumsum(np.append(False, keys[1:] != keys[:-1]), dtype=ranks.dtype)


def _find(
    ascending: Integer[np.ndarray, " values"], wanted: Integer[np.ndarray, " queries"]
) -> tuple[Int[np.ndarray, " queries"], Bool[np.ndarray, " queries"]]:
    """Returns a place in `ascending` for each wanted value, and whether the value is there."""
    places = np.minimum(np.searchsorted(ascending, wanted), ascending.size - 1)
    return places, ascending[places] == wanted


def cache_probabilities(
    documents: Sequence[Integer[np.ndarray, " tokens"]],
    width: int,
    otherwise: Float[np.ndarray, " tokens"],
) -> tuple[Float[np.ndarray, " tokens"], Float[np.ndarray, " tokens"]]:
    """Returns the probability of each token under the unigrams and the bigrams in the `width` tokens
    before it, in its document.

    Args:
      otherwise: probability of each token where its document has no token before it. Where the token
        before it is new in the cache, the unigrams take the place of the bigrams.
    """
    unigrams, bigrams, start = otherwise.copy(), otherwise.copy(), 0
    for document in documents:
        tokens, places = np.asarray(document, np.int64), np.arange(document.size)
        span = slice(start, start := start + document.size)
        first = np.maximum(places - width, 0)
        cached = np.minimum(places, width)
        unigram = np.where(cached, _earlier(tokens, first) / np.maximum(cached, 1), otherwise[span])
        # pairs that lie in the cache as a whole; the first token has no pair, and a number of its own
        before = np.append(-1, tokens[:-1])
        contexts = _earlier(before, first + 1)
        pairs = _earlier(before * (tokens.max(initial=0) + 1) + tokens, first + 1)
        unigrams[span] = unigram
        bigrams[span] = np.where(contexts, pairs / np.maximum(contexts, 1), unigram)
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
    """Returns the weights of a mixture that make the tokens likeliest, from expectation maximisation."""
    weights = np.full(len(probabilities), 1 / len(probabilities))
    for _ in range(rounds):
        joint = weights[:, None] * probabilities
        weights = (joint / joint.sum(axis=0)).mean(axis=1)
    return weights
