"""95% intervals for means over seeds and over a text in which neighbouring parts depend on each other.

The mean over S seeds and over P consecutive parts varies with both. Each source has a half-width, a
quantile of Student's t times a standard error:

    seeds:  t(S - 1) s / sqrt(S), where s is the runs' own means' standard deviation
    text:   t(P / l - 1) sqrt(v), where v is the variance that the mean over the seeds has in the
            moving-blocks bootstrap (Kuensch 1989, doi 10.1214/aos/1176347265), l parts a block

Their squares add. Noise in single runs and parts counts in both, so the interval is rather too wide
than too narrow: simulated with two or three seeds it holds the mean in 95% to 99%. The text's alone
holds it in 95% if the parts are independent, 93% if neighbours correlate by 0.3 and 90% by 0.6,
where an interval for independent parts does in 85% and 67%. The interval is for other seeds and
other text from the same source. It says nothing about another book or corpus.

For a mean the bootstrap needs no draws, since its variance has a closed form: the mean square over
the sums of all blocks, which overlap. The factor P / (P - l) makes it unbiased without dependence.
Blocks have cbrt(P) parts, or as many as are best for a first-order autoregression in which
neighbouring parts correlate as here (Andrews 1991, doi 10.2307/2938229, equations 6.2 and 6.4), if
these are more, but at most a quarter of the parts.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import scipy  # its functions are imported when first used, and a training uses none
from jaxtyping import Float, Integer

PARTS = 64  # in a text at most
OUTSIDE = 0.025  # on each side of an interval
STRONGEST = 0.97  # correlation of neighbouring parts that the length of blocks takes into account
SEEDS, TEXT = "seeds", "the text"  # what an interval covers


@dataclasses.dataclass(frozen=True)
class Interval:
    """A 95% interval, and the sources of variation that it covers."""

    low: float
    high: float
    covers: tuple[str, ...]

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high

    def of(self, function: Callable[[float], float]) -> "Interval":
        """Returns the interval for an increasing function of the mean."""
        return Interval(function(self.low), function(self.high), self.covers)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A quantity's sums for each seed and part. A single part stands for unknown parts."""

    seeds: tuple[int, ...]  # empty for an n-gram, a single row without seeds
    sums: Float[np.ndarray, "seeds parts"]
    tokens: Integer[np.ndarray, " parts"]  # in each part
    text: tuple | None = None  # equal for samples on the same tokens, or None if unknown

    @property
    def interval(self) -> Interval | None:
        return interval(self.sums, self.tokens)


def interval(
    sums: Float[np.ndarray, "seeds parts"],
    tokens: Integer[np.ndarray, " parts"],
    outside: float = OUTSIDE,
) -> Interval | None:
    """Returns the 95% interval for a mean over tokens that covers the known variation.

    This is over seeds with several rows, and over the text with several columns that have tokens. It is
    None with neither.

    Args:
      sums: over the tokens in each consecutive part, a row for each seed.
      tokens: in each part. Parts without tokens are left out.
    """
    used = np.flatnonzero(tokens)
    sums, tokens = part_sums(sums[:, used]), part_sums(tokens[used])
    seeds, parts = sums.shape
    halves: dict[str, float] = {}
    if seeds > 1:
        halves[SEEDS] = _half_width_over_seeds(sums.sum(axis=1) / tokens.sum(), outside)
    if parts > 1 and seeds:
        halves[TEXT] = _half_width_over_text(sums.mean(axis=0), tokens, outside)
    if not halves:
        return None
    mean = sums.sum() / seeds / tokens.sum()
    half = float(np.hypot.reduce([*halves.values()]))
    return Interval(float(mean - half), float(mean + half), tuple(halves))


def difference(one: Sample, other: Sample, outside: float = OUTSIDE) -> Interval | None:
    """Returns the interval for the mean of `one` less that of `other`, or None if nothing is paired.

    Common seeds are paired (an n-gram with all seeds), and parts if both have those of the same text.
    """
    common = [seed for seed in one.seeds or other.seeds if seed in (other.seeds or one.seeds)]
    rows, rows_of_other = (
        each.sums[[each.seeds.index(seed) for seed in common]] if each.seeds else each.sums
        for each in (one, other)
    )
    if one.text is not None and one.text == other.text:
        return interval(rows - rows_of_other, one.tokens, outside)
    means = rows.sum(axis=1) / one.tokens.sum() - rows_of_other.sum(axis=1) / other.tokens.sum()
    return interval(means[:, None], np.ones(1, int), outside)


def share_interval(shares: Sequence[float], trials: int, covers: str = "the trials") -> Interval:
    """Returns the 95% interval for a share of trials, such as prompts, which are the same for each seed.

    For a single seed it is Wilson's (1927, doi 10.1080/01621459.1927.10502953). For several seeds its
    distances from the mean share and the half-width over the seeds add as squares, within 0 and 1.
    """
    mean, z = float(np.mean(shares)), float(-scipy.special.ndtri(OUTSIDE))
    centre = (mean + z**2 / (2 * trials)) / (1 + z**2 / trials)
    spread = z * (mean * (1 - mean) / trials + (z / (2 * trials)) ** 2) ** 0.5
    half = spread / (1 + z**2 / trials)
    if len(shares) == 1:
        return Interval(max(0.0, centre - half), min(1.0, centre + half), (covers,))
    over_seeds = _half_width_over_seeds(np.asarray(shares))
    low, high = (np.hypot(end - mean, over_seeds) for end in (centre - half, centre + half))
    return Interval(float(max(0, mean - low)), float(min(1, mean + high)), (SEEDS, covers))


def part_sizes(count: int, parts: int = PARTS) -> Integer[np.ndarray, " parts"]:
    """Returns the sizes if `count` things are cut into at most `parts` nearly equal parts."""
    parts = min(parts, count)
    return np.diff(np.arange(parts + 1) * count // max(1, parts))


def part_sums(values: np.ndarray) -> np.ndarray:
    """Returns the sums over the parts of the last axis, see `part_sizes`, in float64 or int64."""
    sizes = part_sizes(values.shape[-1])
    dtype = np.int64 if np.issubdtype(values.dtype, np.integer) else np.float64
    return np.add.reduceat(values, sizes.cumsum() - sizes, axis=-1, dtype=dtype)


def six_digits(sums: Float[np.ndarray, " parts"]) -> tuple[float, ...]:
    """Returns the sums as rows hold them."""
    return tuple(float(f"{value:.6g}") for value in sums)


def _half_width_over_seeds(means: Float[np.ndarray, " seeds"], outside: float = OUTSIDE) -> float:
    return float(
        -scipy.special.stdtrit(means.size - 1, outside) * means.std(ddof=1) / means.size**0.5
    )


def _half_width_over_text(
    sums: Float[np.ndarray, " parts"], tokens: Integer[np.ndarray, " parts"], outside: float
) -> float:
    rest = sums - sums.sum() / tokens.sum() * tokens
    length, parts = block_length(rest), rest.size
    blocks = np.lib.stride_tricks.sliding_window_view(rest, length).sum(axis=1)
    variance = parts / length * np.mean(blocks**2) * parts / (parts - length)
    return float(-scipy.special.stdtrit(parts / length - 1, outside) * variance**0.5 / tokens.sum())


def block_length(rest: Float[np.ndarray, " parts"]) -> int:
    """Returns the number of parts in a block, given their differences from the mean."""
    parts, power = rest.size, rest @ rest
    correlation = min(STRONGEST, max(0.0, rest[1:] @ rest[:-1] / power)) if power else 0.0
    best = 1.1447 * (4 * parts * (correlation / (1 - correlation**2)) ** 2) ** (1 / 3)
    return max(1, int(np.cbrt(parts)), min(int(np.ceil(best)), parts // 4))
