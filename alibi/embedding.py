"""The embedding of tokens, and the softmax over them that shares its matrix."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from alibi.batch_split import split_batch
from alibi.cross_entropy import chunked_token_nll
from alibi.products import dot_general_for


@dataclasses.dataclass(frozen=True)
class TiedEmbedding:
    """One matrix for inputs and softmax (Press and Wolf 2017).

    Attributes:
      embedding: the matrix.
      others: as in `alibi.model.DecoderLM`.
    """

    embedding: Float[Array, "vocabulary width"]
    dtype: Any
    logits_chunk: int
    activations: NamedSharding | None

    def embed(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length width"]:
        """The vectors of tokens, as they are in the matrix."""
        return self.embedding[tokens]

    def logits(
        self, features: Float[Array, "batch length width"], deterministic: bool = True
    ) -> Float[Array, "batch length vocabulary"]:
        """Logits of features, float32."""
        del deterministic
        return tied_logits(features, self.embedding, self.dtype, self.activations)

    def token_nll(
        self,
        features: Float[Array, "batch length width"],
        targets: Int[Array, "batch length"],
        deterministic: bool = True,
    ) -> Float[Array, "batch length"]:
        """-log p of each target in nats, float32; 0 where a target is negative."""
        del deterministic
        return chunked_token_nll(self.logits, features, targets, self.logits_chunk)


def tied_logits(
    features: Float[Array, "batch length width"],
    embedding: Float[Array, "vocabulary width"],
    dtype: Any,
    activations: NamedSharding | None,
) -> Float[Array, "batch length vocabulary"]:
    """features embedding^T, multiplied in `dtype`, float32."""
    features, embedding = split_batch(features, activations).astype(dtype), embedding.astype(dtype)
    product = dot_general_for(jax.default_backend())
    logits = product(features, embedding.T, (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return split_batch(logits, activations)
