"""The number of a cell, from the rows of its seeds."""

from collections.abc import Callable, Mapping, Sequence

from alibi.reporting import tables
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


def make_cell(rows: Sequence[Row], kind: Kind) -> Number | Missing:
    """Returns the number of `rows`, with a value for each seed, or the reason for its absence."""
    measured = [row for row in rows if row.is_measured]
    values = tuple(value for row in measured if (value := VALUES[kind](row)) is not None)
    if values:
        use = measured[0].context_use
        return Number(
            values, kind, interval=use.interval if use is not None and len(values) == 1 else None
        )
    if measured:
        perplexities = PERPLEXITY, tables.PSEUDO_PERPLEXITY
        why = "too large to write" if kind in perplexities else "is not known"
        return Missing(f"{kind.title.lower()} {why}", is_reason=True)
    return Missing(rows[0].error or "no result", is_reason=True)
