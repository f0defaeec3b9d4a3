"""ALiBi with other fixed slopes in each layer."""

import dataclasses

import numpy as np

from alibi.config.fields import number
from alibi.positions.alibi import Alibi
from alibi.positions.base import About, Params
from alibi.positions.shapes import PerHead
from alibi.slopes import alibi_slopes


@dataclasses.dataclass(frozen=True)
class AlibiByLayer(Alibi):
    """ALiBi with slopes times a factor, which may be another in each layer.

    A factor of 0 is a layer without positions. Lists are repeated over the layers.

    Config: `position=alibi_by_layer,position_options.factor=1.0:0.5:0.25:0.0`

    Attributes:
      factor: multiplies all slopes.

    Raises:
      ValueError: as `Alibi`.
    """

    about = About(
        formula="-c m_h (i - j), m_h as in alibi, c given for each layer",
        source="Press, Smith and Lewis 2022, [arXiv 2108.12409](https://arxiv.org/abs/2108.12409), with a factor",
        caveats="with one factor for all layers it is alibi with other slopes",
    )

    factor: float = number(1.0, at_least=0)

    def sides(self, params: Params) -> list[PerHead]:
        return [
            alibi_slopes(self.num_heads, (self.factor * np.asarray(slopes)).tolist())
            for slopes in super().sides(params)
        ]
