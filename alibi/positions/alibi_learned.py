"""ALiBi whose slopes are trained, which the paper tried and left (section 3): they extrapolate less well."""

import dataclasses
from typing import ClassVar

from jaxtyping import PRNGKeyArray

from alibi.positions.alibi import Alibi, AlibiBias
from alibi.positions.base import Params
from alibi.slopes import alibi_slopes


@dataclasses.dataclass(frozen=True)
class AlibiLearned(Alibi):
    """One slope for each head, shared by the layers, that starts as ALiBi's own and follows its gradient.

    Nothing keeps a slope above zero; one below favours far keys. The paper doesn't say
    how its trainable slopes started.
    """

    learns: ClassVar[bool] = True

    def init(self, key: PRNGKeyArray) -> Params:
        del key
        return {"slopes": alibi_slopes(self.num_heads, self.slopes, self.slopes_seed)}

    def bias(self, params: Params) -> AlibiBias:
        return AlibiBias(params["slopes"])
