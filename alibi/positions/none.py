"""No position method: the causal mask alone orders the tokens ("NoPE")."""

import dataclasses

from alibi.positions.base import About, PositionMethod


@dataclasses.dataclass(frozen=True)
class NoPosition(PositionMethod):
    """Adds nothing anywhere (Haviv et al. 2022, arXiv 2203.16634).

    Config: `position=none`
    """

    about = About(
        formula="nothing: the causal mask alone orders the tokens",
        source="Haviv et al. 2022, [arXiv 2203.16634](https://arxiv.org/abs/2203.16634)",
        caveats="attention spreads out over longer contexts",
    )

    shift_invariant = True
