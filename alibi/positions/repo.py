"""RePo: rotary embeddings at positions that tokens choose (2025, arXiv 2512.14391)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from alibi.config.fields import number
from alibi.positions.base import About, Params
from alibi.positions.rotary import Rotary, rotated
from alibi.positions.shapes import Keys, PerKey, PerQuery, Positions, Queries


@dataclasses.dataclass(frozen=True)
class RePo(Rotary):
    """Rotary embeddings in which the layer's input says where a token stands, in each head, in place
    of its index.

    The position is w_h . (swish(G x) * (C x)), a real number without bounds.

    Config: `position=repo,position_options.rank=16`

    Attributes:
      rank: rows in G and C. 0 means an eighth of the width.

    Raises:
      ValueError: as `Rotary`.
    """

    about = About(
        formula="rotary at the position w_h . (swish(G x) * (C x)), x the layer's input",
        source="[arXiv 2512.14391](https://arxiv.org/abs/2512.14391)",
        caveats="without the token's index only the causal mask orders tokens. Initial values are ours. The authors' "
        "models have rotary in their first layers, as `position=rotary,repo,repo,repo`",
    )

    takes_shared_keys = False  # each query head has its own positions

    rank: int = number(0, at_least=0, at_most=2**20)

    def init_layer(self, key: PRNGKeyArray) -> Params:
        rank = self.rank or max(self.width // 8, 1)
        shapes = {
            "gate": (self.width, rank),
            "content": (self.width, rank),
            "place": (rank, self.num_heads),
        }
        return {
            name: jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
            * shape[0] ** -0.5
            for index, (name, shape) in enumerate(shapes.items())
        }

    def keep(
        self,
        params: Params,
        x: Float[Array, "batch length width"],
        key: Float[Array, "batch length kv_heads head_dim"],
        padding: Bool[Array, "batch length"] | None,
        before: PyTree[Float[Array, "batch heads ..."]] | None,
        segments: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length heads"]:
        gate, content, of_heads = (
            params[name].astype(jnp.float32) for name in ("gate", "content", "place")
        )
        x = x.astype(jnp.float32)
        products = [jnp.matmul(x, kernel, precision="highest") for kernel in (gate, content)]
        return jnp.matmul(jax.nn.swish(products[0]) * products[1], of_heads, precision="highest")

    def queries(
        self, params: Params, query: Queries, positions: Positions, kept: PerQuery
    ) -> Queries:
        return self.at(query, kept)

    def keys(self, params: Params, key: Keys, positions: Positions, kept: PerKey) -> Keys:
        return self.at(key, kept)

    def at(
        self,
        x: Float[Array, "batch length heads head_dim"],
        places: Float[Array, "batch length heads"],
    ) -> Float[Array, "batch length heads head_dim"]:
        """Turns features as their tokens' places say, in their own dtype."""
        rates = jnp.asarray(self.turned * self.frequencies(), jnp.float32)
        angles = places[..., None] * rates[None, None, None]
        return rotated(x, jnp.cos(angles), jnp.sin(angles))
