"""A language model for any position method, with tied, untied or adaptive embeddings."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from alibi.attention.cache import Reading, Slots
from alibi.config import Config, ModelConfig
from alibi.config.fields import as_text
from alibi.model.adaptive import AdaptiveEmbedding, check_bands
from alibi.model.attention import check_backend
from alibi.model.block import ACTIVATIONS, Block, BlockCall, module_params
from alibi.model.initialization import INITIALIZATIONS
from alibi.model.layers import STACKED
from alibi.model.loss import Embedding, Head, Losses, TokenLoss, cross_entropy
from alibi.model.norms import is_norm_sum, make_norm
from alibi.model.positions import (
    LEARNED_SCALES,
    LayerKind,
    init_position,
    layer_pattern,
    randomised_positions,
)
from alibi.numerics.products import Products
from alibi.objectives import make_objective
from alibi.parallel.sharding import batch_parts, check_auto, split_batch
from alibi.positions import PositionMethod
from alibi.positions.base import Params
from alibi.positions.shapes import KnownPositions

UNKNOWN_VOCABULARY = 2**31 - 1  # room for any cutoffs


class DecoderLM(nn.Module):
    """A language model (paper, section 2.1), causal unless its objective sees both sides.

    Attributes:
      config: sizes, rates, and how to compute. Parameters, norms, logits, softmax and loss are float32.
      pattern: the kinds of layers. Layer i has kind i modulo their number.
      vocab_size: tokens in the vocabulary, the added ones included.
      sharding: how activations are split over devices. Defaults to the compiler's choice, which may
        gather the batch if parameters are split too.
      causal: tokens see no later ones, except those in `reach`. Defaults to the position methods' own.
      added_tokens: the vocabulary's last tokens, which an objective reads and no text has. They are
        never generated.

    Example:
      >>> import jax
      >>> from alibi import make_position
      >>> from alibi.config import ModelConfig
      >>> from alibi.model.positions import LayerKind
      >>> sizes = {"num_heads": 2, "head_dim": 8, "width": 16}
      >>> position = make_position("alibi", **sizes, train_length=16, options={})
      >>> config = ModelConfig(num_layers=2, width=16, num_heads=2, feed_forward=32)
      >>> model = DecoderLM(config, (LayerKind(position),), vocab_size=256)
      >>> tokens = jax.numpy.arange(12)[None]
      >>> variables = model.init(jax.random.key(0), tokens)
      >>> model.apply(variables, tokens).shape  # batch, length, vocabulary
      (1, 12, 256)
    """

    config: ModelConfig
    pattern: tuple[LayerKind, ...]
    vocab_size: int
    sharding: NamedSharding | None = None
    causal: bool | None = None
    added_tokens: int = 0

    def setup(self) -> None:
        config = self.config
        self.products = Products.of(config.products, jnp.dtype(config.dtype))
        self.vocabulary = self._make_vocabulary()
        self.types = None
        if config.token_types:
            init = nn.initializers.normal(config.width**-0.5, jnp.float32)
            self.types = self.param("token_types", init, (config.token_types, config.width))
        self.shared = self._shared_params()
        policies = jax.checkpoint_policies
        self.kept = policies.save_from_both_policies(
            policies.save_only_these_names(*config.kept), is_norm_sum
        )
        if config.scan_layers:
            self.stacked = self._stacked_params()
        else:
            remat = functools.partial(nn.remat, static_argnums=(2, 5, 6), policy=self.kept)
            block = remat(Block) if config.remat else Block
            self.layers = [block(config, self.sharding) for _ in range(config.num_layers)]
        self.first_norm, self.last_norm = (
            make_norm(config, name) if wanted else None
            for name, wanted in (
                ("embedding_norm", config.embedding_norm),
                ("final_norm", config.final_norm),
            )
        )
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.slots = SlotsCache()

    def _make_vocabulary(self) -> Embedding | AdaptiveEmbedding:
        config = self.config
        chunk = config.logits_chunk * batch_parts(self.sharding)
        head = Head(jnp.dtype(config.dtype), self.products, chunk, self.sharding)
        if config.embedding == "adaptive":
            return AdaptiveEmbedding(self.vocab_size, config, head, name="adaptive")
        init = nn.initializers.normal(config.width**-0.5, jnp.float32)
        shape = (max(self.vocab_size, config.vocab_rows), config.width)
        embedding = self.param("embedding", init, shape)
        output = embedding if config.embedding == "tied" else self.param("head", init, shape)
        if config.embedding == "normalised":
            # 1e-24: a row of zeros has a gradient, too
            squares = jnp.sum(jnp.square(output.astype(jnp.float32)), axis=-1, keepdims=True)
            output = output * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))
        if not config.masked_head:
            return Embedding(embedding, output, head, config.logits_scale)
        self.head_dense = nn.Dense(
            config.width,
            dtype=self.products.layer_dtype,
            kernel_init=INITIALIZATIONS[config.initialization].feed_forward,
            dot_general=self.products.dot_general,
        )
        self.head_norm = make_norm(config, "head_norm")
        bias = self.param("head_bias", nn.initializers.zeros, shape[:1], jnp.float32)
        return Embedding(
            embedding, output, head, config.logits_scale, bias, self._before_masked_softmax
        )

    def _before_masked_softmax(
        self, features: Float[Array, "batch length width"]
    ) -> Float[Array, "batch length width"]:
        """Returns the input to the softmax's matrix with `model.masked_head`."""
        activated = ACTIVATIONS[self.config.activation](self.head_dense(features))
        return self.products.norm(self.head_norm, activated)

    def _shared_params(self) -> tuple[Params, ...]:
        """Returns, for each kind of layer, the parameters that its position method shares.

        The model's parameters "position" belong to its method. Several methods have theirs under their
        numbers.
        """
        methods = self.methods
        if len(methods) == 1:
            return (module_params(self, methods[0].init),) * len(self.pattern)

        def init(key: PRNGKeyArray) -> Params:
            each = {
                str(index): method.init(jax.random.fold_in(key, index))
                for index, method in enumerate(methods)
            }
            return {index: params for index, params in each.items() if params}

        made = module_params(self, init)
        return tuple(made.get(str(methods.index(kind.position)), {}) for kind in self.pattern)

    @property
    def methods(self) -> tuple[PositionMethod, ...]:
        """The different position methods, in the layers' order."""
        return tuple(dict.fromkeys(kind.position for kind in self.pattern))

    def method_pairs(self, other: "DecoderLM") -> set[tuple[PositionMethod, PositionMethod]]:
        """Returns the pairs of position methods that the same layer has in both models."""
        ours, theirs = self.pattern, other.pattern
        return {
            (ours[layer % len(ours)].position, theirs[layer % len(theirs)].position)
            for layer in range(self.config.num_layers)
        }

    def method_of(self, path: Sequence[str]) -> PositionMethod | None:
        """Returns the position method that owns the parameter at this path, or None."""
        if "position" not in path:
            return None
        if path[0] == "position":
            return self.methods[int(path[1]) if len(self.methods) > 1 else 0]
        # stacked layers with parameters have the same method
        layer = path[0].removeprefix(STACKED).removeprefix("_")
        return self.pattern[int(layer or 0) % len(self.pattern)].position

    def within_limits(self, params: PyTree) -> PyTree:
        """Returns the parameters, clipped to the limits that position methods declare."""

        def clip(path: tuple[Any, ...], leaf: Array) -> Array:
            names = [entry.key for entry in path]
            method = self.method_of(names)
            limits = None if method is None else method.limits.get(names[-1])
            return leaf if limits is None else jnp.clip(leaf, *limits)

        return jax.tree.map_with_path(clip, params)

    def writable(self, logits: Float[Array, "*batch rows"]) -> Float[Array, "*batch rows"]:
        """Returns the logits with -inf for the objective's added tokens, which no text has."""
        added = slice(self.vocab_size - self.added_tokens, self.vocab_size)
        return logits.at[..., added].set(-jnp.inf) if self.added_tokens else logits

    def check_length(self, length: int) -> None:
        """Raises ValueError if the model is not defined for sequences with `length` tokens."""
        if length > (last := jnp.iinfo(jnp.int32).max):
            raise ValueError(
                f"a sequence of {length:,} tokens is too long: positions end at {last:,}; use fewer"
            )
        most = self.config.max_position
        if most and length > most:
            raise ValueError(
                f"model.max_position={most} is less than a sequence of {length} tokens; use fewer"
            )
        for method in self.methods:
            method.check_length(length)

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        *,
        positions: Int[Array, "*batch length"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        token_types: Int[Array, "batch length"] | None = None,
        deterministic: bool = True,
        decode: bool = False,
        fresh: bool = False,
        total: int | None = None,
        chunk: int | None = None,
    ) -> Float[Array, "batch length vocabulary"]:
        """Returns logits for each input's target (the next token, or a masked one), float32. They are
        log-probabilities with adaptive embeddings.

        Args:
          positions: integers `[length]` or `[batch, length]`. Defaults to 0, 1, ...
          segment_ids: a token sees only tokens in its own segment (packed documents, padding). Give
            positions too if they restart.
          token_types: with `model.token_types`, the type of each token. Defaults to 0.
          deterministic: no dropout. Otherwise `rngs={"dropout": key}` is needed.
          decode: append each sequence's tokens to a key-value cache, the collection "cache" in the
            variables, and attend to the whole cache: a prompt, in one piece or several, then token by
            token. `init(..., decode=True)` makes the cache, with a slot for each token. Each sequence
            continues at its own position. Positions below 0 are padding, which no token sees. Features
            beyond the last slot are NaN. `alibi.generation` does all this.
          fresh: the cache is empty, so these tokens attend to each other alone, as in a pass without a
            cache. Features are NaN if it is not empty.
          total: with `init(..., decode=True)`, the longest sequence, for methods that depend on the
            length. Defaults to the slots. If it exceeds the slots, the cache is a ring, which needs a
            window.
          chunk: with `init(..., decode=True)`, the most tokens read at a time. A layer under a window
            then has slots for a window and a chunk, if these are fewer.

        Raises:
          ValueError: a sequence longer than the position method is defined for, more tokens than the
            cache has room for, arrays split over Explicit axes of a mesh, or `decode` with stacked layers
            (`scan_layers`).
        """
        features = self.features(
            tokens,
            positions=positions,
            segment_ids=segment_ids,
            token_types=token_types,
            deterministic=deterministic,
            decode=decode,
            fresh=fresh,
            total=total,
            chunk=chunk,
        )
        return self.vocabulary.logits(features, deterministic)

    def token_nll(
        self,
        inputs: Int[Array, "batch length"],
        targets: Int[Array, "batch scored"],
        **options: Any,
    ) -> Float[Array, "batch scored"]:
        """Returns each target's -log p in nats, float32, and 0 for negative targets. Inputs and options
        are as in `token_losses`.
        """
        return self.token_losses(inputs, targets, **options)[1]

    def token_losses(
        self,
        inputs: Int[Array, "batch length"],
        targets: Int[Array, "batch scored"],
        *,
        positions: Int[Array, "*batch length"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        reach: Int[Array, "batch length"] | None = None,
        deterministic: bool = True,
        loss: TokenLoss = cross_entropy,
        summed: bool = False,
    ) -> tuple[Losses, Losses]:
        """Returns each target's loss and NLL, or their sums (`summed`), as `Head.token_losses`.

        Targets belong to the last inputs. With fewer targets than inputs, the last layer's queries and
        the softmax are computed only for these. Never holds all logits.
        """
        features = self.features(
            inputs,
            positions=positions,
            segment_ids=segment_ids,
            reach=reach,
            deterministic=deterministic,
            last=targets.shape[-1],
        )
        return self.vocabulary.token_losses(features, targets, loss, deterministic, summed)

    def features(
        self,
        tokens: Int[Array, "batch length"],
        *,
        positions: Int[Array, "*batch length"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        token_types: Int[Array, "batch length"] | None = None,
        reach: Int[Array, "batch length"] | None = None,
        deterministic: bool = True,
        decode: bool = False,
        fresh: bool = False,
        total: int | None = None,
        chunk: int | None = None,
        last: int | None = None,
    ) -> Float[Array, "batch last width"]:
        """Returns the last layer's output, normed, for the `last` last tokens, float32. Arguments are as
        in `__call__`, and `last` defaults to all tokens.

        `reach` is the last position that each token sees under the causal mask, and defaults to its own.
        It is refused with `decode`. Without `decode`, `total` is the length of a sequence that begins with
        these tokens, for methods that depend on it.
        """
        check_auto((tokens, self.variables))
        config, length = self.config, tokens.shape[1]
        caches = self._caches(tokens, segment_ids, reach, total, chunk) if decode else None
        slots = None if caches is None else next(iter(caches.values()))
        total = (total or length) if slots is None else slots.total
        self.check_length(total)
        pattern = self.pattern
        if not config.max_position:
            pattern = tuple(kind.at_length(total) for kind in pattern)
        in_order: KnownPositions = (
            np.arange(length) if slots is None or fresh else slots.next_positions(length)
        )
        in_sequence = in_order if positions is None else positions
        # A table has no row for padding in a prompt, and NaN would reach others even with weight zero.
        padded = slots is not None and positions is not None
        placed = stand = jnp.maximum(in_sequence, 0) if padded else in_sequence
        # Every model draws this key, so that dropout doesn't depend on `max_position`.
        key = self.make_rng("dropout") if not deterministic and self.has_rng("dropout") else None
        draw = functools.partial(randomised_positions, total, config, tokens.shape[0], key)
        place = draw() if config.max_position else None
        if place is not None:
            placed = place(stand)
        scale = jnp.asarray(config.embedding_scale or config.width**0.5, jnp.float32)
        x = self.vocabulary.embed(tokens).astype(jnp.float32) * scale
        if self.types is not None:
            types = jnp.zeros_like(tokens) if token_types is None else token_types
            x = x + self.types[types].astype(jnp.float32)
        x = pattern[0].position.embed(self.shared[0], x, jnp.asarray(placed))
        if self.first_norm is not None:
            x = self.products.norm(self.first_norm, x)
        x = self.embedding_dropout(split_batch(x, self.sharding), deterministic)
        reading = None
        if caches is not None:
            in_sequence = jnp.broadcast_to(in_sequence, tokens.shape)
            after = self.slots.append(caches, in_sequence)
            padding = in_sequence < 0 if padded else None
            reading = {
                window: Reading(before, after[window], padding, fresh)
                for window, before in caches.items()
            }
        ascending = positions is None and (slots is None or fresh)
        # None, not an array, if they are known: a recomputed layer would trace the array.
        traced = None if placed is in_order and ascending else stand
        call = BlockCall(traced, segment_ids, reading, ascending, reach, self.causal)
        if place is not None and not config.layer_draws:
            call = call.placed(place)

        def in_layer(depth: int | Array) -> BlockCall:
            return call.placed(draw(depth)) if config.layer_draws else call

        layers = self._scanned if config.scan_layers else self._unrolled
        x = layers(x, pattern, in_layer, deterministic, length if last is None else last)
        if caches is not None:
            # Results beyond the cache, or without its tokens, are wrong, and must not look right.
            holds = functools.reduce(
                jnp.logical_and,
                [
                    slots.holds(length) & ((slots.appended == 0) | (not fresh))
                    for slots in caches.values()
                ],
            )
            x = jnp.where(holds, x, jnp.nan)
        return x if self.last_norm is None else self.products.norm(self.last_norm, x)

    def _caches(
        self,
        tokens: Int[Array, "batch length"],
        segment_ids: Array | None,
        reach: Array | None,
        total: int | None,
        chunk: int | None,
    ) -> dict[int, Slots]:
        """Returns the cache's slots for each window, before `tokens` are read."""
        causal = self.causal or all(method.causal for method in self.methods)
        for wrong, reason in (
            (segment_ids is not None, "takes no segment_ids: give each document its own cache"),
            (reach is not None, "takes no reach: a cache holds no later tokens"),
            (not causal, "needs a position method with causal=True: later tokens aren't there yet"),
            (
                self.config.scan_layers,
                "needs layers with parameters of their own; see alibi.generation.unrolled",
            ),
        ):
            if wrong:
                raise ValueError(f"decode=True {reason}")
        windows = tuple(dict.fromkeys(kind.window for kind in self.pattern))
        return self.slots(tokens, total, windows, chunk)

    def _unrolled(
        self,
        x: Float[Array, "batch length width"],
        pattern: tuple[LayerKind, ...],
        in_layer: Callable[[int | Array], BlockCall],
        deterministic: bool,
        last: int,
    ) -> Float[Array, "batch last width"]:
        """Returns the output of layers that have their own parameters, from the last layer only for the
        `last` last tokens.
        """
        for index, layer in enumerate(self.layers):
            kind = index % len(pattern)
            queries = last if layer is self.layers[-1] else x.shape[1]
            call = in_layer(index)
            x = layer(x, pattern[kind], self.shared[kind], call, deterministic, queries)
        return x

    def _scanned(
        self,
        x: Float[Array, "batch length width"],
        pattern: tuple[LayerKind, ...],
        in_layer: Callable[[int | Array], BlockCall],
        deterministic: bool,
        last: int,
    ) -> Float[Array, "batch last width"]:
        """Returns the output of layers with stacked parameters: a loop over the pattern's repeats, compiled
        as a single repeat.

        Layers after the last whole repeat are programs of their own, as is a last layer with fewer
        queries than keys.
        """
        block, stack = Block(self.config, self.sharding, parent=None), self.stacked
        key = None if deterministic or not self.has_rng("dropout") else self.make_rng("dropout")
        layers, period = self.config.num_layers, len(pattern)
        repeats = (layers - (last < x.shape[1])) // period

        def layer(
            x: Array, depth: int | Array, tree: Params, row: Any, kind: int, queries: int
        ) -> Any:
            pick = functools.partial(jax.lax.dynamic_index_in_dim, index=row, keepdims=False)
            params = jax.tree.map(pick, tree)
            rngs = {} if key is None else {"dropout": jax.random.fold_in(key, depth)}
            call = in_layer(depth)
            arguments = (x, pattern[kind], self.shared[kind], call, deterministic, queries)
            return block.apply({"params": params}, *arguments, rngs=rngs)

        # Each layer is recomputed by itself, so that the backward pass holds a single layer. For that,
        # several layers in one step of the loop need a barrier.
        remat = functools.partial(
            jax.checkpoint, prevent_cse=period > 1, static_argnums=(4, 5), policy=self.kept
        )
        run = remat(layer) if self.config.remat else layer

        def step(x: Array, repeat: tuple[Array, Params | None]) -> tuple[Array, None]:
            first, params = repeat
            for kind in range(period):
                depth = first + kind
                tree, row = (stack, depth) if params is None else (params, kind)
                x = run(x, depth, tree, row, kind, x.shape[1])
            return x, None

        if repeats:
            params: Params | None = None
            # The loop would copy a part of the stack, so each step then takes layers from the whole.
            if repeats * period == layers:
                params = jax.tree.map(
                    lambda leaf: leaf.reshape(repeats, period, *leaf.shape[1:]), stack
                )
            x, _ = jax.lax.scan(step, x, (jnp.arange(0, repeats * period, period), params))
        for depth in range(repeats * period, layers):
            queries = last if depth == layers - 1 else x.shape[1]
            x = run(x, depth, stack, depth, depth % period, queries)
        return x

    def _stacked_params(self) -> Params:
        """Returns all layers' parameters, each leaf `[layers, ...]`."""
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
        x, call = jnp.zeros((1, 1, self.config.width), jnp.float32), BlockCall(None, None, None)

        def init(key: PRNGKeyArray) -> Params:
            return block.init(key, x, self.pattern[0], self.shared[0], call, True, 1)["params"]

        return self.param(STACKED, lambda key: jax.vmap(init)(jax.random.split(key, layers)))


class SlotsCache(nn.Module):
    """The key-value cache's slots for each window. Layers with the same window share them."""

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        total: int | None,
        windows: tuple[int, ...],
        chunk: int | None,
    ) -> dict[int, Slots]:
        """Returns the slots before `tokens` are read. `init` makes a slot for each token, or fewer with
        `chunk`, as `DecoderLM` describes.
        """
        started, (batch, length) = self.has_variable("cache", "slots"), tokens.shape
        total = total or length

        def empty(window: int) -> Slots:
            ring = window + chunk - 1 if window and chunk else total
            return Slots.empty(batch, min(ring, length) if ring < total else length, total)

        slots: dict[int, Slots] = self.variable(
            "cache", "slots", lambda: {window: empty(window) for window in windows}
        ).value
        for window in windows if started else ():
            slots[window].check_room(length, window)
        return slots

    def append(
        self,
        slots: dict[int, Slots],
        positions: Int[Array, "batch length"],
    ) -> dict[int, Slots]:
        """Returns the slots with these tokens, and stores them."""
        if self.is_initializing():
            return slots
        after = {window: each.append(positions) for window, each in slots.items()}
        self.put_variable("cache", "slots", after)
        return after


def build_model(
    config: Config, vocab_size: int, *, sharding: NamedSharding | None = None
) -> DecoderLM:
    """Returns the model that `config` describes.

    Args:
      vocab_size: tokens in the text's vocabulary, or `UNKNOWN_VOCABULARY` before the text is known.
      sharding: as in `DecoderLM`. Each part of the batch may hold logits for
        `config.model.logits_chunk` tokens.

    Raises:
      ValueError: as `layer_pattern`, and for cutoffs that don't fit the vocabulary, `max_position`
        below the training length, `logit_scale` with a training length of 1 or an objective that sees
        both sides, `scan_layers` with different parameters in layers, or an `attention` that lacks an
        option.
    """
    model, objective = config.model, make_objective(config)
    check_backend(model)
    if 0 < model.max_position < config.train_length:
        raise ValueError(
            f"model.max_position={model.max_position} must be at least train_length={config.train_length}, or 0"
        )
    if model.max_position and objective.both_sides and objective.causal:
        raise ValueError(
            f"model.max_position={model.max_position} doesn't go with objective={config.objective.name}, whose tokens "
            "see up to a position; leave it out"
        )
    for wrong, reason in (
        (config.train_length < 2, "needs a train_length of at least 2: ln 1 is 0"),
        (
            objective.both_sides,
            f"counts the tokens before each; leave it empty with objective={config.objective.name}, which sees both "
            "sides",
        ),
        (
            config.data.isolate_documents == "through",
            "counts visible tokens by their positions; use data.isolate_documents=restart, or leave one out",
        ),
    ):
        if wrong and any(model.by_layer("logit_scale")):
            raise ValueError(f"model.logit_scale={as_text(model.logit_scale)} {reason}")
    if model.embedding == "adaptive":
        check_bands(model, vocab_size)
        if objective.added_tokens:
            raise ValueError(
                f"model.embedding=adaptive has no room for the added tokens of objective={config.objective.name}: they "
                "would be the rarest words; use model.embedding=tied"
            )
    pattern = layer_pattern(config)
    if model.scan_layers:
        _check_alike(config.position, pattern)
    causal = objective.causal if objective.both_sides else None
    added = objective.added_tokens
    made = DecoderLM(model, pattern, vocab_size + added, sharding, causal, added)
    for method in made.methods:
        method.check_length(model.max_position)
    return made


def _check_alike(position: str, pattern: tuple[LayerKind, ...]) -> None:
    """Raises ValueError if layers have position parameters that can't be stacked."""
    kinds = {(kind.position, kind.logit_scale in LEARNED_SCALES): kind for kind in pattern}.values()
    made = [
        jax.eval_shape(
            lambda kind=kind: init_position(kind.position, kind.logit_scale, jax.random.key(0))
        )
        for kind in kinds
    ]
    if len(made) > 1 and any(made):
        raise ValueError(
            f"model.scan_layers=True stacks the layers' parameters, and layers of position={position} have different "
            "ones; set model.scan_layers=False"
        )


def evaluated(model: DecoderLM, config: Config) -> DecoderLM:
    """Returns the model for evaluation, with products in `config.eval.dtype`."""
    return model.clone(config=dataclasses.replace(model.config, dtype=config.eval.dtype))


def unrounded(model: DecoderLM) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which accelerators, too, compute the products of a float32 model in
    float32.

    By default they round the operands to fewer bits.
    """
    rounds = jax.default_backend() != "cpu" and model.config.dtype == "float32"
    return jax.default_matmul_precision("highest") if rounds else contextlib.nullcontext()


def param_shapes(model: DecoderLM) -> PyTree:
    """Returns the parameters' shapes and dtypes. Allocates nothing."""
    shapes = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    )
    dtype = jnp.dtype(model.config.param_dtype)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)


def count_parameters(model: DecoderLM) -> int:
    """Returns how many numbers a model learns. Allocates nothing."""
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(model)))
