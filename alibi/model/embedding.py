"""The embedding of tokens, and the softmax over them that shares its matrix."""

import dataclasses
from typing import Any

from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from alibi.model.loss import chunked_token_nll
from alibi.model.products import Products
from alibi.parallel.sharding import split_batch


@dataclasses.dataclass(frozen=True)
class Head:
    """How features become logits.

    Attributes:
      dtype: of the product.
      products: that compute it.
      logits_chunk: tokens whose logits exist at one time.
      sharding: how the batch dimension lies on the devices; None: as the compiler chooses.
    """

    dtype: Any
    products: Products
    logits_chunk: int
    sharding: NamedSharding | None

    def logits(
        self, features: Float[Array, "batch length width"], embedding: Float[Array, "vocabulary width"]
    ) -> Float[Array, "batch length vocabulary"]:
        """features embedding^T, multiplied in `dtype`, float32."""
        features = split_batch(features, self.sharding).astype(self.dtype)
        return split_batch(self.products.matmul(features, embedding.astype(self.dtype).T), self.sharding)


@dataclasses.dataclass(frozen=True)
class TiedEmbedding:
    """One matrix for inputs and softmax (Press and Wolf 2017).

    Attributes:
      embedding: the matrix.
      head: how its logits are computed.
    """

    embedding: Float[Array, "vocabulary width"]
    head: Head

    def embed(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length width"]:
        """The vectors of tokens, as they are in the matrix."""
        return self.embedding[tokens]

    def logits(
        self, features: Float[Array, "batch length width"], deterministic: bool = True
    ) -> Float[Array, "batch length vocabulary"]:
        """Logits of features, float32."""
        del deterministic
        return self.head.logits(features, self.embedding)

    def token_nll(
        self,
        features: Float[Array, "batch length width"],
        targets: Int[Array, "batch length"],
        deterministic: bool = True,
    ) -> Float[Array, "batch length"]:
        """-log p of each target in nats, float32; 0 where a target is negative."""
        del deterministic
        return chunked_token_nll(self.logits, features, targets, self.head.logits_chunk)
