"""ALiBi between the patches of an image, in two dimensions."""

import dataclasses
import math

from alibi.config.fields import choice, number
from alibi.positions.alibi import Alibi
from alibi.positions.base import About, Params
from alibi.positions.metric import ROW, Metric, MetricBias


@dataclasses.dataclass(frozen=True)
class AlibiGrid(Alibi):
    """-m_h times the distance between two patches in a grid. The tokens are its rows, one after another.

    The grid may be a rectangle, and another one in each call: it has no parameters. Give `columns`,
    and the number of tokens says how many rows there are. Give `causal=False`: else a patch sees the
    patches before it alone, in rows.

    Config: `position=alibi_grid,position_options.columns=24`

    Attributes:
      columns: patches in a row, at most 32,768. 0 means a square grid.
      rows: patches in a column. 0 means as many as there are.
      free_tokens: tokens before the patches without a bias, such as a class token or registers.
      metric: "manhattan" adds the distances in rows and in columns, "euclidean" is the straight line.

    Raises:
      ValueError: as `Alibi`. When the bias is made: tokens that don't fill the grid, or too many.
    """

    about = About(
        formula="-m_h (|row_i - row_j| + |column_i - column_j|), or the straight line between the patches",
        source="as `alibi`; in two dimensions, TITAN, Ding et al. 2024, [arXiv 2411.19666](https://arxiv.org/abs/2411.19666)",
        caveats="for tokens in a grid; a line of tokens has `alibi`",
    )

    has_sides = False
    shift_invariant = False  # patches would move to other rows

    columns: int = number(0, at_least=0, at_most=ROW)
    rows: int = number(0, at_least=0)
    metric: str = choice("manhattan", ("manhattan", "euclidean"))

    def bias(self, params: Params) -> MetricBias:
        length, free = self.length or self.train_length, self.free_tokens
        patches = max(length - free, 0)
        side = math.isqrt(patches)
        rows = self.rows or (patches // self.columns if self.columns else side)
        columns = self.columns or (patches // self.rows if self.rows else side)
        if rows * columns != patches:
            raise ValueError(
                f"alibi_grid got {length} tokens, {free} of them free, and {patches} patches don't fill "
                f"{rows} rows of {columns}; give the grid of these tokens as the option columns, and free_tokens for "
                "tokens that are no patches"
            )
        if columns > ROW or rows > 2 * ROW:
            raise ValueError(
                f"alibi_grid got {rows:,} rows of {columns:,}, and takes {2 * ROW:,} of {ROW:,} at most; a line of "
                "tokens has position=alibi"
            )
        return MetricBias(
            self.sides(params)[0], Metric(columns, free, euclidean=self.metric == "euclidean")
        )
