"""Interpolated n-grams by sorting: all orders and both smoothings from one sort.

The symbols that begin at each place are a 64-bit number, the first symbol in the highest bits.
After the sort the n-grams of every order are prefixes, and run lengths are their counts.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, Integer, UInt64

MOST_ORDERS = 8
# KenLM's discounts of n-grams that occur once, twice and more often, where the formula has no value
FALLBACK = (0.5, 1.0, 1.5)
_CHUNK = 1 << 20  # places whose numbers are made at a time

Documents = Sequence[Integer[np.ndarray, " symbols"]]
Smoothing = Callable[
    [Int[np.ndarray, " grams"]],
    tuple[Float[np.ndarray, " grams"], Float[np.ndarray, " grams"]],
]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Each symbol's NLL by an order, which sees `order` - 1 symbols before it."""

    order: int
    grams: int  # distinct n-grams of this and the lower orders
    nats: dict[str, Float[np.ndarray, " symbols"]]  # by smoothing


def witten_bell(
    counts: Int[np.ndarray, " grams"],
) -> tuple[Float[np.ndarray, " grams"], Float[np.ndarray, " grams"]]:
    """Returns what each n-gram keeps of its context's mass, its count, and what it gives to the lower
    order: 1 (Witten & Bell 1991).
    """
    return counts.astype(np.float64), np.ones(counts.size)


def kneser_ney(
    counts: Int[np.ndarray, " grams"],
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


def ngram_scores(train: Documents, scored: Documents, vocab_size: int) -> Iterator[Scores]:
    """Yields the NLL of the symbols in `scored` by n-grams of `train`, from order 1 to 8, or to as many
    symbols as fit into 64 bits.

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
    largest = max(int(document.max(initial=0)) for document in (*train, *scored))
    bits = (largest + 1).bit_length()
    orders = min(MOST_ORDERS, 64 // bits)
    symbols, keys = _windows(scored, bits, orders)
    places = np.argsort(keys)
    queries = _Queries(keys[places], places, bits, orders)
    del keys
    counted = _windows(train, bits, orders)[1]
    counted.sort()

    table = _grams(counted, bits, orders, 1)
    witten = lower = np.full(symbols.size, 1 / vocab_size)
    total = 0
    for order in range(1, orders + 1):
        total += table.grams.size
        witten = queries.interpolated(table, order, witten_bell, witten)
        kneser = queries.interpolated(table, order, kneser_ney, lower)
        probabilities = {"witten-bell": witten, "kneser-ney": kneser}
        nats = {name: -np.log(values[symbols]) for name, values in probabilities.items()}
        yield Scores(order, total, nats)
        if order < orders:
            longer = _grams(counted, bits, orders, order + 1)
            continued = _continued(table, longer, bits, order)
            lower = queries.interpolated(continued, order, kneser_ney, lower)
            table = longer


@dataclasses.dataclass(frozen=True)
class _Table:
    """The distinct n-grams of an order, ascending, and their counts."""

    grams: UInt64[np.ndarray, " grams"]
    counts: Int[np.ndarray, " grams"]


@dataclasses.dataclass(frozen=True)
class _Queries:
    """The windows to score, ascending, so that a search finds neighbours in the cache.

    Attributes:
      places: where each window begins, among the symbols and the documents' starts.
    """

    keys: UInt64[np.ndarray, " windows"]
    places: Int[np.ndarray, " windows"]
    bits: int
    orders: int

    def interpolated(
        self, table: _Table, order: int, smoothing: Smoothing, lower: Float[np.ndarray, " windows"]
    ) -> Float[np.ndarray, " windows"]:
        """Returns the probability of each symbol by this order and the `lower` probabilities, which
        stay where the context is shorter or was never seen.
        """
        if not table.grams.size:  # all documents are shorter
            return lower
        kept, discounted = smoothing(table.counts)
        context_starts = _run_starts(table.grams >> self.bits)
        contexts = table.grams[context_starts] >> self.bits
        mass = np.add.reduceat(discounted, context_starts)
        whole = np.add.reduceat(kept, context_starts) + mass

        grams = self.keys >> self.bits * (self.orders - order)
        inside = grams & _start(self.bits) != _start(self.bits)
        grams, predicted = grams[inside], self.places[inside] + order - 1
        context, has_context = _find(contexts, grams >> self.bits)
        gram, seen = _find(table.grams, grams)
        below = lower[predicted]
        interpolated = (np.where(seen, kept[gram], 0) + mass[context] * below) / whole[context]
        probabilities = lower.copy()
        probabilities[predicted] = np.where(has_context, interpolated, below)
        return probabilities


def _start(bits: int) -> np.uint64:
    """Returns the symbol at the start of each document, larger than all others."""
    return np.uint64((1 << bits) - 1)


def _windows(
    documents: Documents, bits: int, orders: int
) -> tuple[Bool[np.ndarray, " places"], UInt64[np.ndarray, " places"]]:
    """Returns which places hold a symbol, not a document's start, and the `orders` symbols from each
    place on. After a document's end they are starts.
    """
    start = _start(bits)
    kind = np.min_scalar_type(start)
    mark = np.array([start], kind)
    stream = np.concatenate(
        [piece for document in documents for piece in (mark, document.astype(kind, copy=False))]
    )
    size = stream.size
    stream = np.concatenate([stream, np.repeat(mark, orders)])
    keys = np.empty(size, np.uint64)
    for first in range(0, size, _CHUNK):
        key = keys[first : first + _CHUNK]
        key[:] = stream[first : first + key.size]
        ended = np.zeros(key.size, bool)
        for ahead in range(1, orders):
            following = stream[first + ahead : first + ahead + key.size]
            ended |= following == start
            key <<= bits
            key |= np.where(ended, start, following)
    return stream[:size] != start, keys


def _grams(counted: UInt64[np.ndarray, " places"], bits: int, orders: int, order: int) -> _Table:
    """Returns the n-grams of `order` that end in a symbol of their document."""
    prefixes = counted >> bits * (orders - order)
    starts = _run_starts(prefixes)
    grams, counts = prefixes[starts], np.diff(starts, append=prefixes.size)
    inside = grams & _start(bits) != _start(bits)
    return _Table(grams[inside], counts[inside])


def _continued(table: _Table, longer: _Table, bits: int, order: int) -> _Table:
    """Returns the n-grams of `order` with the number of distinct symbols before each, counted in the
    n-grams that are one symbol `longer`. `ngram_scores` explains documents' starts.
    """
    tails = longer.grams & np.uint64((1 << bits * order) - 1)
    tails.sort()
    starts = _run_starts(tails)
    first = np.searchsorted(table.grams, _start(bits) << bits * (order - 1))
    return _Table(
        np.concatenate([tails[starts], table.grams[first:]]),
        np.concatenate([np.diff(starts, append=tails.size), table.counts[first:]]),
    )


def _run_starts(ascending: UInt64[np.ndarray, " values"]) -> Int[np.ndarray, " runs"]:
    """Returns where each run of equal values begins."""
    return np.flatnonzero(
        np.concatenate([[True], ascending[1:] != ascending[:-1]])[: ascending.size]
    )


def _find(
    ascending: UInt64[np.ndarray, " values"], wanted: UInt64[np.ndarray, " queries"]
) -> tuple[Int[np.ndarray, " queries"], Bool[np.ndarray, " queries"]]:
    """Returns a place in `ascending` for each wanted value, and whether the value is there."""
    places = np.minimum(np.searchsorted(ascending, wanted), ascending.size - 1)
    return places, ascending[places] == wanted
