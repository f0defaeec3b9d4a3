"""A table of the paper beside our results, in the paper's own layout: paper / ours / difference."""

import dataclasses
from collections.abc import Mapping

from alibi.reporting.tables import Cell, Difference, Grid, Number, Part, Table, related


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


def compare(
    paper: Grid, ours: Grid, references: Mapping[tuple[int, int], tuple[int, int]], *, ratios: bool
) -> tuple[tuple[Cell, ...], ...]:
    """The cells of a comparison; () where the paper's is None."""
    sides = [related(grid, references) for grid in (paper, ours)]
    return tuple(
        tuple(
            ()
            if theirs is None
            else (theirs, mine, _difference(theirs, mine, ratios, references.get((i, j)) == (i, j)))
            for j, (theirs, mine) in enumerate(zip(*rows, strict=True))
        )
        for i, rows in enumerate(zip(*sides, strict=True))
    )


def part_names(ratios: bool) -> tuple[str, ...]:
    """What the parts of a comparison's cells are."""
    return "paper", "ours", "difference of ratios" if ratios else "difference"


def _difference(paper: Part, ours: Part, ratios: bool, itself: bool) -> Difference | None:
    """Ours against the paper's: of the values, or of their ratios, which the reference `itself` has none of."""
    if not isinstance(paper, Number) or not isinstance(ours, Number):
        return None
    if ratios:
        if paper.ratio is None or ours.ratio is None or itself:
            return None
        return Difference(ours.ratio - paper.ratio, share=False)
    if ours.kind.is_loss:
        return Difference(ours.mean - paper.mean, share=False)
    return Difference(ours.mean / paper.mean - 1, share=True)
