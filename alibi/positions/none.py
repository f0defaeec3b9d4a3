"""No position method: the causal mask alone orders the tokens ("NoPE")."""

import dataclasses

from alibi.positions.base import PositionMethod


@dataclasses.dataclass(frozen=True)
class NoPosition(PositionMethod):
    """Adds nothing anywhere (Haviv et al. 2022, arXiv 2203.16634)."""

    shift_invariant = True
