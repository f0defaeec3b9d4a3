"""The kinds of layers in a model: each has a position method, a window and a logit scale.

Also positions and scales that a model combines with any position method.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from alibi.config import Config, ModelConfig
from alibi.config.fields import annotations, as_text, takes_several
from alibi.config.model import by_layer
from alibi.objectives import make_objective
from alibi.positions import make_position, method_class, method_names
from alibi.positions.base import Params, PositionMethod
from alibi.positions.scaled import log_keys
from alibi.positions.shapes import KnownPositions, Positions, Queries

_log = logging.getLogger(__name__)

LEARNED_SCALES = ("ssmax", "ssmax_queries")  # each head in each layer learns s


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """All that differs between layers in a model.

    Attributes:
      position: the position method.
      window: tokens that attention reaches back, the token itself included. 0 means all.
      logit_scale: as in `alibi.config.ModelConfig`.
    """

    position: PositionMethod
    window: int = 0
    logit_scale: str = ""

    def at_length(self, length: int) -> "LayerKind":
        """Returns the kind for sequences of `length` tokens."""
        return dataclasses.replace(self, position=self.position.at_length(length))


def layer_pattern(config: Config) -> tuple[LayerKind, ...]:
    """Returns the kinds of layers: layer i has kind i modulo their number.

    Each list in the config, such as position=rotary,none or model.window=32,0, is repeated over the
    layers. A position option goes to the methods that know it, of all updates.

    Raises:
      ValueError: as `make_position`, and for a list longer than the layers, for one of several methods
        that adds to the token embeddings, which all layers read, or for a method that needs keys in
        each head, with fewer.
    """
    model, objective, made = (
        config.model,
        make_objective(config),
        dict[tuple[str, str], PositionMethod](),
    )
    names = _each_layer(model.num_layers, "position", method_names(config.position))
    windows = _each_layer(model.num_layers, "model.window", model.window)
    scales = _each_layer(model.num_layers, "model.logit_scale", model.logit_scale)
    kinds = []
    for name, options, window, scale in zip(
        names, _options_by_layer(config, names), windows, scales, strict=True
    ):
        key = name, repr(options)
        if key not in made:
            made[key] = make_position(
                name,
                num_heads=model.num_heads,
                head_dim=model.head_dim,
                width=model.width,
                # positions that training covers by its end
                train_length=model.max_position or config.last_length,
                causal=not objective.both_sides,
                options=options,
            )
        kinds.append(LayerKind(made[key], window, scale))
    for (name, _), method in made.items():
        if len(made) > 1 and type(method).embed is not PositionMethod.embed:
            raise ValueError(
                f"position={config.position}: {name} adds to the token embeddings, which all layers "
                "read; give it alone, with the same options for all layers"
            )
    if model.kv_heads < model.num_heads and (
        unshared := [name for (name, _), method in made.items() if not method.takes_shared_keys]
    ):
        raise ValueError(
            f"model.num_kv_heads={model.num_kv_heads} gives several heads of queries the same keys, and "
            f"position={unshared[0]} needs keys of each head; set model.num_kv_heads=0"
        )
    layers = range(len(kinds))
    period = next(n for n in layers if all(kinds[i] == kinds[i % (n + 1)] for i in layers)) + 1
    return tuple(kinds[:period])


def _options_by_layer(config: Config, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Returns each layer's position options: its method's, and any that no method knows, which
    `make_position` refuses.
    """
    takes_tuple: dict[str, dict[str, bool]] = {}
    for name in dict.fromkeys((*names, *method_names(config.positions))):
        method, types = method_class(name), annotations(method_class(name))
        # an option that takes a tuple has the same one in all layers
        takes_tuple[name] = {option: takes_several(types[option]) for option in method.options()}
    layers = [dict[str, Any]() for _ in names]
    for option, value in config.position_options.items():
        several = [options[option] for options in takes_tuple.values() if option in options]
        values = (value,)
        if not all(several):  # a list, for a method at least
            values = _each_layer(len(names), f"position_options.{option}", value)
        for layer, name in enumerate(names):
            if option in takes_tuple[name] or not several:
                whole = takes_tuple[name].get(option, True)
                layers[layer][option] = value if whole else values[layer]
    return layers


def _each_layer(num_layers: int, key: str, value: Any) -> tuple[Any, ...]:
    """Returns `by_layer`. Logs a warning if a list's length doesn't divide the layers."""
    values = by_layer(key, value, num_layers)
    if isinstance(value, tuple) and num_layers % len(value):
        _say(
            f"{key}={as_text(value)} lists {len(value)} values, which don't divide "
            f"model.num_layers={num_layers}: the list is repeated, and cut off at the last layer"
        )
    return values


@functools.cache
def _say(message: str) -> None:
    """Logs a warning, once per process."""
    _log.warning(message)


def randomised_positions(
    length: int,
    config: ModelConfig,
    batch: int,
    key: PRNGKeyArray | None,
    depth: int | Int[Array, ""] | None = None,
) -> Callable[[KnownPositions], Int[Array, "*batch length"]]:
    """Returns the function from positions, 0 to length - 1, to randomised positions for sequences with
    `length` tokens (Ruoss et al. 2023, arXiv 2305.16843).

    With a key, in training, each sequence gets a sorted sample without replacement from 0, ...,
    max_position - 1. Without a key positions are evenly spread, at the means of such samples. The
    authors' code has a sample for each batch and layer, in tests too, as with `model.batch_draws`,
    `model.layer_draws` and `model.test_draws`.

    Args:
      batch: the number of sequences.
      depth: the layer that the positions are for. None is the embedding.
    """
    max_position, rows = config.max_position, 1 if config.batch_draws else batch
    if key is None and config.test_draws:
        key, rows = jax.random.key(config.test_draws), 1
    if key is None:
        means = np.arange(1, length + 1, dtype=np.int64) * (max_position + 1) // (length + 1) - 1
        spread = jnp.asarray(means.astype(np.int32))
        return lambda positions: spread[jnp.asarray(positions)]
    if config.layer_draws and depth is not None:
        key = jax.random.fold_in(key, depth)
    lots = jax.random.uniform(key, (rows, max_position), jnp.float32)
    drawn = jnp.sort(jax.lax.top_k(lots, length)[1], axis=-1)
    sample = jnp.broadcast_to(drawn, (batch, length))

    def place(positions: KnownPositions) -> Int[Array, "batch length"]:
        shape = batch, np.shape(positions)[-1]
        return jnp.take_along_axis(sample, jnp.broadcast_to(jnp.asarray(positions), shape), axis=-1)

    return place


def init_position(position: PositionMethod, logit_scale: str, key: PRNGKeyArray) -> Params:
    """Returns one layer's initial position parameters: the method's, and SSMax's scale."""
    params = position.init_layer(key)
    if logit_scale not in LEARNED_SCALES:
        return params
    # the mean of ln n over n = 1, ..., L
    mean = math.lgamma(position.train_length + 1) / position.train_length
    return {**params, "ssmax": jnp.full(position.num_heads, 1 / mean, jnp.float32)}


def bias_scale(
    logit_scale: str, position: PositionMethod, params: Params
) -> Float[Array, " heads"] | None:
    """Returns each head's s if whole logits, bias included, are multiplied by s ln n for n visible
    keys, or None if the scale multiplies queries alone or there is none.
    """
    if logit_scale == "log_n":
        return jnp.full(position.num_heads, 1 / math.log(position.train_length), jnp.float32)
    return params["ssmax"].astype(jnp.float32) if logit_scale == "ssmax" else None


def scaled_queries(
    logit_scale: str, position: PositionMethod, params: Params, query: Queries, positions: Positions
) -> Queries:
    """Returns queries times a function of n, the keys that a query sees: its position plus one.

    Softmax over more keys is flatter, and this sharpens it. L is the training length. Each head in each
    layer learns its s, which starts where s ln n has the mean 1 over n = 1, ..., L.

    - "log_n": ln n / ln L (Chiang and Cholak 2022, arXiv 2202.12172), and "ssmax": s ln n (Nakanishi
      2025, arXiv 2501.19399). `bias_scale` scales their bias alike.
    - "log_n_beyond": max(1, ln n / ln L) (Qwen 2023, arXiv 2309.16609, section 3.1), "ssmax_queries":
      s ln n, and "llama4": 1 + 0.1 ln(floor(n / L) + 1) (Llama 4, with 8,192 for L). Their bias is not
      scaled.
    """
    log_n = jnp.expand_dims(log_keys(jnp.asarray(positions)), (-1, -2))
    if logit_scale == "log_n":
        scale = log_n * (1 / math.log(position.train_length))
    elif logit_scale == "log_n_beyond":
        scale = jnp.maximum(log_n / math.log(position.train_length), 1.0)
    elif logit_scale == "llama4":
        lengths = (jnp.maximum(positions + 1, 1) // position.train_length).astype(jnp.float32)
        scale = 1.0 + 0.1 * jnp.expand_dims(jnp.log1p(lengths), (-1, -2))
    else:
        of_head = params["ssmax"].astype(jnp.float32)
        scale = of_head.reshape((1,) * (log_n.ndim - 2) + (-1, 1)) * log_n
    scale = scale.reshape((1,) * (query.ndim - scale.ndim) + scale.shape)
    return (query.astype(jnp.float32) * scale).astype(query.dtype)
