"""A decoder language model for any position method, with tied or adaptive embeddings."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from alibi.attention.cache import Reading, Slots
from alibi.config import Config, ModelConfig
from alibi.cpu.products import Products
from alibi.model.adaptive import AdaptiveEmbedding, check_bands
from alibi.model.block import DTYPES, Block, BlockCall, position_params
from alibi.model.layers import STACKED
from alibi.model.loss import Head, TiedEmbedding
from alibi.model.positions import randomised_positions
from alibi.parallel.sharding import batch_parts, split_batch
from alibi.positions import PositionMethod, make_position
from alibi.positions.base import Params
from alibi.positions.shapes import KnownPositions

UNKNOWN_VOCABULARY = 2**31 - 1  # room for any cutoffs


class DecoderLM(nn.Module):
    """A causal language model (paper, section 2.1).

    Attributes:
      config: sizes, rates, and the way of computing; parameters, norms, logits, softmax and loss
        are float32.
      position: the position method.
      vocab_size: tokens of the vocabulary.
      sharding: of the batch dimension of activations on the devices; None: chosen by the
        compiler, which may gather the batch if parameters are split too.
    """

    config: ModelConfig
    position: PositionMethod
    vocab_size: int
    sharding: NamedSharding | None = None

    def setup(self) -> None:
        config = self.config
        self.vocabulary = self._make_vocabulary()
        self.position_params = position_params(self, self.position.init)
        if config.scan_layers:
            self.stacked = self._stacked_params()
        else:
            block = nn.remat(Block, static_argnums=(2, 5, 6)) if config.remat else Block
            self.layers = [block(config, self.sharding) for _ in range(config.num_layers)]
        self.last_norm = (
            nn.LayerNorm(config.norm_epsilon, name="final_norm") if config.final_norm else None
        )
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.slots = SlotsCache()

    def _make_vocabulary(self) -> TiedEmbedding | AdaptiveEmbedding:
        config, products = self.config, Products.of(self.config.products)
        chunk = config.logits_chunk * batch_parts(self.sharding)
        head = Head(DTYPES[config.dtype], products, chunk, self.sharding)
        if config.embedding == "adaptive":
            return AdaptiveEmbedding(self.vocab_size, config, head, name="adaptive")
        shape = (self.vocab_size, config.width)
        return TiedEmbedding(
            self.param("embedding", nn.initializers.normal(config.width**-0.5), shape), head
        )

    def check_length(self, length: int) -> None:
        """Raises ValueError if the model is not defined for sequences of `length` tokens."""
        most = self.config.max_position
        if most and length > most:
            raise ValueError(
                f"model.max_position={most} is less than a sequence of {length} tokens; use fewer"
            )
        self.position.check_length(length)

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        *,
        positions: Int[Array, "*batch length"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        deterministic: bool = True,
        decode: bool = False,
        total: int | None = None,
    ) -> Float[Array, "batch length vocabulary"]:
        """Returns logits of the token after each of `tokens`, float32; log-probabilities with
        adaptive embeddings.

        Args:
          positions: integers `[length]` or `[batch, length]`; by default 0, 1, ...
          segment_ids: a token sees only tokens of its own segment (packed documents,
            padding); give positions too if they restart.
          deterministic: no dropout; otherwise `rngs={"dropout": key}` is needed.
          decode: append the tokens of each sequence to a key-value cache, the collection
            "cache" of the variables, and attend to the whole cache: a prompt, in one piece or
            several, then token by token. `init(..., decode=True)` makes the cache, with a slot
            for each token that it is given; `alibi.generation` does both steps. Each sequence
            continues at its own position; positions below 0 are padding, which no token sees.
            Features beyond the last slot are NaN.
          total: with `init(..., decode=True)`, the most tokens of a sequence, which methods
            that depend on the length use (None: the slots). With more tokens than slots the
            cache is a ring, which needs a window.

        Raises:
          ValueError: a sequence longer than the position method is defined for, more tokens
            than the cache has room for, or `decode` with stacked layers (`scan_layers`).
        """
        features = self.features(
            tokens,
            positions=positions,
            segment_ids=segment_ids,
            deterministic=deterministic,
            decode=decode,
            total=total,
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
        """Returns -log p of each target in nats, float32; 0 for negative targets.

        The targets belong to the last inputs: with fewer targets than inputs, the last layer's
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
        total: int | None = None,
        last: int | None = None,
    ) -> Float[Array, "batch last width"]:
        """Returns the input of the softmax layer for the `last` last tokens (None: all), float32;
        see `__call__`.
        """
        config, length = self.config, tokens.shape[1]
        slots = self._slots(tokens, segment_ids, total) if decode else None
        total = length if slots is None else slots.total
        self.check_length(total)
        position = self.position if config.max_position else self.position.at_length(total)
        in_order: KnownPositions = (
            np.arange(length) if slots is None else slots.next_positions(length)
        )
        read = in_order if positions is None else positions
        if slots is not None:
            read = jnp.broadcast_to(read, tokens.shape)
        # A table has no row for the padding of a prompt, and NaN would reach others even with a
        # weight of zero.
        placed = read if slots is None else jnp.maximum(read, 0)
        # Every model draws this key, so that dropout doesn't depend on `max_position`.
        key = self.make_rng("dropout") if not deterministic and self.has_rng("dropout") else None
        if config.max_position:
            placed = randomised_positions(placed, total, config.max_position, tokens.shape[0], key)
        x = self.vocabulary.embed(tokens) * jnp.sqrt(config.width).astype(jnp.float32)
        x = position.embed(self.position_params, x, jnp.asarray(placed))
        x = self.embedding_dropout(split_batch(x, self.sharding), deterministic)
        reading = None
        if slots is not None:
            reading = Reading(slots, self.slots.append(slots, read, placed), jnp.asarray(read) < 0)
        # None, not an array, if they are known: a recomputed layer would trace the array.
        ascending = positions is None and slots is None
        call = BlockCall(None if placed is in_order else placed, segment_ids, reading, ascending)
        layers = self._scanned if config.scan_layers else self._unrolled
        x = layers(x, position, call, deterministic, length if last is None else last)
        if slots is not None:
            # Results beyond the cache are wrong, and must not look right.
            x = jnp.where(slots.holds(length), x, jnp.nan)
        return x if self.last_norm is None else Products.of(config.products).norm(self.last_norm, x)

    def _slots(
        self, tokens: Int[Array, "batch length"], segment_ids: Array | None, total: int | None
    ) -> Slots:
        """Returns the cache's slots before `tokens` are read."""
        if segment_ids is not None:
            raise ValueError(
                "decode=True takes no segment_ids: decode each document with a cache of its own"
            )
        if not self.position.causal:
            raise ValueError(
                "decode=True needs a position method with causal=True: later tokens aren't there yet"
            )
        if self.config.scan_layers:
            raise ValueError(
                "decode=True needs layers with parameters of their own; see alibi.generation.unrolled"
            )
        return self.slots(tokens, total, self.config.window)

    def _unrolled(
        self,
        x: Float[Array, "batch length width"],
        position: PositionMethod,
        call: BlockCall,
        deterministic: bool,
        last: int,
    ) -> Float[Array, "batch last width"]:
        """Returns the output of layers with parameters of their own; the last layer only for the
        `last` last tokens.
        """
        for layer in self.layers[:-1]:
            x = layer(x, position, self.position_params, call, deterministic, x.shape[1])
        return self.layers[-1](x, position, self.position_params, call, deterministic, last)

    def _scanned(
        self,
        x: Float[Array, "batch length width"],
        position: PositionMethod,
        call: BlockCall,
        deterministic: bool,
        last: int,
    ) -> Float[Array, "batch last width"]:
        """Returns the output of layers with stacked parameters: a loop, which is compiled as a
        single layer.

        With fewer queries than keys the last layer is a program of its own.
        """
        block, stack = Block(self.config, self.sharding, parent=None), self.stacked
        key = None if deterministic or not self.has_rng("dropout") else self.make_rng("dropout")
        looped = self.config.num_layers - (last < x.shape[1])

        def layer(x: Array, number: int | Array, params: Params, last: int) -> Any:
            rngs = {} if key is None else {"dropout": jax.random.fold_in(key, number)}
            arguments = (x, position, self.position_params, call, deterministic, last)
            return block.apply({"params": params}, *arguments, rngs=rngs)

        def step(x: Array, numbered: tuple[Array, Params | None]) -> tuple[Array, None]:
            number, params = numbered
            if params is None:
                params = jax.tree.map(
                    lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), stack
                )
            return layer(x, number, params, x.shape[1]), None

        if looped:
            body = jax.checkpoint(step, prevent_cse=False) if self.config.remat else step
            # A part of the stack would be copied for the loop, so each step takes its layer from
            # the whole.
            params = stack if looped == self.config.num_layers else None
            x, _ = jax.lax.scan(body, x, (jnp.arange(looped), params))
        if looped < self.config.num_layers:
            x = layer(x, looped, jax.tree.map(lambda leaf: leaf[looped], stack), last)
        return x

    def _stacked_params(self) -> Params:
        """Returns the parameters of all layers, each leaf `[layers, ...]`."""
        layers = self.config.num_layers
        if self.has_variable("params", STACKED):
            params: Params = self.get_variable("params", STACKED)
            counts = {leaf.shape[0] for leaf in jax.tree.leaves(params)}
            if counts != {layers}:
                raise ValueError(
                    f"the parameters are those of {', '.join(map(str, sorted(counts)))} layers, and the model has "
                    f"{layers}; set model.num_layers to theirs"
                )
            return params
        block = Block(self.config, self.sharding, parent=None)
        x, call = jnp.zeros((1, 1, self.config.width)), BlockCall(None, None, None)

        def init(key: PRNGKeyArray) -> Params:
            return block.init(key, x, self.position, self.position_params, call, True, 1)["params"]

        return self.param(STACKED, lambda key: jax.vmap(init)(jax.random.split(key, layers)))


class SlotsCache(nn.Module):
    """The slots of the key-value cache; the layers share them."""

    @nn.compact
    def __call__(self, tokens: Int[Array, "batch length"], total: int | None, window: int) -> Slots:
        """Returns the slots before `tokens` are read; `init` makes a slot for each token."""
        started, (batch, length) = self.has_variable("cache", "slots"), tokens.shape
        slots: Slots = self.variable(
            "cache", "slots", lambda: Slots.empty(batch, length, total or length)
        ).value
        if started:
            slots.check_room(length, window)
        return slots

    def append(self, slots: Slots, positions: KnownPositions, placed: KnownPositions) -> Slots:
        """Stores these tokens in the slots, and returns the result."""
        if self.is_initializing():
            return slots
        after = slots.append(jnp.asarray(positions), jnp.asarray(placed))
        self.put_variable("cache", "slots", after)
        return after


def build_model(
    config: Config, vocab_size: int, *, sharding: NamedSharding | None = None
) -> DecoderLM:
    """Returns the model of `config`.

    Args:
      vocab_size: tokens of the text's vocabulary; `UNKNOWN_VOCABULARY` before the text is known.
      sharding: see `DecoderLM`; each part of the batch may hold the logits of
        `config.model.logits_chunk` tokens.

    Raises:
      ValueError: see `ModelConfig` and `make_position`; cutoffs that don't fit the vocabulary;
        `max_position` below the training length; `logit_scale` with a training length of 1 or an
        objective that sees both sides.
    """
    model = config.model
    if 0 < model.max_position < config.train_length:
        raise ValueError(
            f"model.max_position={model.max_position} must be at least train_length={config.train_length}, or 0"
        )
    if model.logit_scale and config.train_length < 2:
        raise ValueError(
            f"model.logit_scale={model.logit_scale} needs a train_length of at least 2: ln 1 is 0"
        )
    if model.logit_scale and not config.objective.causal:
        raise ValueError(
            f"model.logit_scale={model.logit_scale} counts the tokens before each; leave it empty with "
            f"objective={config.objective.name}, which sees both sides"
        )
    if model.logit_scale and config.data.isolate_documents == "through":
        raise ValueError(
            f"model.logit_scale={model.logit_scale} counts visible tokens by their positions; use "
            "data.isolate_documents=restart, or leave one out"
        )
    position = make_position(
        config.position,
        num_heads=model.num_heads,
        head_dim=model.head_dim,
        width=model.width,
        train_length=model.max_position or config.train_length,  # positions that training covers
        causal=config.objective.causal,
        options=config.position_options,
    )
    position.check_length(model.max_position)
    if model.embedding == "adaptive":
        check_bands(model, vocab_size)
        if config.objective.added_tokens:
            raise ValueError(
                f"model.embedding=adaptive has no room for the mask token of objective={config.objective.name}: it "
                "would be the rarest word; use model.embedding=tied"
            )
    return DecoderLM(model, position, vocab_size + config.objective.added_tokens, sharding)


def evaluated(model: DecoderLM, config: Config) -> DecoderLM:
    """Returns the model for evaluation: its products are of `config.eval.dtype`."""
    return model.clone(config=dataclasses.replace(model.config, dtype=config.eval.dtype))


def param_shapes(model: DecoderLM) -> PyTree:
    """Returns shapes and dtypes of the parameters; allocates nothing."""
    return jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    )


def count_parameters(model: DecoderLM) -> int:
    """Returns the number of learned numbers; allocates nothing."""
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(model)))
