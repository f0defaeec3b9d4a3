"""The key-value cache: new tokens append keys and values, and queries attend to all tokens in it.

Slot i takes the i-th token read. `Slots` holds the tokens' positions, once for all layers, and
`KeyValues` the keys and values in a layer.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

# The position of a slot without a token: after all others, so that the causal mask hides it.
EMPTY = 2**30


class Slots(flax.struct.PyTreeNode):
    """The tokens' positions in a cache's slots, which all layers share.

    Attributes:
      positions: int32 `[batch, slots]`, or `EMPTY` for free slots and padding.
      following: the next token's position in each sequence, int32 `[batch]`.
      appended: tokens added to each sequence so far, padding included.
      total: the most tokens that will be appended. If it exceeds the slots, the cache is a ring: when
        all slots are full, new tokens overwrite the oldest, as a sliding window allows.
    """

    # not annotated as arrays, since JAX also puts descriptions of arrays into pytrees
    positions: Any
    following: Any
    appended: Any
    total: int = flax.struct.field(pytree_node=False)

    @classmethod
    def empty(cls, batch: int, slots: int, total: int) -> "Slots":
        """Returns the slots before the first token."""
        positions = jnp.full((batch, slots), EMPTY, jnp.int32)
        return cls(positions, jnp.zeros(batch, jnp.int32), jnp.zeros((), jnp.int32), total)

    @property
    def ring(self) -> bool:
        """Whether new tokens will overwrite old ones."""
        return self.total > self.positions.shape[1]

    def check_room(self, tokens: int, window: int) -> None:
        """Raises ValueError if the cache can't take this many tokens at a time (a `window` of 0 is
        none).
        """
        slots = self.positions.shape[1]
        if not self.ring and tokens > slots:
            raise ValueError(
                f"a prompt of {tokens} tokens is longer than the cache, which has {slots} slots; make a longer cache"
            )
        if self.ring and not window:
            raise ValueError(
                f"a cache of {slots} slots can't serve {self.total} tokens: only a sliding window (model.window) lets "
                f"slots be written anew; make one of {self.total} slots"
            )
        if self.ring and tokens > slots - window + 1:
            raise ValueError(
                f"{tokens} tokens at one time would overwrite keys that the first of them still sees: the cache is a "
                f"ring of {slots} slots and the window has {window}; read at most {max(slots - window + 1, 0)} tokens "
                f"at a time, or make a cache of {tokens + window - 1} slots"
            )

    def holds(self, tokens: int) -> Bool[Array, ""]:
        """Returns whether there is room for this many more tokens."""
        return self.ring | (self.appended + tokens <= self.positions.shape[1])

    def next_positions(self, tokens: int) -> Int[Array, "batch tokens"]:
        """Returns the next tokens' default positions."""
        return self.following[:, None] + jnp.arange(tokens)[None]

    def append(self, positions: Int[Array, "batch tokens"]) -> "Slots":
        """Returns the slots with new tokens, at these positions, below 0 for padding."""
        held = jnp.where(positions < 0, EMPTY, positions)
        last = jnp.max(positions, axis=1) + 1
        return self.replace(
            positions=self.put(self.positions, held),
            following=jnp.maximum(self.following, last),
            appended=self.appended + positions.shape[1],
        )

    def put(self, slots: Array, new: Array, axis: int = 1) -> Array:
        """Returns an array with slots along `axis`, after the tokens `new` went into the next ones.

        With one slot it takes one token, the newest.
        """
        new, size, tokens = new.astype(slots.dtype), slots.shape[axis], new.shape[axis]
        first = self.appended % size if self.ring else self.appended
        if not self.ring or tokens == 1:  # the last slot if there are fewer: XLA clamps
            return lax.dynamic_update_slice_in_dim(slots, new, first, axis)
        indices = (first + jnp.arange(tokens)) % size
        return slots.at[(slice(None),) * axis + (indices,)].set(new)

    def newest(self, slots: Array) -> Array:
        """Returns the newest token's row of an array `[batch, slots, ...]`, or zeros before the first
        token.
        """
        index = (self.appended - 1) % slots.shape[1]
        return lax.dynamic_index_in_dim(slots, index, axis=1, keepdims=False)


class Reading(flax.struct.PyTreeNode):
    """New tokens on their way through the layers.

    Attributes:
      before, after: the slots without these tokens, and with them.
      padding: True for padding, bool `[batch, tokens]`, or None for no padding.
      fresh: True if no token came before them.
    """

    before: Slots
    after: Slots
    padding: Any
    fresh: bool = flax.struct.field(pytree_node=False)


class KeyValues(flax.struct.PyTreeNode):
    """A layer's cache.

    Attributes:
      key: `[batch, kv_heads, head_dim, slots]`, after `PositionMethod.keys`: rotary's keys are
        already rotated. Slots come last, since with slots first XLA copies all keys and values at
        each token.
      value: `[batch, kv_heads, value_dim, slots]`.
      kept: a tree of `[batch, slots, heads, ...]`, what `PositionMethod.keep` returned for each
        token. It has one slot, for the newest token, if no query needs others.
    """

    key: Any
    value: Any
    kept: Any

    @classmethod
    def empty(cls, slots: int, key: Array, value: Array, kept: PyTree) -> "KeyValues":
        """Allocates `slots` entries for each array, or as many as it has tokens if those are fewer: one for
        data kept only for the newest token.
        """
        arrays = key, value, kept
        key, value, kept = jax.tree.map(
            lambda x: jnp.zeros((x.shape[0], min(slots, x.shape[1]), *x.shape[2:]), x.dtype), arrays
        )
        return cls(jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 3), kept)

    def append(
        self,
        slots: Slots,
        key: Float[Array, "batch tokens kv_heads head_dim"],
        value: Float[Array, "batch tokens kv_heads value_dim"],
        kept: PyTree[Float[Array, "batch _ heads ..."]],
    ) -> "KeyValues":
        """Returns the cache with new tokens.

        Args:
          slots: the slots before these tokens.
          kept: data for each token, or for the newest.
        """
        return self.replace(
            key=slots.put(self.key, jnp.moveaxis(key, 1, 3), axis=3),
            value=slots.put(self.value, jnp.moveaxis(value, 1, 3), axis=3),
            kept=jax.tree.map(slots.put, self.kept, kept),
        )
