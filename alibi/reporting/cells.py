"""The number of a cell, from the rows of its seeds."""

import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from alibi.reporting import tables
from alibi.reporting.intervals import Sample, part_sizes, share_interval
from alibi.reporting.rows import Row
from alibi.reporting.tables import PERPLEXITY, Kind, Missing, Number

# The value of each kind in a row.
VALUES: Mapping[Kind, Callable[[Row], float | None]] = {
    PERPLEXITY: lambda row: row.perplexity,
    tables.PSEUDO_PERPLEXITY: lambda row: row.perplexity,
    tables.BITS_PER_BYTE: lambda row: row.bits_per_byte,
    tables.EVALUATION_SPEED: lambda row: row.speed_of_device,
    tables.WORDS_PER_SECOND: lambda row: row.speed_of_device,
    tables.ACCURACY: lambda row: row.passkey.accuracy if row.passkey else None,
    tables.CONTEXT_GAIN: lambda row: row.context_use.gain_nats if row.context_use else None,
}


# The value in units of which means are taken, of the kinds that have an interval over the text.
MEANS: Mapping[Kind, Callable[[Row], float | None]] = {
    kind: VALUES[kind] for kind in (tables.BITS_PER_BYTE, tables.CONTEXT_GAIN)
} | dict.fromkeys((PERPLEXITY, tables.PSEUDO_PERPLEXITY), operator.attrgetter("nats_per_token"))


def make_cell(rows: Sequence[Row], kind: Kind) -> Number | Missing:
    """Returns the number of `rows`, with a value for each seed, or the reason for its absence."""
    measured = [row for row in rows if row.is_measured]
    known = [(row, value) for row in measured if (value := VALUES[kind](row)) is not None]
    if known:
        values = tuple(value for _, value in known)
        # Gains are relative to the shortest length, whose own is zero by definition.
        is_start = any(
            row.context_use and row.context_use.from_length == row.eval_length for row, _ in known
        )
        sample = found = None
        if kind is tables.ACCURACY:
            found = share_interval(
                values, min(row.passkey.prompts for row, _ in known if row.passkey)
            )
        elif kind in MEANS and not is_start:
            sample = _sample([row for row, _ in known], kind)
            found = sample.interval
        return Number(values, kind, interval=found and found.of(kind.of_mean), sample=sample)
    if measured:
        perplexities = PERPLEXITY, tables.PSEUDO_PERPLEXITY
        why = "too large to write" if kind in perplexities else "is not known"
        return Missing(f"{kind.title.lower()} {why}", is_reason=True)
    return Missing(rows[0].error or "no result", is_reason=True)


def _sample(rows: Sequence[Row], kind: Kind) -> Sample:
    """Returns the means of `kind` by seed, and by part of the text if all rows have the same parts."""
    seeds = tuple(row.seed for row in rows if row.is_trained)
    means = [MEANS[kind](row) for row in rows]
    parts = [(row.context_use or row).parts or () for row in rows]
    texts = {(row.tokens_sha256, row.tokens, len(of)) for row, of in zip(rows, parts, strict=True)}
    if not all(parts) or len(texts) > 1:
        return Sample(seeds, np.array(means)[:, None], np.ones(1, int))
    use, sums = rows[0].context_use, np.array(parts)
    # parts of a gain are of whole windows
    count, size = (use.windows, rows[0].stride) if use else (rows[0].tokens or 0, 1)
    sizes = size * part_sizes(count, sums.shape[1])
    if kind is tables.BITS_PER_BYTE:
        nats = [row.nats_per_token for row in rows]
        sums *= (np.array(means, float) / np.array(nats, float))[:, None]
    return Sample(seeds, sums, sizes, texts.pop())
