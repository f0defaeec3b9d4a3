"""The key-value cache: keys and values of new tokens are appended, and queries attend to all that is there."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

# The position of a slot that holds no token: after all others, so that the causal mask hides it.
EMPTY = 2**30


class Slots(flax.struct.PyTreeNode):
    """Where the tokens of each sequence stand, one for all layers; slot i holds the i-th token that was read.

    Attributes:
      positions: of each slot's token, int32 `[batch, slots]`; `EMPTY` where there is none, or it is padding.
      following: the position that each sequence's next token gets, int32 `[batch]`.
      read: how many tokens have been read.
      total: tokens that will be read at most. Where they are more than the slots, those are
        written anew when all are full, as a sliding window allows.
    """

    positions: Any  # not checked as arrays: a compiler passes descriptions of them
    following: Any
    read: Any
    total: int = flax.struct.field(pytree_node=False)

    @classmethod
    def empty(cls, batch: int, slots: int, total: int) -> "Slots":
        """No token is read."""
        positions = jnp.full((batch, slots), EMPTY, jnp.int32)
        return cls(positions, jnp.zeros(batch, jnp.int32), jnp.zeros((), jnp.int32), total)

    @property
    def ring(self) -> bool:
        """Whether slots are written anew."""
        return self.total > self.positions.shape[1]

    def check_room(self, tokens: int, window: int) -> None:
        """Raises ValueError where so many new tokens at one time don't fit; `window`: of attention, 0: all."""
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
        """Whether there is room for so many tokens more."""
        return self.ring | (self.read + tokens <= self.positions.shape[1])

    def next_positions(self, tokens: int) -> Int[Array, "batch tokens"]:
        """Those of as many tokens more."""
        return self.following[:, None] + jnp.arange(tokens)[None]

    def append(self, positions: Int[Array, "batch tokens"], stand: Int[Array, "batch tokens"]) -> "Slots":
        """With new tokens at these positions, which a method takes to stand at others; those below 0 are padding."""
        held = jnp.where(positions < 0, EMPTY, stand)
        last = jnp.max(positions, axis=1) + 1
        return self.replace(
            positions=self.put(self.positions, held),
            following=jnp.maximum(self.following, last),
            read=self.read + positions.shape[1],
        )

    def put(self, slots: Array, new: Array) -> Array:
        """`slots` `[batch, slots, ...]` with `new` `[batch, tokens, ...]` in the slots of the next tokens."""
        new = new.astype(slots.dtype)
        first = self.read % slots.shape[1] if self.ring else self.read
        if not self.ring or new.shape[1] == 1:
            return lax.dynamic_update_slice(slots, new, (0, first, *(0,) * (slots.ndim - 2)))
        return slots.at[:, (first + jnp.arange(new.shape[1])) % slots.shape[1]].set(new)

    def newest(self, slots: Array) -> Array:
        """What `slots` `[batch, slots, ...]` holds of the last token that was read; zeros if none was."""
        index = (self.read - 1) % slots.shape[1]
        return lax.dynamic_index_in_dim(slots, index, axis=1, keepdims=False)


class KeyValues(flax.struct.PyTreeNode):
    """What one layer holds in each slot.

    Attributes:
      key: `[batch, slots, heads, head_dim]`, with position turned into it already, so that it is never turned again.
      value: `[batch, slots, heads, head_dim]`.
      kept: a tree of `[batch, slots, heads, ...]`, what the position method keeps of each token besides, see
        `PositionMethod.keep`.
      key_norm: `[batch, heads]`, at least the norm of every key that was ever written, NaN where a key or value was not
        finite; keys out of reach are skipped by it.
    """

    key: Any
    value: Any
    kept: Any
    key_norm: Any

    @classmethod
    def empty(cls, slots: int, key: Array, value: Array, kept: PyTree) -> "KeyValues":
        """Of as many slots, for keys, values and what is kept as these are, of any length."""

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
        """With those of new tokens; `slots` is that before them."""
        norm = norm_of_all(key, value)
        # Not by maximum, which may pass over NaN.
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
    """The largest norm of a key of each head; NaN where a key or value is not finite, which must not be skipped."""
    norm = jnp.linalg.norm(lax.stop_gradient(key).astype(jnp.float32), axis=-1)
    # Sums, since XLA's maximum may pass over NaN.
    sums = norm.sum(axis=-2) + lax.stop_gradient(value).astype(jnp.float32).sum(axis=(-3, -1))
    return norm.max(axis=-2) + 0.0 * sums
