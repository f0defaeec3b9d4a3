"""A decoder language model for any position method, with tied or adaptive embeddings."""

from collections.abc import Collection
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from alibi.adaptive import AdaptiveEmbedding, Bands
from alibi.attention.backends import OF_SEQUENCES
from alibi.batch_split import batch_parts, split_batch
from alibi.block import ACTIVATIONS, Block, PositionCache
from alibi.embedding import TiedEmbedding
from alibi.initialization import INITIALIZATIONS
from alibi.positions import PositionMethod, make_position
from alibi.positions.base import KnownPositions
from alibi.products import by_rows

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
CHOICES: dict[str, Collection[str]] = {
    "activation": ACTIVATIONS,
    "dtype": DTYPES,
    "embedding": ("tied", "adaptive"),
    "initialization": INITIALIZATIONS,
    "attention": ("auto", *OF_SEQUENCES),
}
# Keys of config.model that are attributes of `DecoderLM`.
SAME_NAMES = (
    *("num_layers", "feed_forward", "activation", "dropout", "attention_dropout", "activation_dropout"),
    *("final_norm", "norm_epsilon", "initialization", "remat", "window", "skip_epsilon", "attention"),
)


class DecoderLM(nn.Module):
    """A causal language model (paper, section 2.1).

    Attributes:
      vocab_size: tokens of the vocabulary.
      num_layers: blocks.
      position: the position method; it holds width, num_heads and train_length.
      feed_forward: hidden features of the feed-forward layers.
      activation: a name from `alibi.block.ACTIVATIONS`.
      dropout, attention_dropout, activation_dropout: rates.
      bands: of adaptive embeddings; None: one matrix, tied.
      final_norm: a layer norm after the last layer.
      norm_epsilon: added to the variance in layer norms.
      initialization: a name from `alibi.initialization.INITIALIZATIONS`.
      dtype: of the products; parameters, norms, logits, softmax and loss are float32.
      remat: recompute each block in the backward pass.
      window: positions that attention reaches back, its own included; 0: all.
      skip_epsilon, attention: its `skip_epsilon` and `backend`, see `alibi.attention.attend`.
      logits_chunk: tokens whose logits `token_nll` holds at one time (adaptive: in the head).
      activations: how the batch dimension of activations lies on the devices; None: as
        the compiler chooses, which may gather the batch where parameters are split too.
    """

    vocab_size: int
    num_layers: int
    position: PositionMethod
    feed_forward: int
    activation: str = "relu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    bands: Bands | None = None
    final_norm: bool = True
    norm_epsilon: float = 1e-6
    initialization: str = "xavier"
    dtype: Any = jnp.float32
    remat: bool = False
    window: int = 0
    skip_epsilon: float = 0.0
    attention: str = "auto"
    logits_chunk: int = 2048
    activations: NamedSharding | None = None

    def setup(self) -> None:
        self.vocabulary = self._make_vocabulary()
        self.position_params = self.param("position", self.position.init) if self.position.learns else {}
        block = nn.remat(Block, static_argnums=(6, 7, 8)) if self.remat else Block
        self.layers = [
            block(
                position=self.position,
                feed_forward=self.feed_forward,
                activation=self.activation,
                dropout=self.dropout,
                attention_dropout=self.attention_dropout,
                activation_dropout=self.activation_dropout,
                norm_epsilon=self.norm_epsilon,
                initialization=INITIALIZATIONS[self.initialization],
                dtype=self.dtype,
                window=self.window,
                skip_epsilon=self.skip_epsilon,
                attention=self.attention,
                activations=self.activations,
            )
            for _ in range(self.num_layers)
        ]
        self.last_norm = nn.LayerNorm(self.norm_epsilon, name="final_norm") if self.final_norm else None
        self.embedding_dropout = nn.Dropout(self.dropout)
        self.position_cache = PositionCache()

    def _make_vocabulary(self) -> TiedEmbedding | AdaptiveEmbedding:
        width = self.position.width
        how = {"dtype": self.dtype, "logits_chunk": self.logits_chunk, "activations": self.activations}
        if self.bands is not None:
            return AdaptiveEmbedding(self.vocab_size, width, self.bands, name="adaptive", **how)
        embedding = self.param("embedding", nn.initializers.normal(width**-0.5), (self.vocab_size, width))
        return TiedEmbedding(embedding, **how)

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        *,
        positions: Int[Array, "*batch length"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        deterministic: bool = True,
        decode: bool = False,
    ) -> Float[Array, "batch length vocabulary"]:
        """Logits of the token after each of `tokens`, float32; adaptive embeddings give log-probabilities.

        Args:
          positions: integers `[length]` or `[batch, length]`; by default 0, 1, ...
          segment_ids: a token sees only tokens of its own segment (packed documents,
            padding); positions must then be given where they restart.
          deterministic: no dropout; otherwise `rngs={"dropout": key}` is needed.
          decode: one token at a time with Flax's key-value cache, as long as the tokens
            that `init(..., decode=True)` was given.

        Raises:
          ValueError: a sequence longer than the position method is defined for.
        """
        features = self.features(
            tokens, positions=positions, segment_ids=segment_ids, deterministic=deterministic, decode=decode
        )
        return self.vocabulary.logits(features, deterministic)

    def token_nll(
        self,
        inputs: Int[Array, "batch length"],
        targets: Int[Array, "batch scored"],
        *,
        positions: Int[Array, "*batch length"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "batch scored"]:
        """-log p of each target in nats, float32; 0 where a target is negative.

        The targets are those of the last inputs: where they are fewer, the last layer's
        queries and the softmax are computed only for these. Never holds all logits.
        """
        features = self.features(
            inputs,
            positions=positions,
            segment_ids=segment_ids,
            deterministic=deterministic,
            last=targets.shape[-1],
        )
        return self.vocabulary.token_nll(features, targets, deterministic)

    def features(
        self,
        tokens: Int[Array, "batch length"],
        *,
        positions: Int[Array, "*batch length"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        deterministic: bool = True,
        decode: bool = False,
        last: int | None = None,
    ) -> Float[Array, "batch last width"]:
        """What the softmax layer gets for the last `last` tokens (None: all), float32; arguments as in `__call__`."""
        self.position.check_length(tokens.shape[-1])
        # None, not an array: a layer that is recomputed would trace it, and no longer know it.
        of_queries: KnownPositions | None
        of_keys: KnownPositions | None
        if decode:
            if segment_ids is not None:
                raise ValueError("decode=True takes no segment_ids: decode each document with a cache of its own")
            of_queries, of_keys = self.position_cache(tokens, positions)
        else:
            of_queries = of_keys = positions
        x = self.vocabulary.embed(tokens) * jnp.sqrt(self.position.width).astype(jnp.float32)
        known = np.arange(tokens.shape[-1]) if of_queries is None else of_queries
        x = self.position.embed(self.position_params, x, jnp.asarray(known))
        x = self.embedding_dropout(split_batch(x, self.activations), deterministic)
        for number, layer in enumerate(self.layers):
            kept = last if last is not None and number == len(self.layers) - 1 else tokens.shape[-1]
            x = layer(x, self.position_params, of_queries, of_keys, segment_ids, deterministic, decode, kept)
        return x if self.last_norm is None else by_rows(self.last_norm, x)


def build_model(
    config: ml_collections.ConfigDict, vocab_size: int, *, activations: NamedSharding | None = None
) -> DecoderLM:
    """The model that `config` describes.

    Args:
      activations: see `DecoderLM`; each part of the batch may hold the logits of
        `config.model.logits_chunk` tokens.

    Raises:
      ValueError: num_heads that doesn't divide width, cutoffs that don't fit the
        vocabulary, a number out of its range, an unknown name of a choice, position
        method or option.
    """
    model = config.model
    _check(model)
    bands = None
    if model.embedding == "adaptive":
        bands = Bands(tuple(model.cutoffs), model.adaptive_factor, model.softmax_dropout, model.padding_rows)
        bands.check(vocab_size, model.width)
    position = make_position(
        config.position,
        num_heads=model.num_heads,
        head_dim=model.width // model.num_heads,
        width=model.width,
        train_length=config.train_length,
        options=config.position_options.to_dict(),
    )
    return DecoderLM(
        vocab_size=vocab_size,
        position=position,
        bands=bands,
        dtype=DTYPES[model.dtype],
        logits_chunk=model.logits_chunk * batch_parts(activations),
        activations=activations,
        **{key: model[key] for key in SAME_NAMES},
    )


def evaluated(model: DecoderLM, config: ml_collections.ConfigDict) -> DecoderLM:
    """The model as evaluations compute it: with products of `config.eval.dtype`, whatever it is trained with."""
    return model.clone(dtype=DTYPES[config.eval.dtype])


def count_parameters(model: DecoderLM) -> int:
    """How many numbers the model learns; nothing is allocated."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(lambda tokens: model.init(jax.random.key(0), tokens), tokens)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))


def _check(model: ml_collections.ConfigDict) -> None:
    """Raises ValueError for a value of config.model that no model can have."""
    if model.width < 1:
        raise ValueError(f"model.width={model.width} must be at least 1")
    if model.num_heads < 1 or model.width % model.num_heads:
        divisors = [n for n in range(1, model.width + 1) if model.width % n == 0]
        nearest = sorted(sorted(divisors, key=lambda n: abs(n - model.num_heads))[:3])
        raise ValueError(
            f"model.num_heads={model.num_heads} does not divide model.width={model.width}; "
            f"use {', '.join(map(str, nearest))}"
        )
    for key, choices in CHOICES.items():
        if model[key] not in choices:
            raise ValueError(f"model.{key}={model[key]!r} is unknown; use one of {', '.join(choices)}")
    for key in ("num_layers", "feed_forward", "logits_chunk"):
        if model[key] < 1:
            raise ValueError(f"model.{key}={model[key]} must be at least 1")
    for key in ("dropout", "attention_dropout", "activation_dropout", "softmax_dropout"):
        if not 0 <= model[key] < 1:
            raise ValueError(f"model.{key}={model[key]} must be a rate from 0 to below 1")
    if not 0 <= model.window < 2**31:
        raise ValueError(
            f"model.window={model.window} must be from 1 to 2^31 - 1, or 0 for attention to all tokens before"
        )
    if not 0 <= model.skip_epsilon < 1:
        raise ValueError(
            f"model.skip_epsilon={model.skip_epsilon} must be a share of the attention from 0 to below 1, such as 1e-6"
        )
    if model.norm_epsilon <= 0:
        raise ValueError(f"model.norm_epsilon={model.norm_epsilon} must be above 0, such as 1e-5")
