"""ALiBi with slopes that are flattened for longer sequences (Al-Khateeb et al. 2023, arXiv 2310.13017)."""

import dataclasses

from jaxtyping import Array, Float

from alibi.positions.alibi import Alibi
from alibi.positions.base import About


@dataclasses.dataclass(frozen=True)
class AlibiInterpolated(Alibi):
    """Slopes times L / L', where the sequences at hand have L' tokens and are longer than those of training, L.

    The farthest key of a sequence then gets the bias that it had in training; shorter sequences are as with `Alibi`.
    """

    about = About(
        formula="-m_h min(1, L / L') (i - j) in sequences of L' tokens",
        source="Al-Khateeb et al. 2023, [arXiv 2310.13017](https://arxiv.org/abs/2310.13017)",
        caveats="changes only how a trained model is tested",
    )

    def flattened(self, slopes: Float[Array, " heads"]) -> Float[Array, " heads"]:
        return slopes / max(1.0, self.scale)
