"""A decoder language model on Flax's own attention layer, for any position method."""

from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from alibi.attention import attention_fn
from alibi.attention.backends import BACKENDS
from alibi.cross_entropy import chunked_token_nll
from alibi.positions import Bias, PositionMethod, make_position
from alibi.positions.base import KnownPositions
from alibi.products import dot_general_for

ACTIVATIONS = {"relu": nn.relu, "gelu": nn.gelu, "silu": nn.silu}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class Block(nn.Module):
    """A pre-layer-norm decoder layer: attention, then feed-forward, each on a residual branch.

    Attributes: as in `DecoderLM`.
    """

    position: PositionMethod
    feed_forward: int
    activation: str
    dropout: float
    attention_dropout: float
    activation_dropout: float
    dtype: Any
    attention: str

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length width"],
        position_params: Any,
        bias: Bias | None,
        query_positions: KnownPositions,
        key_positions: KnownPositions,
        segment_ids: Int[Array, "batch length"] | None,
        deterministic: bool,
        decode: bool,
        last: int,
    ) -> Float[Array, "batch last width"]:
        """The layer's output for the last `last` positions, of the dtype of `x`: its keys and values are of all."""

        dot_general = dot_general_for(jax.default_backend())

        def rotate(query: Array, key: Array, of_queries: Array, of_keys: Array) -> tuple[Array, Array]:
            return self.position.rotate(position_params, query, key, of_queries, of_keys)

        attention = nn.MultiHeadDotProductAttention(
            num_heads=self.position.num_heads,
            dtype=self.dtype,
            dropout_rate=self.attention_dropout,
            broadcast_dropout=False,
            decode=decode,
            attention_fn=attention_fn(
                bias,
                num_heads=self.position.num_heads,
                query_positions=query_positions[..., -last:],
                key_positions=key_positions,
                segment_ids=segment_ids
                if segment_ids is None or last == x.shape[1]
                else (segment_ids[..., -last:], segment_ids),
                rotate=rotate,
                backend=self.attention,
            ),
            qkv_dot_general=dot_general,
            out_dot_general=dot_general,
            kernel_init=nn.initializers.xavier_uniform(),
            name="attention",
        )
        # Layer norm runs in float32 whatever the compute dtype; the products cast its result.
        y = nn.LayerNorm(name="attention_norm")(x)
        y = attention(y[:, -last:], y, deterministic=deterministic)
        x = x[:, -last:] + nn.Dropout(self.dropout)(y, deterministic)
        y = nn.LayerNorm(name="feed_forward_norm")(x)
        y = self._dense(self.feed_forward, "up")(y)
        y = nn.Dropout(self.activation_dropout)(ACTIVATIONS[self.activation](y), deterministic)
        y = self._dense(x.shape[-1], "down")(y)
        return x + nn.Dropout(self.dropout)(y, deterministic)

    def _dense(self, features: int, name: str) -> nn.Dense:
        return nn.Dense(
            features,
            dtype=self.dtype,
            kernel_init=nn.initializers.xavier_uniform(),
            dot_general=dot_general_for(jax.default_backend()),
            name=name,
        )


class PositionCache(nn.Module):
    """Remembers the position of each slot of Flax's key-value cache."""

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "batch length"], positions: Int[Array, "*batch length"] | None
    ) -> tuple[Int[Array, "*batch length"], Int[Array, "batch slots"]]:
        """The positions of `tokens` and of every slot; those after the last token Flax masks."""
        started = self.has_variable("cache", "positions")
        slots = self.variable("cache", "positions", jnp.zeros, tokens.shape, jnp.int32)
        index = self.variable("cache", "index", jnp.zeros, (), jnp.int32)
        if not started:
            return jnp.arange(tokens.shape[-1]), slots.value
        positions = jnp.broadcast_to(index.value if positions is None else positions, tokens.shape)
        slots.value = jax.lax.dynamic_update_slice(slots.value, positions, (0, index.value))
        index.value = index.value + tokens.shape[-1]
        return positions, slots.value


class DecoderLM(nn.Module):
    """A causal language model with tied embeddings (paper, section 2.2 and appendix A.1).

    Attributes:
      vocab_size: tokens of the vocabulary.
      num_layers: blocks.
      position: the position method; it holds width, num_heads and train_length.
      feed_forward: hidden features of the feed-forward layers.
      activation: relu, gelu or silu.
      dropout, attention_dropout, activation_dropout: rates.
      dtype: of the products; parameters, norms, logits, softmax and loss are float32.
      remat: recompute each block in the backward pass.
      attention: backend, see `alibi.attention.attend`.
      logits_chunk: tokens whose logits `token_nll` holds at one time.
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
    dtype: Any = jnp.float32
    remat: bool = False
    attention: str = "auto"
    logits_chunk: int = 2048
    activations: NamedSharding | None = None

    def setup(self) -> None:
        width = self.position.width
        self.embedding = self.param("embedding", nn.initializers.normal(width**-0.5), (self.vocab_size, width))
        self.position_params = self.param("position", self.position.init) if self.position.learns else {}
        block = nn.remat(Block, static_argnums=(7, 8, 9)) if self.remat else Block
        self.layers = [
            block(
                position=self.position,
                feed_forward=self.feed_forward,
                activation=self.activation,
                dropout=self.dropout,
                attention_dropout=self.attention_dropout,
                activation_dropout=self.activation_dropout,
                dtype=self.dtype,
                attention=self.attention,
            )
            for _ in range(self.num_layers)
        ]
        self.final_norm = nn.LayerNorm()
        self.embedding_dropout = nn.Dropout(self.dropout)
        self.position_cache = PositionCache()

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        *,
        positions: Int[Array, "*batch length"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        deterministic: bool = True,
        decode: bool = False,
    ) -> Float[Array, "batch length vocabulary"]:
        """Logits of the token after each of `tokens`, float32.

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
        return self.head(
            self.features(
                tokens, positions=positions, segment_ids=segment_ids, deterministic=deterministic, decode=decode
            )
        )

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
        return chunked_token_nll(self.head, features, targets, self.logits_chunk)

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
        of_queries: KnownPositions
        of_keys: KnownPositions
        if decode:
            if segment_ids is not None:
                raise ValueError("decode=True takes no segment_ids: decode each document with a cache of its own")
            of_queries, of_keys = self.position_cache(tokens, positions)
        else:
            of_queries = of_keys = np.arange(tokens.shape[-1]) if positions is None else positions
        x = self.embedding[tokens] * jnp.sqrt(self.position.width).astype(jnp.float32)
        x = self.position.embed(self.position_params, x, jnp.asarray(of_queries))
        x = self.embedding_dropout(self._split_batch(x), deterministic)
        bias = self.position.bias(self.position_params)
        for number, layer in enumerate(self.layers):
            kept = last if last is not None and number == len(self.layers) - 1 else tokens.shape[-1]
            x = layer(x, self.position_params, bias, of_queries, of_keys, segment_ids, deterministic, decode, kept)
        return self.final_norm(x)

    def head(self, features: Float[Array, "batch length width"]) -> Float[Array, "batch length vocabulary"]:
        """Logits of features, by the tied embedding, float32."""
        features, embedding = self._split_batch(features).astype(self.dtype), self.embedding.astype(self.dtype)
        product = dot_general_for(jax.default_backend())
        logits = product(features, embedding.T, (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return self._split_batch(logits)

    def _split_batch(self, x: Float[Array, "batch length features"]) -> Float[Array, "batch length features"]:
        """Keeps the batch split over the devices; without this, split parameters win and each device does all."""
        if self.activations is None or x.shape[0] % batch_parts(self.activations):
            return x
        return jax.lax.with_sharding_constraint(x, self.activations)


def batch_parts(sharding: NamedSharding) -> int:
    """Into how many parts a sharding splits the first dimension."""
    size = sharding.mesh.size
    return size // sharding.shard_shape((size,))[0]


def build_model(
    config: ml_collections.ConfigDict, vocab_size: int, *, activations: NamedSharding | None = None
) -> DecoderLM:
    """The model that `config` describes.

    Args:
      activations: see `DecoderLM`; each part of the batch may hold the logits of
        `config.model.logits_chunk` tokens.

    Raises:
      ValueError: num_heads that doesn't divide width, an unknown activation, dtype,
        position method or option.
    """
    model = config.model
    if model.num_heads < 1 or model.width % model.num_heads:
        divisors = [n for n in range(1, model.width + 1) if model.width % n == 0]
        nearest = sorted(sorted(divisors, key=lambda n: abs(n - model.num_heads))[:3])
        raise ValueError(
            f"model.num_heads={model.num_heads} does not divide model.width={model.width}; "
            f"use {', '.join(map(str, nearest))}"
        )
    _check_choice("model.activation", model.activation, ACTIVATIONS)
    _check_choice("model.dtype", model.dtype, DTYPES)
    _check_choice("model.attention", model.attention, ("auto", *BACKENDS))
    for key in ("num_layers", "feed_forward", "logits_chunk"):
        if model[key] < 1:
            raise ValueError(f"model.{key}={model[key]} must be at least 1")
    for key in ("dropout", "attention_dropout", "activation_dropout"):
        if not 0 <= model[key] < 1:
            raise ValueError(f"model.{key}={model[key]} must be a rate from 0 to below 1")
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
        num_layers=model.num_layers,
        position=position,
        feed_forward=model.feed_forward,
        activation=model.activation,
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        activation_dropout=model.activation_dropout,
        dtype=DTYPES[model.dtype],
        remat=model.remat,
        attention=model.attention,
        logits_chunk=model.logits_chunk * (1 if activations is None else batch_parts(activations)),
        activations=activations,
    )


def count_parameters(model: DecoderLM) -> int:
    """How many numbers the model learns; nothing is allocated."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(lambda tokens: model.init(jax.random.key(0), tokens), tokens)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))


def _check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{key}={value!r} is unknown; use one of {', '.join(choices)}")
