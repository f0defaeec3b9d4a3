"""The key-value cache: keys and values of new tokens are appended, and queries attend to all that it holds.

A cache has slots, one for each token; slot i gets the i-th token that is read. `Slots` says where
the tokens of the slots stand, once for all layers; `KeyValues` holds the keys and values of one layer.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

# The position of a slot that holds no token. It is after all others, so that the causal mask hides the slot.
EMPTY = 2**30


class Slots(flax.struct.PyTreeNode):
    """The positions of the tokens in a cache's slots, which all layers share.

    Attributes:
      positions: of the token in each slot, int32 `[batch, slots]`; `EMPTY` if the slot is free or its token is padding.
      following: the position that the next token of each sequence gets, int32 `[batch]`.
      read: how many tokens of each sequence have been read, padding included.
      total: how many will be read at most. If they are more than the slots, the cache is a ring: when
        all slots are full, the oldest tokens are overwritten, as a sliding window allows.
    """

    positions: Any  # not annotated as arrays, since JAX also puts descriptions of arrays into pytrees
    following: Any
    read: Any
    total: int = flax.struct.field(pytree_node=False)

    @classmethod
    def empty(cls, batch: int, slots: int, total: int) -> "Slots":
        """The slots before any token has been read."""
        positions = jnp.full((batch, slots), EMPTY, jnp.int32)
        return cls(positions, jnp.zeros(batch, jnp.int32), jnp.zeros((), jnp.int32), total)

    @property
    def ring(self) -> bool:
        """Whether old tokens will be overwritten."""
        return self.total > self.positions.shape[1]

    def check_room(self, tokens: int, window: int) -> None:
        """Raises ValueError if so many tokens can't be read at one time; `window` is that of attention, 0 for none."""
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
        """Whether there is room for so many more tokens."""
        return self.ring | (self.read + tokens <= self.positions.shape[1])

    def next_positions(self, tokens: int) -> Int[Array, "batch tokens"]:
        """The positions that the next tokens get if none are given."""
        return self.following[:, None] + jnp.arange(tokens)[None]

    def append(self, positions: Int[Array, "batch tokens"], stand: Int[Array, "batch tokens"]) -> "Slots":
        """The slots after new tokens have been read.

        Args:
          positions: of the tokens in their sequences; those below 0 are padding.
          stand: where the position method takes them to stand (`PositionMethod.place`), which is what slots hold.
        """
        held = jnp.where(positions < 0, EMPTY, stand)
        last = jnp.max(positions, axis=1) + 1
        return self.replace(
            positions=self.put(self.positions, held),
            following=jnp.maximum(self.following, last),
            read=self.read + positions.shape[1],
        )

    def put(self, slots: Array, new: Array) -> Array:
        """The array `slots` `[batch, slots, ...]` with `new` `[batch, tokens, ...]` where the next tokens belong."""
        new = new.astype(slots.dtype)
        first = self.read % slots.shape[1] if self.ring else self.read
        if not self.ring or new.shape[1] == 1:
            return lax.dynamic_update_slice(slots, new, (0, first, *(0,) * (slots.ndim - 2)))
        return slots.at[:, (first + jnp.arange(new.shape[1])) % slots.shape[1]].set(new)

    def newest(self, slots: Array) -> Array:
        """What the array `slots` `[batch, slots, ...]` holds of the last token read; zeros before the first."""
        index = (self.read - 1) % slots.shape[1]
        return lax.dynamic_index_in_dim(slots, index, axis=1, keepdims=False)


class Reading(flax.struct.PyTreeNode):
    """New tokens on their way through the layers.

    Attributes:
      before, after: the slots without these tokens, and with them.
      padding: which of them are no tokens but padding, bool `[batch, tokens]`.
    """

    before: Slots
    after: Slots
    padding: Any


class KeyValues(flax.struct.PyTreeNode):
    """What the cache holds for one layer.

    Attributes:
      key: `[batch, slots, heads, head_dim]`, as `PositionMethod.keys` made them: rotary's are rotated already.
      value: `[batch, slots, heads, head_dim]`.
      kept: a tree of `[batch, slots, heads, ...]`: what `PositionMethod.keep` made of each token.
      key_norm: `[batch, heads]`, the largest norm of all keys that were ever written, NaN if a key or value was not
        finite. With it, decoding leaves out keys that are out of reach.
    """

    key: Any
    value: Any
    kept: Any
    key_norm: Any

    @classmethod
    def empty(cls, slots: int, key: Array, value: Array, kept: PyTree) -> "KeyValues":
        """An empty cache of so many slots, for keys, values and kept arrays shaped like these, but for their length."""

        def zeros(x: Array) -> Array:
            return jnp.zeros((x.shape[0], slots, *x.shape[2:]), x.dtype)

        return cls(zeros(key), zeros(value), jax.tree.map(zeros, kept), jnp.zeros(key.shape[::2], jnp.float32))

    def append(
        self,
        slots: Slots,
        key: Float[Array, "batch tokens heads head_dim"],
        value: Float[Array, "batch tokens heads head_dim"],
        kept: PyTree[Float[Array, "batch tokens heads ..."]],
    ) -> "KeyValues":
        """The cache with new tokens; `slots` is as before they were read."""
        norm = norm_of_all(key, value)
        # Not jnp.maximum, since XLA's may pass over NaN.
        larger = jnp.where(self.key_norm >= norm, self.key_norm, norm + 0.0 * self.key_norm)
        return self.replace(
            key=slots.put(self.key, key),
            value=slots.put(self.value, value),
            kept=jax.tree.map(slots.put, self.kept, kept),
            key_norm=larger,
        )


def norm_of_all(
    key: Float[Array, "*batch k heads head_dim"], value: Float[Array, "*batch k heads value_dim"]
) -> Float[Array, "*batch heads"]:
    """The largest norm of each head's keys; NaN if a key or value is not finite, so that nothing is skipped there."""
    norm = jnp.linalg.norm(lax.stop_gradient(key).astype(jnp.float32), axis=-1)
    # Sums, since XLA's maximum may pass over NaN.
    sums = norm.sum(axis=-2) + lax.stop_gradient(value).astype(jnp.float32).sum(axis=(-3, -1))
    return norm.max(axis=-2) + 0.0 * sums
