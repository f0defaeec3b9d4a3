"""A decoder language model for any position method, with tied or adaptive embeddings."""

import dataclasses
from collections.abc import Callable
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
from alibi.model.adaptive import AdaptiveEmbedding, Bands
from alibi.model.block import Block, BlockCall
from alibi.model.config import DTYPES
from alibi.model.layers import STACKED, layer_name
from alibi.model.loss import Head, TiedEmbedding
from alibi.parallel.sharding import batch_parts, split_batch
from alibi.positions import PositionMethod, make_position
from alibi.positions.base import Params
from alibi.positions.bias import KnownPositions

UNKNOWN_VOCABULARY = 2**31 - 1  # room for any cutoffs


class DecoderLM(nn.Module):
    """A causal language model (paper, section 2.1).

    Attributes:
      config: sizes, rates, and how it is computed; parameters, norms, logits, softmax and loss are float32.
      position: the position method.
      vocab_size: tokens of the vocabulary.
      sharding: how the batch dimension of activations lies on the devices; None: as
        the compiler chooses, which may gather the batch where parameters are split too.
    """

    config: ModelConfig
    position: PositionMethod
    vocab_size: int
    sharding: NamedSharding | None = None

    def setup(self) -> None:
        config = self.config
        self.vocabulary = self._make_vocabulary()
        self.position_params = self.param("position", self.position.init) if self.position.learns else {}
        if config.scan_layers:
            self.stacked = self._stacked_params()
        else:
            block = nn.remat(Block, static_argnums=(2, 5, 6)) if config.remat else Block
            self.layers = [block(config, self.sharding) for _ in range(config.num_layers)]
        self.last_norm = nn.LayerNorm(config.norm_epsilon, name="final_norm") if config.final_norm else None
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.slots = SlotsCache()

    def with_vocabulary(self, vocab_size: int) -> "DecoderLM":
        """The model for texts of this vocabulary; ValueError where the cutoffs of adaptive embeddings don't fit it."""
        if self.config.embedding == "adaptive":
            Bands.of(self.config).check(vocab_size, self.config.width)
        return self.clone(vocab_size=vocab_size)

    def _make_vocabulary(self) -> TiedEmbedding | AdaptiveEmbedding:
        config, products = self.config, Products.of(self.config.products)
        chunk = config.logits_chunk * batch_parts(self.sharding)
        head = Head(DTYPES[config.dtype], products, chunk, self.sharding)
        if config.embedding == "adaptive":
            return AdaptiveEmbedding(self.vocab_size, config.width, Bands.of(config), head, name="adaptive")
        shape = (self.vocab_size, config.width)
        return TiedEmbedding(self.param("embedding", nn.initializers.normal(config.width**-0.5), shape), head)

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
        """Logits of the token after each of `tokens`, float32; adaptive embeddings give log-probabilities.

        Args:
          positions: integers `[length]` or `[batch, length]`; by default 0, 1, ...
          segment_ids: a token sees only tokens of its own segment (packed documents,
            padding); positions must then be given where they restart.
          deterministic: no dropout; otherwise `rngs={"dropout": key}` is needed.
          decode: append any number of tokens of each sequence to a key-value cache, the
            collection "cache" of the variables, and attend to all that is there: a prompt, in
            one piece or several, then token by token. `init(..., decode=True)` makes the
            cache, with as many slots as it is given tokens; `alibi.generation` has both steps.
            Each sequence goes on at its own position; those below 0 are padding, which no
            token sees. Features beyond the last slot are NaN.
          total: where the cache is made, the tokens that there will be at most, by which
            methods go that depend on the length (None: as many as slots). More than slots
            make it a ring, which a window allows.

        Raises:
          ValueError: a sequence longer than the position method is defined for, or more tokens
            at one time than the cache has room for.
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
        total: int | None = None,
        last: int | None = None,
    ) -> Float[Array, "batch last width"]:
        """What the softmax layer gets for the last `last` tokens (None: all), float32; arguments as in `__call__`."""
        length = tokens.shape[1]
        slots = self._slots(tokens, segment_ids, total) if decode else None
        position = self.position.at_length(slots.total if slots is not None else length)
        position.check_length(slots.total if slots is not None else length)
        in_order: KnownPositions = np.arange(length) if slots is None else slots.next_positions(length)
        read = in_order if positions is None else positions
        if slots is not None:
            read = jnp.broadcast_to(read, tokens.shape)
        # A table has no row for the padding of a prompt, and what is NaN would reach others even with a weight of zero.
        inside = read if slots is None else jnp.maximum(read, 0)
        key = self.make_rng("dropout") if not deterministic and self.has_rng("dropout") else None
        stand = position.place(inside, tokens.shape[0], key)
        x = self.vocabulary.embed(tokens) * jnp.sqrt(self.config.width).astype(jnp.float32)
        x = position.embed(self.position_params, x, jnp.asarray(stand))
        x = self.embedding_dropout(split_batch(x, self.sharding), deterministic)
        reading = None
        if slots is not None:
            reading = Reading(slots, self.slots.append(slots, read, stand), jnp.asarray(read) < 0)
        # None, not an array, where they are known: a layer that is recomputed would trace it, and no longer know it.
        # A method places the tokens of a whole sequence in their order.
        ascending = positions is None and slots is None
        call = BlockCall(None if stand is in_order else stand, segment_ids, reading, ascending)
        x = self._layers(x, position, call, deterministic, length if last is None else last)
        if slots is not None:
            # Beyond the cache nothing is right, so that it must not look as if it were.
            x = jnp.where(slots.holds(length), x, jnp.nan)
        return x if self.last_norm is None else Products.of(self.config.products).norm(self.last_norm, x)

    def _slots(self, tokens: Int[Array, "batch length"], segment_ids: Array | None, total: int | None) -> Slots:
        """The cache's slots, before `tokens` are read."""
        if segment_ids is not None:
            raise ValueError("decode=True takes no segment_ids: decode each document with a cache of its own")
        if not self.position.causal:
            raise ValueError("decode=True needs a position method with causal=True: later tokens aren't there yet")
        return self.slots(tokens, total, self.config.window)

    def _layers(
        self,
        x: Float[Array, "batch length width"],
        position: PositionMethod,
        call: BlockCall,
        deterministic: bool,
        last: int,
    ) -> Float[Array, "batch last width"]:
        """All layers, the last one for the `last` last tokens alone."""
        first = 0
        if self.config.scan_layers and call.reading is None:
            # Where fewer tokens go through the last layer, it is a program of its own.
            first = self.config.num_layers - (last < x.shape[1])
            x = self._scanned(x, position, call, deterministic, first) if first else x
        for number in range(first, self.config.num_layers):
            kept = last if number == self.config.num_layers - 1 else x.shape[1]
            layer = self._layer(number, deterministic) if self.config.scan_layers else self.layers[number]
            x = layer(x, position, self.position_params, call, deterministic, kept)
        return x

    def _stacked_params(self) -> Params:
        """The parameters of all layers, each leaf `[layers, ...]`."""
        if self.has_variable("params", STACKED):
            params: Params = self.get_variable("params", STACKED)
            counts = {leaf.shape[0] for leaf in jax.tree.leaves(params)}
            if counts != {self.config.num_layers}:
                raise ValueError(
                    f"the parameters are those of {', '.join(map(str, sorted(counts)))} layers, and the model has "
                    f"{self.config.num_layers}; set model.num_layers to theirs"
                )
            return params
        config, block = self.config, Block(self.config, self.sharding, parent=None)
        arguments = jnp.zeros((1, 1, config.width)), self.position, self.position_params, BlockCall(None, None, None)

        def init(key: PRNGKeyArray) -> Params:
            keys = jax.random.split(key, config.num_layers)
            return jax.vmap(lambda key: block.init(key, *arguments, True, 1)["params"])(keys)

        return self.param(STACKED, init)

    def _layer(self, number: int, deterministic: bool) -> Callable[..., Array]:
        """One of the stacked layers, with its dropout and its part of the cache."""
        block, rngs = Block(self.config, self.sharding, parent=None), {}
        if not deterministic and self.has_rng("dropout"):
            rngs = {"dropout": self.make_rng("dropout")}
        params = jax.tree.map(lambda leaf: leaf[number], self.stacked)

        def apply(x: Array, position: PositionMethod, position_params: Params, call: BlockCall, *how: Any) -> Array:
            if call.reading is None:

                def layer(params: Params, x: Array) -> Any:
                    return block.apply({"params": params}, x, position, position_params, call, *how, rngs=rngs)

                return (jax.checkpoint(layer) if self.config.remat else layer)(params, x)
            variables = {"params": params, "cache": self.get_variable("cache", layer_name(number), {})}
            x, updated = block.apply(variables, x, position, position_params, call, *how, mutable=["cache"])
            self.put_variable("cache", layer_name(number), updated["cache"])
            return x

        return apply

    def _scanned(
        self,
        x: Float[Array, "batch length width"],
        position: PositionMethod,
        call: BlockCall,
        deterministic: bool,
        count: int,
    ) -> Float[Array, "batch length width"]:
        """The first `count` layers as a loop over their parameters, of which one layer is compiled."""
        block, stack = Block(self.config, self.sharding, parent=None), self.stacked
        key = None if deterministic or not self.has_rng("dropout") else self.make_rng("dropout")

        def layer(x: Array, numbered: tuple[Array, Any]) -> tuple[Array, None]:
            number, params = numbered
            if params is None:
                params = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), stack)
            rngs = {} if key is None else {"dropout": jax.random.fold_in(key, number)}
            arguments = (x, position, self.position_params, call, deterministic, x.shape[1])
            after: Any = block.apply({"params": params}, *arguments, rngs=rngs)
            return after, None

        body = jax.checkpoint(layer, prevent_cse=False) if self.config.remat else layer
        # A part of the stack would be copied for the loop, so each step takes its layer from the whole.
        params = stack if count == self.config.num_layers else None
        return jax.lax.scan(body, x, (jnp.arange(count), params))[0]


class SlotsCache(nn.Module):
    """The slots of the key-value cache, which all layers share."""

    @nn.compact
    def __call__(self, tokens: Int[Array, "batch length"], total: int | None, window: int) -> Slots:
        """The slots before `tokens` are read; where the cache is being made, as many as there are tokens."""
        started, (batch, length) = self.has_variable("cache", "slots"), tokens.shape
        slots: Slots = self.variable("cache", "slots", lambda: Slots.empty(batch, length, total or length)).value
        if started:
            slots.check_room(length, window)
        return slots

    def append(self, slots: Slots, positions: KnownPositions, stand: KnownPositions) -> Slots:
        """The slots with these tokens, which the cache holds from now on."""
        if self.is_initializing():
            return slots
        after = slots.append(jnp.asarray(positions), jnp.asarray(stand))
        self.put_variable("cache", "slots", after)
        return after


def build_model(config: Config, vocab_size: int, *, sharding: NamedSharding | None = None) -> DecoderLM:
    """The model that `config` describes.

    Args:
      vocab_size: `UNKNOWN_VOCABULARY` as long as the text isn't known; `DecoderLM.with_vocabulary` then gives it.
      sharding: that of `DecoderLM`; each part of the batch may hold the logits of
        `config.model.logits_chunk` tokens.

    Raises:
      ValueError: num_heads that doesn't divide width, cutoffs that don't fit the
        vocabulary, a number out of its range, an unknown name of a choice, position
        method or option, or a window that the position method can't take.
    """
    model = config.model
    position = make_position(
        config.position,
        num_heads=model.num_heads,
        head_dim=model.head_dim,
        width=model.width,
        train_length=config.train_length,
        options=config.position_options,
    )
    if model.window and position.no_window:
        raise ValueError(
            f"a window of {model.window} can't be put on position={config.position} with these options: "
            f"{position.no_window}; leave it out (model.window=0, in an evaluation --window=0)"
        )
    return DecoderLM(model, position, UNKNOWN_VOCABULARY, sharding).with_vocabulary(vocab_size)


def evaluated(model: DecoderLM, config: Config) -> DecoderLM:
    """The model as evaluations compute it: with products of `config.eval.dtype`, whatever it is trained with."""
    return model.clone(config=dataclasses.replace(model.config, dtype=config.eval.dtype))


def param_shapes(model: DecoderLM) -> PyTree:
    """Shapes and dtypes of the parameters; nothing is allocated."""
    return jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"])


def count_parameters(model: DecoderLM) -> int:
    """How many numbers the model learns; nothing is allocated."""
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(model)))
