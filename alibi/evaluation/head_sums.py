"""Statistics of each head: functions of parameters, inputs and targets, for a `Scorer`.

They read the attention calls that the model makes, with the queries, keys, bias and sink of each, and
with all that hides keys. So they hold for every position method.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from alibi.attention.call import AttentionCall
from alibi.attention.dispatch import watched
from alibi.attention.reference import dense
from alibi.evaluation.scorer import TokenFunction, model_nll
from alibi.generation.decoding import unrolled
from alibi.model.decoder import DecoderLM
from alibi.positions.bias import Part

BLOCK_WEIGHTS = 2**22  # of all sequences and heads, in a block of queries
LOCAL = 8  # a local head reads nothing beyond this distance
OfLayers = dict[str, Float[Array, "rows layers heads *values"]]


def of_calls(
    model: DecoderLM, measure: Callable[[AttentionCall], dict[str, Array]]
) -> Callable[..., OfLayers]:
    """Returns the function to what `measure` finds in each layer's call, stacked over the layers.

    It leaves out names that some layer lacks.
    """

    def of_rows(params: Any, *batch: Array) -> OfLayers:
        layers: list[dict[str, Array]] = []
        with watched(lambda call: layers.append(measure(call))):
            _nll(model, params, *batch)
        names = set(layers[0]).intersection(*layers)
        return {
            name: jnp.stack([layer[name] for layer in layers], axis=1) for name in sorted(names)
        }

    return of_rows


def attention_sums(model: DecoderLM) -> Callable[..., OfLayers]:
    """Returns the function to each head's statistics, `[rows, layers, heads]`.

    These are sums of `_of_queries` over queries, the largest number for "far", and "slope", m.
    """
    trained = model.pattern[0].position.train_length

    def sums(call: AttentionCall) -> dict[str, Array]:
        rows, queries, heads, _ = call.query.shape
        size = min(queries, max(1, BLOCK_WEIGHTS // (rows * heads * call.key.shape[1])))

        def block(first: Array) -> dict[str, Array]:
            # The last block begins earlier to be whole. It counts no query again.
            start = jnp.minimum(first, queries - size)
            isnt_counted = start + jnp.arange(size) < first
            tokens = start + call.key.shape[1] - queries
            statistics = _of_queries(_part(call, start, size), tokens, trained)
            statistics = {name: jnp.where(isnt_counted, 0.0, x) for name, x in statistics.items()}
            return {"far": statistics.pop("far").max(-1)} | {
                name: x.sum(-1) for name, x in statistics.items()
            }

        blocks = jax.lax.map(block, jnp.arange(0, queries, size))
        results = {name: x.max(0) if name == "far" else x.sum(0) for name, x in blocks.items()}
        if call.bias is not None and call.bias.slopes is not None:
            results["slope"] = jnp.broadcast_to(call.bias.slopes, (rows, heads))
        return results

    return of_calls(model, sums)


def _part(call: AttentionCall, start: Any, size: int) -> AttentionCall:
    """Returns the call for `size` queries from number `start` on."""

    def cut(side: Any, axis: int = -1) -> Any:
        return (
            None
            if side is None
            else jax.lax.dynamic_slice_in_dim(jnp.asarray(side), start, size, axis)
        )

    bias = call.bias
    if bias is not None:
        whole = bias.tabulated(call.query_positions, call.key_positions)
        bias = whole.cut(Part(queries=(start, size), keys=(0, call.key.shape[1])))
    return dataclasses.replace(
        call.with_own_heads(),
        query=cut(call.query, 1),
        bias=bias,
        query_positions=cut(call.query_positions),
        query_segments=cut(call.query_segments),
        query_reach=cut(call.query_reach),
    )


def _of_queries(
    call: AttentionCall, start: Any, trained: int
) -> dict[str, Float[Array, "rows heads q"]]:
    """Returns the statistics of each query's weights.

    "distance" and "entropy" are of the weights divided by their sum, which a sink makes smaller than 1.
    "entropy" is divided by log n, for n visible keys. It is 0 if n is 1, and else "choices" is 1. "first"
    is the first token, of the query's document if documents are isolated. "far" lies beyond LOCAL.

    Args:
      start: the number of the first query's token among the keys.
      trained: tokens in a training sequence.
    """
    sown: list[Array] = []
    dense(dataclasses.replace(call, sow=sown.append))
    (weights,), visible = sown, call.visible()
    queries, keys = weights.shape[2:]
    total = weights.sum(axis=-1)
    seen = jnp.ones((queries, keys), bool) if visible is None else visible
    count = jnp.broadcast_to(seen.sum(axis=-1), total.shape)
    share = weights / jnp.where(total == 0, 1, total)[..., None]
    entropy = jax.scipy.special.entr(share).sum(axis=-1)
    # tokens, since positions may be drawn at random
    distance = abs(start + jnp.arange(queries)[:, None] - jnp.arange(keys)[None])[None, None]
    segments = jnp.zeros((1, keys)) if call.key_segments is None else call.key_segments
    begins = (segments != jnp.roll(segments, 1, axis=1)).at[:, 0].set(True)[:, None, None]

    def mass(of: Bool[Array, "#rows #heads #q k"]) -> Float[Array, "rows heads q"]:
        return jnp.where(of, weights, 0.0).sum(axis=-1)

    statistics = {
        "distance": (share * distance).sum(axis=-1),
        "entropy": entropy / jnp.log(jnp.maximum(count, 2)),
        "choices": jnp.where(count > 1, 1.0, 0.0),
        "first": mass(begins),
        "near": mass(distance < LOCAL),
        "newest 64": mass(distance < 64),
        "newest L": mass(distance < trained),
        "far": mass(distance > LOCAL),
    }
    return statistics if call.sink is None else statistics | {"none": 1 - total}


def bias_by_distance(model: DecoderLM) -> Callable[..., OfLayers]:
    """Returns the function to the bias of the last query, `[rows, layers, heads, distances]` under
    "bias", at the distances 1, 2, 4, ... It is NaN for hidden keys. A layer without a bias, or with one
    that reads rows, has none.
    """

    def last(call: AttentionCall) -> dict[str, Array]:
        rows, queries, heads, _ = call.query.shape
        keys = call.key.shape[1]
        newest = _part(call, queries - 1, 1)
        if newest.bias is None or newest.bias.reads_rows:
            return {}
        bias = newest.bias(*map(jnp.asarray, (newest.query_positions, newest.key_positions)))
        visible = newest.visible()
        seen = jnp.ones((1, keys), bool) if visible is None else visible
        shape = (rows, heads, 1, keys)
        shown = jnp.where(jnp.broadcast_to(seen, shape), jnp.broadcast_to(bias, shape), jnp.nan)
        return {"bias": shown[:, :, 0, keys - 1 - 2 ** np.arange((keys - 1).bit_length())]}

    return of_calls(model, last)


def output_sums(model: DecoderLM) -> Callable[..., OfLayers]:
    """Returns the function to the sum of each head's outputs over tokens, `[rows, layers, heads, head_dim]`
    under "output".
    """

    def of_rows(params: Any, *batch: Array) -> OfLayers:
        layers: list[Array] = []

        def changed(layer: int, outputs: Array) -> Array:
            layers.append(outputs.astype(jnp.float32).sum(axis=1))
            return outputs

        _nll_with_outputs(model, changed, params, *batch)
        return {"output": jnp.stack(layers, axis=1)}

    return of_rows


def ablated_nll(model: DecoderLM) -> TokenFunction:
    """Returns the function to the NLL with other outputs of some heads.

    Its first argument has the parameters, which heads `[layers, heads]`, as booleans, and their outputs
    `[layers, heads, head_dim]`. One program serves all heads.
    """

    def nll(arguments: tuple[Any, Array, Array], *batch: Array) -> Array:
        params, chosen, others = arguments

        def changed(layer: int, outputs: Array) -> Array:
            other = others[layer].astype(outputs.dtype)[None, None]
            return jnp.where(chosen[layer][None, None, :, None], other, outputs)

        return _nll_with_outputs(model, changed, params, *batch)

    return nll


def _nll_with_outputs(
    model: DecoderLM, changed: Callable[[int, Array], Array], params: Any, *batch: Array
) -> Array:
    """Returns the NLL if `changed` makes the outputs of the heads of each layer, `[rows, q, heads,
    head_dim]`, from its number and the outputs.
    """
    layers = itertools.count()

    def intercepted(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.module.path[-2:] == ("attention", "out"):
            args = (changed(next(layers), args[0]), *args[1:])
        return call(*args, **kwargs)

    with nn.intercept_methods(intercepted):
        return _nll(model, params, *batch)


def _nll(model: DecoderLM, params: Any, *batch: Array) -> Array:
    """Returns the NLL. It calls each layer once, and arrays of a layer can be used outside, unlike those
    of a loop over layers, or of a layer that is computed again.
    """
    model = model.clone(config=dataclasses.replace(model.config, remat=False))
    model, params = unrolled(model, params)
    return model_nll(model)(params, *batch)
