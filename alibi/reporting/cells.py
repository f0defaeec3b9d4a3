"""A cell's number, from its seeds' entries."""

from collections.abc import Sequence

import numpy as np

from alibi.reporting.intervals import Sample, part_sizes, share_interval
from alibi.reporting.rows import Entry
from alibi.reporting.tables import Kind, Missing, Number


def make_cell(entries: Sequence[Entry], kind: Kind) -> Number | Missing:
    """Returns the number of `entries`, with a value for each seed, or the reason for its absence."""
    assert kind.value is not None, kind
    measured = [entry for entry in entries if entry.row.is_measured]
    pairs = [(entry, value) for entry in measured if (value := kind.value(entry)) is not None]
    if pairs:
        with_value, values = zip(*pairs, strict=True)
        interval = sample = None
        seeds = tuple(entry.row.seed for entry in with_value if entry.row.is_trained)
        if kind.trials:
            trials = min(entry.results[kind.trials] for entry in with_value)
            interval = share_interval(values, trials, f"the {kind.trials}")
        elif kind.mean and None not in (means := [kind.mean(entry) for entry in with_value]):
            sample = _sample(with_value, means, kind, seeds)
            interval = sample.interval
        bounds = interval and interval.of(kind.of_mean)
        return Number(values, kind, interval=bounds, sample=sample, seeds=seeds)
    if measured:
        return Missing(f"{kind.title.lower()} {kind.missing}", is_reason=True)
    return Missing(entries[0].row.error or "no result", is_reason=True)


def _sample(
    entries: Sequence[Entry],
    means: Sequence[float | None],
    kind: Kind,
    seeds: tuple[int, ...],
) -> Sample:
    """Returns the means by seed, and by part if all entries have the same parts of a text."""
    parts = [entry.results.get("parts") or () for entry in entries]
    texts = {
        (entry.row.tokens_sha256, entry.results["tokens"], len(of_seed))
        for entry, of_seed in zip(entries, parts, strict=True)
        if of_seed
    }
    if not all(parts) or len(texts) > 1:
        return Sample(seeds, np.array(means)[:, None], np.ones(1, int))
    first, sums = entries[0].results, np.array(parts)
    # parts of a gain are of whole windows
    size = first.get("tokens_of_window", 1)
    sizes = np.array(
        first.get("tokens_of_parts") or size * part_sizes(first["tokens"] // size, sums.shape[1])
    )
    if kind.mean_of_parts:
        summed = np.array([kind.mean_of_parts(entry) for entry in entries], float)
        sums *= (np.array(means, float) / summed)[:, None]
    return Sample(seeds, sums, sizes, texts.pop())
