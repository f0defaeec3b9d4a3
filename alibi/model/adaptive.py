"""Adaptive input and adaptive softmax: the rarer a word, the narrower its vector (Baevski and Auli
2019).
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray

from alibi.config import ModelConfig
from alibi.model.loss import Head, Losses, TokenLoss, cross_entropy, selected_token_nll
from alibi.parallel.sharding import batch_parts, for_lookup, split_batch, whole_rows

PADDING_ROW = 1  # fairseq's <pad>, which the paper's code has in every band
# Rows with logits over a tail at the same time: few, since few words are rare and 128 x 200,000 logits
# are 100 MB, but enough for products at full speed.
TAIL_ROWS = 128
# The head's columns are filled up to a multiple: on a CPU the weight gradient for 2,016 columns takes
# half the time for 2,002.
ALIGNED = 16
NEVER = -1e30  # a logit with probability 0, finite so that no gradient is NaN


def band_sizes(cutoffs: tuple[int, ...], vocab_size: int) -> list[int]:
    """Returns how many words each band in a vocabulary has."""
    starts, ends = (0, *cutoffs), (*cutoffs, vocab_size)
    return [end - start for start, end in zip(starts, ends, strict=True)]


def check_bands(config: ModelConfig, vocab_size: int) -> None:
    """Raises ValueError if a model's bands don't fit its vocabulary or its width."""
    cutoffs, spelt = config.cutoffs, ":".join(map(str, config.cutoffs))
    if not cutoffs or min(band_sizes(cutoffs, vocab_size)) < 1:
        raise ValueError(
            f"model.cutoffs={spelt} must ascend, above 0 and below the {vocab_size:,} tokens of the vocabulary; "
            f"use for example {max(vocab_size // 8, 1)}:{max(vocab_size // 3, 2)}, or model.embedding=tied"
        )
    if config.width < config.adaptive_factor ** len(cutoffs):
        raise ValueError(
            f"model.adaptive_factor={config.adaptive_factor} leaves band {len(cutoffs)} of model.cutoffs={spelt} no "
            f"feature of model.width={config.width}; use a smaller factor (at least 1) or fewer cutoffs"
        )


class AdaptiveEmbedding(nn.Module):
    """Bands of words in inputs and softmax (paper, section 2.1, after Baevski and Auli 2019 and
    fairseq's code).

    Band i has an embedding with width // factor^i features and a projection to `width`. The softmax has
    two steps. The head scores the first band's words, from their embedding alone, and a cluster for
    each further band. A tail scores its band's words from the band's projection and embedding, both
    transposed. Inputs and softmax share all parameters but the clusters' matrix.

    Attributes:
      vocab_size: words, with ids sorted from frequent to rare.
      config: the model's config. `cutoffs` are the first ids of all bands but the first.
      head: computes the logits.
    """

    vocab_size: int
    config: ModelConfig
    head: Head

    def setup(self) -> None:
        config, width = self.config, self.config.width
        self.band = [
            Band(size, width // config.adaptive_factor**i, width, config.padding_rows)
            for i, size in enumerate(band_sizes(config.cutoffs, self.vocab_size))
        ]
        xavier = nn.initializers.xavier_uniform()
        self.clusters = self.param("clusters", xavier, (width, len(config.cutoffs)), jnp.float32)
        self.input_dropout, self.tail_dropout = (
            nn.Dropout(config.softmax_dropout) for _ in range(2)
        )

    def embed(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length width"]:
        """Returns the tokens' projected vectors."""
        starts = (0, *self.config.cutoffs)
        parts = [
            band.rows(tokens - start, self.head.sharding)
            for band, start in zip(self.band, starts, strict=True)
        ]
        # One product for all bands: a token has zeros in the other bands.
        rows = jnp.concatenate(parts, axis=-1).astype(self.head.dtype)
        kernel = jnp.concatenate([band.kernel for band in self.band]).astype(self.head.dtype)
        return self.head.products.matmul(split_batch(rows, self.head.sharding), kernel)

    def logits(
        self, features: Float[Array, "batch length width"], deterministic: bool = True
    ) -> Float[Array, "batch length vocabulary"]:
        """Returns all words' log-probabilities, float32."""
        features = self.input_dropout(features, deterministic)
        head = jax.nn.log_softmax(self._head_logits(self._head_matrix(), features))
        parts = [head[..., : self.config.cutoffs[0]]]
        for cluster, band in enumerate(self.band[1:], self.config.cutoffs[0]):
            hidden = self._hidden(band, features, deterministic)
            tail = jax.nn.log_softmax(self.head.logits(hidden, band.embedding))
            parts.append(head[..., cluster, None] + tail)
        return jnp.concatenate(parts, axis=-1)

    def token_losses(
        self,
        features: Float[Array, "batch length width"],
        targets: Int[Array, "batch length"],
        loss: TokenLoss = cross_entropy,
        deterministic: bool = True,
        summed: bool = False,
    ) -> tuple[Losses, Losses]:
        """Returns each target's loss and NLL, or their sums, as `Head.token_losses`.

        Another loss than the NLL reads all words' log-probabilities, without dropout. For the NLL a
        tail's softmax is computed only for tokens with a target in its band. (Its projection, a
        hundredth of the work, is computed for all tokens, so that dropout doesn't depend on the
        selection.)
        """
        if loss is not cross_entropy:
            values, _ = self.head.token_losses(self.logits, features, targets, loss, summed)
            arguments = features, targets, cross_entropy, deterministic, summed
            return values, self.token_losses(*arguments)[1]
        features = self.input_dropout(features, deterministic)
        starts = self.config.cutoffs
        cluster = sum((targets >= start).astype(targets.dtype) for start in starts[1:])
        of_head = jnp.where(targets < starts[0], targets, starts[0] + cluster)
        logits = functools.partial(self._head_logits, self._head_matrix())
        nll, _ = self.head.token_losses(logits, features, of_head, summed=summed)
        for start, band in zip(starts, self.band[1:], strict=True):
            inside = (targets >= start) & (targets < start + band.size)
            if self.config.padding_rows and not deterministic:
                inside &= targets != start + PADDING_ROW
            hidden = self._hidden(band, features, deterministic)
            of_band = jnp.where(inside, targets - start, -1)
            embedding = whole_rows(band.embedding, self.head.sharding)
            if self.head.products.plain:
                logits = functools.partial(self.head.logits, embedding=embedding)
                nll += self.head.token_losses(logits, hidden, of_band, summed=summed)[0]
            else:
                of_tail = selected_token_nll(
                    embedding.astype(self.head.dtype),
                    hidden.astype(self.head.dtype),
                    of_band,
                    chunk_rows=TAIL_ROWS,
                    parts=batch_parts(self.head.sharding),
                )
                nll += of_tail.sum() if summed else of_tail
        return nll, jax.lax.stop_gradient(nll) if summed else nll

    def _head_matrix(self) -> Float[Array, "head width"]:
        """Returns the rows of the first band's words, of the other bands, and of zeros."""
        rows = self.band[0].embedding, self.clusters.T
        matrix = whole_rows(jnp.concatenate(rows), self.head.sharding)
        return jnp.pad(matrix, ((0, -len(matrix) % ALIGNED), (0, 0)))

    def _head_logits(
        self, matrix: Float[Array, "head width"], features: Float[Array, "batch length width"]
    ) -> Float[Array, "batch length head"]:
        """Returns logits for the first band's words, the other bands, and columns with probability 0."""
        used = self.config.cutoffs[0] + len(self.config.cutoffs)
        logits = self.head.logits(features, matrix)
        return jnp.where(jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) < used, logits, NEVER)

    def _hidden(
        self, band: "Band", features: Float[Array, "batch length width"], deterministic: bool
    ) -> Float[Array, "batch length features"]:
        """Returns the features projected into a tail."""
        hidden = self.head.products.matmul(
            features.astype(self.head.dtype), band.kernel.astype(self.head.dtype), axis=1
        )
        return self.tail_dropout(hidden, deterministic)


class Band(nn.Module):
    """A band's vectors and their projection.

    Attributes:
      size: words.
      features: features in a vector.
      width: features in a projected vector.
      padding_row: row 1 is padding, as in the paper's code. It starts at zero. In training it is no
        target in a tail, but a target in the head.
    """

    size: int
    features: int
    width: int
    padding_row: bool

    def setup(self) -> None:
        self.embedding = self.param("embedding", self._initial, (self.size, self.features))
        self.kernel = self.param(
            "kernel", nn.initializers.xavier_uniform(), (self.features, self.width), jnp.float32
        )

    def rows(
        self, words: Int[Array, "batch length"], sharding: NamedSharding | None
    ) -> Float[Array, "batch length features"]:
        """Returns the words' vectors, counted from the band's first word. Zeros for other bands."""
        inside = (words >= 0) & (words < self.size)
        rows = for_lookup(self.embedding, sharding)[jnp.clip(words, 0, self.size - 1)]
        return jnp.where(inside[..., None], rows, 0.0)

    def _initial(self, key: PRNGKeyArray, shape: tuple[int, int]) -> Float[Array, "words features"]:
        embedding = jax.random.normal(key, shape, jnp.float32) * self.features**-0.5
        return (
            embedding.at[PADDING_ROW].set(0.0)
            if self.padding_row and self.size > PADDING_ROW
            else embedding
        )
