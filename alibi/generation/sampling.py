"""How the next token is drawn from the logits."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

TINY = 1e-30  # logits divided by less, and some lower probabilities, are no float32


class Sampler(Protocol):
    """Draws each sequence's next token. It becomes part of a compiled program, so it must be
    hashable, as functions and frozen dataclasses are.
    """

    def __call__(
        self, logits: Float[Array, "batch vocabulary"], keys: PRNGKeyArray
    ) -> Int[Array, " batch"]:
        """Returns a token for each sequence from its logits and its key."""
        ...


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Draws a token, with its probability, among the tokens that all limits keep.

    Attributes:
      temperature: divides the logits first; 0 takes the likeliest token.
      top_k: keep this many most likely tokens, and those as likely as the last; 0 keeps all.
      top_p: keep the smallest set of most likely tokens with total probability at least `top_p`, in
        (0, 1] (Holtzman et al. 2020, arXiv 1904.09751).
      min_p: keep tokens with at least this fraction of the highest probability, in [0, 1] (Nguyen et
        al. 2024, arXiv 2407.01082).

    Example:
      >>> Sampling(temperature=0.8, top_p=0.95)
      Sampling(temperature=0.8, top_k=0, top_p=0.95, min_p=0.0)

    Raises:
      ValueError: a number out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, fits, needed in (
            ("temperature", self.temperature >= 0, "0 (the likeliest token) or above"),
            ("top_k", self.top_k >= 0, "0 (no limit) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (no limit)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (no limit) to 1"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)} must be {needed}")

    def __call__(
        self, logits: Float[Array, "batch vocabulary"], keys: PRNGKeyArray
    ) -> Int[Array, " batch"]:
        if self.temperature < TINY:  # differences divided by it leave the likeliest token alone
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k and self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p < 1:
            falling = -jnp.sort(-logits, axis=-1)
            weights = jax.nn.softmax(falling, axis=-1)
            # A token is left if those before it have less than top_p.
            left = jnp.cumsum(weights, axis=-1) - weights < max(self.top_p, TINY)
            least = jnp.where(left, falling, jnp.inf).min(axis=-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.min_p > 0:
            most = logits.max(axis=-1, keepdims=True)
            logits = jnp.where(logits < most + jnp.log(self.min_p), -jnp.inf, logits)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


GREEDY = Sampling(temperature=0.0)
