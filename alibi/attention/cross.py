"""Cross attention: queries in one sequence, keys and values in another."""

import dataclasses
import fractions
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, Shaped

from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.checks import broadcasts
from alibi.attention.dispatch import compute_call
from alibi.attention.flax import AttentionFn, flax_attention_fn
from alibi.attention.named import position_params
from alibi.attention.visible import visible_by
from alibi.positions import Params, PositionMethod, make_position
from alibi.positions.bias import KnownPositions
from alibi.positions.distance import DistanceBias, as_array
from alibi.positions.sided import SidedBias

SIDES = ("none", "symmetric", "two_sided", "half")


class Source(flax.struct.PyTreeNode):
    """The source as decoding keeps it.

    Attributes:
      key, value: `[*batch, heads, features, k]`, as `alibi.attention.cache.KeyValues` has them.
      visible: False for padding, `[*batch, k]`, or None for no padding.
      queries: target tokens that have attended to it so far.
    """

    # not annotated as arrays, since JAX also puts descriptions of arrays into pytrees
    key: Any
    value: Any
    visible: Any
    queries: Any


@dataclasses.dataclass(frozen=True)
class Cross:
    """How position enters cross attention.

    Attributes:
      sides, rate: as in `alibi.linen.CrossAttention`.
      method: the position method, or None for none. With "half" it has half of the heads.
      options: how attention is computed.
    """

    sides: str
    rate: fractions.Fraction
    method: PositionMethod | None
    options: AttentionOptions

    @classmethod
    def make(
        cls,
        sides: str,
        rate: float,
        position: str | type[PositionMethod] | None,
        position_options: Mapping[str, Any] | None,
        options: AttentionOptions,
        *,
        num_heads: int,
        **sizes: int,
    ) -> "Cross":
        """Returns the settings of a layer, from its arguments.

        Raises:
          ValueError: unknown sides, a method without sides, a rate out of range, a number of heads that
            has no half, and as `alibi.make_position`.
        """
        if sides not in SIDES:
            raise ValueError(f"sides={sides!r} is unknown; use {', '.join(SIDES)}")
        if sides == "none" and (position is not None or position_options):
            raise ValueError(
                f"position={position!r}, options={position_options} need sides, such as sides='two_sided'; "
                "sides='none' adds no bias"
            )
        if "slopes_after" in (position_options or {}) and sides != "two_sided":
            raise ValueError(
                f"slopes_after is for sides='two_sided', and got sides={sides!r}; leave one out"
            )
        if sides == "half" and num_heads % 2:
            raise ValueError(
                f"sides='half' gives half of the heads each direction, and num_heads={num_heads} is odd; use an even "
                "number, or sides='two_sided'"
            )
        if not isinstance(rate, int | float | np.floating) or not 0.001 <= rate <= 1000:
            raise ValueError(
                f"rate={rate!r} must be from 0.001 to 1,000: the source tokens for each target token, such as 6.5 "
                "frames for each letter"
            )
        exact, method = fractions.Fraction(float(rate)).limit_denominator(1000), None
        if sides != "none":
            method = make_position(
                position or "alibi",
                num_heads=num_heads // 2 if sides == "half" else num_heads,
                causal=sides != "two_sided",
                options=position_options,
                **sizes,
            )
        return cls(sides, exact, method, options)

    def init(self, key: PRNGKeyArray) -> dict[str, Any]:
        """Returns the method's initial parameters."""
        return {} if self.method is None else position_params(self.method, key)

    def attention_fn(
        self,
        params: Params,
        num_heads: int,
        query_positions: KnownPositions | None,
        target_mask: Shaped[Array | np.ndarray, "*#batch q"] | None,
        source_mask: Shaped[Array | np.ndarray, "*#batch k"] | None,
        held: Source | None,
        filled: list[Source],
    ) -> AttentionFn:
        """Returns the `attention_fn` of a Flax layer.

        Args:
          query_positions, target_mask, source_mask: as in `alibi.linen.CrossAttention`.
          held: the source, if decoding has kept it. Then the layer's own keys are not read.
          filled: gets the source after this call.
        """

        def compute(
            query: Array, key: Array, value: Array, _is_causal: bool, arguments: dict[str, Any]
        ) -> Array:
            source = held
            if source is None:
                key, value = (jnp.moveaxis(x, -3, -1) for x in (key, value))
                source = Source(key, value, None, jnp.zeros((), jnp.int32))
            if source_mask is not None:
                source = source.replace(visible=visible_by(as_array(source_mask)))
            key, value = (jnp.moveaxis(x, -1, -3) for x in (source.key, source.value))
            length = query.shape[-3]
            positions = np.arange(length) if query_positions is None else as_array(query_positions)
            positions = positions.astype(
                np.int64 if isinstance(positions, np.ndarray) else jnp.int32
            )
            if query_positions is None and held is not None:
                positions = source.queries + positions
            filled.append(source.replace(queries=source.queries + length))
            query_segments = key_segments = None
            if target_mask is not None or source.visible is not None:
                # padding is a segment of its own on each side
                query_segments = _segments("target_mask", target_mask, query, padding=2)
                key_segments = _segments("source_mask", source.visible, key, padding=0)
            times, over = self.rate.numerator, self.rate.denominator
            call = AttentionCall(
                query,
                key,
                value,
                None if self.method is None else self.bias(params, key.shape[-3]),
                causal=False,
                query_positions=positions // over * times
                + (2 * (positions % over) * times + over) // (2 * over),
                key_positions=np.arange(key.shape[-3]),
                query_segments=query_segments,
                key_segments=key_segments,
                slots_last=held is not None,
                options=self.options,
                **arguments,
            )
            return _in_halves(call) if self.sides == "half" else compute_call(call)

        return flax_attention_fn(num_heads, compute)

    def bias(self, params: Params, length: int) -> DistanceBias:
        """Returns the bias for a source of `length` tokens, of half of the heads with "half"."""
        assert self.method is not None
        bias = _bias(self.method.at_length(length), params)
        return (
            bias
            if self.sides == "half"
            else SidedBias.of(bias, symmetric=self.sides == "symmetric")
        )


def check_source(source: Any, held: Source | None, *, decode: bool, stands: bool = True) -> None:
    """Raises ValueError for a layer that has no source, neither as an argument nor in its cache, or
    two while decoding.

    Args:
      stands: the tokens' positions are given, or add no bias.
    """
    if source is not None and held is not None and not stands:
        raise ValueError(
            "CrossAttention got a source while its cache holds one, so its tokens would stand at 0 again; give the "
            "source in the first call alone, query_positions with it, or begin with an empty cache"
        )
    if source is None and held is None:
        raise ValueError(
            "CrossAttention got no source"
            + (
                " and its cache holds none; give the source in the first call"
                if decode
                else "; give it, or set decode=True to keep that of the first call"
            )
        )


def _bias(method: PositionMethod, params: Params) -> DistanceBias:
    """Returns the method's bias, or raises ValueError if it does not depend on distance alone."""
    bias = method.bias(params)
    others = [
        name
        for name in ("embed", "queries", "keys", "content_bias")
        if getattr(type(method), name) is not getattr(PositionMethod, name)
    ]
    if others or not isinstance(bias, DistanceBias):
        raise ValueError(
            f"position method {type(method).__name__} with these options is no distance bias alone, which "
            "cross attention needs; use alibi, t5, kerple_log, kerple_power or sandwich, or sides='none'"
        )
    return bias


def _segments(name: str, mask: Any, x: Array, *, padding: int) -> Int[Array, "*#batch length"]:
    """Returns 1 for tokens and `padding` for padding."""
    if mask is None:
        return jnp.ones(x.shape[-3], jnp.int32)
    mask = as_array(mask)
    if mask.shape[-1:] != x.shape[-3:-2] or not broadcasts(mask.shape, x.shape[:-2]):
        raise ValueError(
            f"{name} has shape {mask.shape}; it must be {[*x.shape[:-2]]}, True for tokens and False for padding"
        )
    return jnp.where(visible_by(mask), 1, padding)


def _in_halves(call: AttentionCall) -> Array:
    """Computes the first half of the heads for keys up to the query, and the other half for keys from
    the query on.
    """
    call, weights, results = call.with_own_heads(), list[Array](), []
    count = call.query.shape[-2] // 2
    for index, sign in enumerate((1, -1)):
        heads = slice(index * count, (index + 1) * count)
        mask, rng = call.mask, call.dropout_rng
        half = dataclasses.replace(
            call,
            query=call.query[..., heads, :],
            key=call.key[..., heads, :],
            value=call.value[..., heads, :],
            causal=True,
            # keys after the query stand before it if all count down
            query_positions=sign * call.query_positions,
            key_positions=sign * call.key_positions,
            mask=mask
            if mask is None or mask.shape[-3:-2] in ((), (1,))
            else mask[..., heads, :, :],
            dropout_rng=None if rng is None else jax.random.fold_in(rng, index),
            sow=weights.append if call.sow else None,
        )
        results.append(compute_call(half))
    if call.sow:
        call.sow(jnp.concatenate(weights, axis=-3))
    return jnp.concatenate(results, axis=-2)
