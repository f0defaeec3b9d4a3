"""Randomised positions for any method (Ruoss et al. 2023, arXiv 2305.16843)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from alibi.positions.around import Around
from alibi.positions.base import MOST_TOKENS, About, Params
from alibi.positions.bias import Bias, KnownPositions
from alibi.positions.scaled_logits import ScaledLogits


@dataclasses.dataclass(frozen=True)
class Randomised(Around):
    """Another method, whose tokens stand in training at random positions, in their order, below a far greater length.

    Each training sequence gets a sample without replacement of 0, ..., max_position - 1. Otherwise
    tokens stand evenly spread over them, which is where they stand on average. The authors' code draws then too, which
    was worse in one run of rotary (2,000 updates: bits per byte 2.28 in place of 2.24 at L, 2.56 in place of 2.46 at
    4 L). The tokens of a sequence as long as max_position stand at 0, 1, 2, ..., closer than in nearly all training.

    Attributes:
      method: the other method's name.
      method_options: its options, as ("name", value, "name", value, ...).
      max_position: how many positions there are; 0: 16 times the training length.
      other: that method, made of the three above; its training length is the number of positions.

    Raises:
      ValueError: fewer positions than tokens, or a `logit_scale` among the other method's options; see also
        `alibi.positions.make_position`.
    """

    about = About(
        formula="another method at sorted random positions below N in training",
        source="Ruoss et al. 2023, [arXiv 2305.16843](https://arxiv.org/abs/2305.16843)",
        caveats="made for tasks of algorithms; not defined beyond N, and near N neighbours stand closer than in "
        "training; positions are spread evenly where the authors' code draws them in tests too",
    )

    no_window = "it counts tokens, and randomised positions are farther apart"

    method: str = "rotary"
    method_options: tuple[Any, ...] = ()
    max_position: int = 0

    def __post_init__(self) -> None:
        if self.max_position and not self.train_length <= self.max_position <= MOST_TOKENS:
            raise ValueError(
                f"randomised needs a max_position of at least the training length {self.train_length} and at most "
                f"{MOST_TOKENS:,}, or 0 for 16 times that length; got {self.max_position}"
            )
        if len(self.method_options) % 2 or not all(isinstance(name, str) for name in self.method_options[::2]):
            raise ValueError(f"method_options={self.method_options} must be name, value, name, value, ...")
        from alibi.positions import make_position  # the registry has this method too

        sizes: dict[str, Any] = {"num_heads": self.num_heads, "head_dim": self.head_dim, "width": self.width}
        options = dict(zip(self.method_options[::2], self.method_options[1::2], strict=True))
        sizes |= {"train_length": self.max_length, "causal": self.causal}
        object.__setattr__(self, "other", make_position(self.method, **sizes, options=options))  # as it is frozen
        if isinstance(self.other, ScaledLogits):
            raise ValueError(
                f"method_options={self.method_options} of randomised set logit_scale, which goes by the number of "
                "keys, and drawn positions don't tell it; leave it out"
            )
        self.other.check_length(self.max_length)

    @property
    def max_length(self) -> int:
        return self.max_position or 16 * self.train_length

    @property
    def assumes_train_length(self) -> bool:
        return False  # all its positions are trained, whatever the length

    @property
    def remedy(self) -> str:
        return "train with a larger max_position" if self.max_position else super().remedy

    def content_bias(self, params: Params, query: Array, of_queries: PyTree, of_keys: PyTree) -> Bias | None:
        bias = self.other.content_bias(params, query, of_queries, of_keys)
        batch, queries = query.shape[:2]
        pairs = batch * queries * (self.length or self.train_length)
        return bias if bias is None or pairs <= self.max_length else bias.up_to(self.max_length - 1)

    def place(self, positions: KnownPositions, batch: int, key: PRNGKeyArray | None) -> Array:
        length = self.length or self.train_length
        if (
            isinstance(positions, np.ndarray)
            and positions.size
            and not 0 <= positions.min() <= positions.max() < length
        ):
            raise ValueError(
                f"randomised places tokens 0 to {length - 1} of a sequence of {length}, and got positions "
                f"{positions.min()} to {positions.max()}; number them within their sequence"
            )
        if key is None:
            spread = np.arange(1, length + 1, dtype=np.int64) * (self.max_length + 1) // (length + 1) - 1
            return jnp.asarray(spread.astype(np.int32))[jnp.asarray(positions)]
        lots = jax.random.uniform(key, (batch, self.max_length))
        drawn = jnp.sort(jax.lax.top_k(lots, length)[1], axis=-1)
        positions = jnp.broadcast_to(jnp.asarray(positions), (batch, np.shape(positions)[-1]))
        return jnp.take_along_axis(drawn, positions, axis=-1)
