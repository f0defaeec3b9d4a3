"""A table of the paper beside our results, in the paper's own layout: paper / ours / difference."""

import dataclasses
from collections.abc import Iterable, Sequence

from alibi.reporting.tables import PERPLEXITY, Cell, Difference, Missing, Number, Part, Table

PARTS = ("paper", "ours")


@dataclasses.dataclass(frozen=True)
class Entry:
    """The two numbers of a cell, and the (row, column) of the cell that each is divided by for its ratio."""

    paper: Number | Missing
    ours: Number | Missing
    reference: tuple[int, int] | None = None


Entries = Sequence[Sequence[Entry | None]]  # by row and column; None where the paper's cell is empty


@dataclasses.dataclass(frozen=True)
class Comparison(Table):
    """A table of the paper, whose cells are (paper, ours, difference).

    Where `ratios`, the values themselves can't be compared (another corpus, another model):
    the differences are those of each value's ratio to its reference.

    Attributes:
      number: the paper's.
      stride: of all windows, in tokens; None: they don't overlap, or not all have one stride.
    """

    number: int = 0
    stride: int | None = None

    @property
    def has_ours(self) -> bool:
        """Whether there is a number of ours."""
        return any(isinstance(cell[1], Number) for row in self.cells for cell in row if cell)


def part_names(ratios: bool) -> tuple[str, ...]:
    """What the parts of a comparison's cells are."""
    return *PARTS, "difference of ratios" if ratios else "difference"


def compare(entries: Entries, *, ratios: bool) -> tuple[tuple[Cell, ...], ...]:
    """The cells of a comparison: with ratios, differences, and the lowest perplexities of each column marked."""
    columns = list(zip(*entries, strict=True))
    lowest = [[_lowest(getattr(entry, side) for entry in column if entry) for side in PARTS] for column in columns]
    return tuple(
        tuple(
            _compared(entries, (row, column), ratios, lowest[column]) if entry else ()
            for column, entry in enumerate(line)
        )
        for row, line in enumerate(entries)
    )


def _lowest(parts: Iterable[Part]) -> float | None:
    """The lowest perplexity of a column that has several."""
    found = [part.mean for part in parts if isinstance(part, Number) and part.kind is PERPLEXITY]
    return min(found) if len(found) > 1 else None


def _compared(entries: Entries, place: tuple[int, int], ratios: bool, lowest: Sequence[float | None]) -> Cell:
    entry = entries[place[0]][place[1]]
    assert entry is not None
    reference = entries[entry.reference[0]][entry.reference[1]] if entry.reference else None
    sides: list[Part] = []
    for side, best in zip(PARTS, lowest, strict=True):
        part = getattr(entry, side)
        if isinstance(part, Number):
            ratio = _ratio(part, getattr(reference, side, None))
            part = dataclasses.replace(part, ratio=ratio, best=part.kind is PERPLEXITY and part.mean == best)
        sides.append(part)
    itself = ratios and entry.reference == place
    return *sides, None if itself else _difference(sides, ratios)


def _ratio(number: Number, reference: Part) -> float | None:
    return number.mean / reference.mean if isinstance(reference, Number) and reference.mean else None


def _difference(sides: Sequence[Part], ratios: bool) -> Difference | None:
    """Ours against the paper's: of the values, or of their ratios."""
    paper, ours = sides
    if not isinstance(paper, Number) or not isinstance(ours, Number):
        return None
    if ratios:
        return None if paper.ratio is None or ours.ratio is None else Difference(ours.ratio - paper.ratio, share=False)
    relative = ours.kind.relative
    return Difference(ours.mean / paper.mean - 1 if relative else ours.mean - paper.mean, share=relative)
