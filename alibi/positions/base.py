"""The contract of a position method.

The methods that the paper compares differ only in where position enters a transformer. A
method is a frozen dataclass without arrays. Its fields are its options, and each of its functions
is one place where position can enter: `place`, `embed`, `queries`, `keys`, `bias`, and for
biases that depend on content `keep` and `content_bias`. A method overrides those that it uses.
Its parameters are made by `init`, for those that all layers share, and by `init_layer`, for
those of each layer; the other functions get both in one mapping, `params`. All are plain
functions of arrays, so that a method serves Linen, NNX and bare JAX alike.

Positions are always given, never counted inside, so that a key-value cache, padding and
packed documents work for every method. Ranks are never promoted (the project's tests raise on it):
give a parameter the rank of what it is added to or multiplied with.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, PRNGKeyArray, PyTree

from alibi.positions.bias import Bias, KnownPositions

Params = Mapping[str, Any]
Positions = Integer[Array | np.ndarray, "*#batch length"]

# What an option may say in tokens, at most: float32, in which distances are computed, tells no more of them apart.
MOST_TOKENS = 2**24
MOST_DISTANCE = 2**20  # where each distance has a number or a vector of its own


@dataclasses.dataclass(frozen=True)
class About:
    """What docs/methods.md says of a method besides what is measured of it.

    Attributes:
      formula: what it adds or does, of query i and key j <= i, head h of H, training length L and length L'.
      source: who published it, and where.
      caveats: what is known to go wrong with it.
    """

    formula: str
    source: str
    caveats: str


@dataclasses.dataclass(frozen=True)
class PositionMethod:
    """A position method that adds nothing; subclasses override the functions that they use.

    Attributes:
      num_heads: attention heads.
      head_dim: features of a head.
      width: features of the residual stream.
      train_length: tokens of a training sequence.
      causal: whether a token sees only those before it; else it sees both sides.
      length: tokens of the sequences that are computed: an evaluation's windows, or all tokens
        that generation will come to. 0 stands for the training length; see `at_length`.
    """

    about: ClassVar[About | None] = None  # each method of the registry has one

    # Whether adding one number to the positions of all tokens leaves the result as it is.
    shift_invariant = False
    # The least and the greatest value of a parameter, by its name: after each update training puts it back within them.
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}
    # Why no sliding window may be put on attention with this method; empty: one may.
    no_window = ""

    num_heads: int
    head_dim: int
    width: int
    train_length: int
    causal: bool = dataclasses.field(default=True, kw_only=True)
    length: int = dataclasses.field(default=0, kw_only=True)

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The fields that the method adds, with their defaults; not those that it fills in itself (`init=False`)."""
        common = {field.name for field in dataclasses.fields(PositionMethod)}
        added = [field for field in dataclasses.fields(cls) if field.init and field.name not in common]
        return {field.name: field.default for field in added}

    @property
    def makers(self) -> frozenset[type]:
        """The classes whose functions make its parameters."""
        owners = (next(one for one in type(self).__mro__ if name in vars(one)) for name in ("init", "init_layer"))
        return frozenset(owners) - {PositionMethod}

    def shares_parameters(self, other: "PositionMethod") -> bool:
        """Whether parameters of both that have one name and shape mean the same."""
        return self.makers <= other.makers or other.makers <= self.makers

    @property
    def known_length(self) -> int | None:
        """Tokens of the sequences that rotated positions are known from; None where nothing is rotated."""
        return None

    @property
    def assumes_train_length(self) -> bool:
        """Whether it takes the parameters for those of a model of its training length, which no option tells it."""
        return False

    def check_known_length(self, known: int | None, of: str, option: str) -> None:
        """Raises ValueError where it would take its training length for the known one, and stretch by another factor.

        Args:
          known: tokens of the sequences that the parameters know rotated positions from, as `known_length`.
          of: whose parameters they are, for the message.
          option: how `original_length` is set, for the message.
        """
        if self.assumes_train_length and known not in (None, self.train_length):
            raise ValueError(
                f"{of} knows positions from sequences of {known:,} tokens, and this position method would take "
                f"{self.train_length:,} for that; set {option}={known}"
            )

    def at_length(self, length: int) -> "PositionMethod":
        """The method for sequences of `length` tokens; what depends on it reads `self.length` or `self.scale`."""
        return self if length == (self.length or self.train_length) else dataclasses.replace(self, length=length)

    @property
    def scale(self) -> float:
        """How many times as long as the training sequences the computed ones are."""
        return (self.length or self.train_length) / self.train_length

    @functools.cached_property
    def learns(self) -> bool:
        """Whether `init` makes parameters."""
        return bool(jax.tree.leaves(jax.eval_shape(self.init, jax.eval_shape(lambda: jax.random.key(0)))))

    @functools.cached_property
    def learns_by_layer(self) -> bool:
        """Whether `init_layer` makes parameters."""
        return bool(jax.tree.leaves(jax.eval_shape(self.init_layer, jax.eval_shape(lambda: jax.random.key(0)))))

    @property
    def max_length(self) -> int | None:
        """The longest sequence, in tokens, that the method is defined for; None: any."""
        return None

    @property
    def remedy(self) -> str:
        """What makes `max_length` larger, for the message of `check_length`."""
        return "train with a longer length"

    def check_length(self, length: int) -> None:
        """Raises ValueError if the method is not defined for `length` tokens."""
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"position method {type(self).__name__} has {self.max_length} positions and got a sequence of "
                f"{length} tokens; use {self.max_length} or fewer, or {self.remedy}"
            )

    def init(self, key: PRNGKeyArray) -> Params:
        """Initial parameters that all layers share, float32."""
        del key
        return {}

    def init_layer(self, key: PRNGKeyArray) -> Params:
        """Initial parameters of one layer, float32; by other names than those of `init`."""
        del key
        return {}

    def within_limits(self, params: PyTree) -> PyTree:
        """A model's parameters, those that the method makes put back within `limits`."""

        def put_back(path: tuple[Any, ...], leaf: Array) -> Array:
            names = [part.key for part in path]
            of_method = "position" in names and names[-1] in self.limits
            return jnp.clip(leaf, *self.limits[names[-1]]) if of_method else leaf

        return jax.tree.map_with_path(put_back, params) if self.limits else params

    def place(self, positions: KnownPositions, batch: int, key: PRNGKeyArray | None) -> KnownPositions:
        """The positions that the functions below get, for tokens of `batch` sequences at `positions`.

        By default they are the same. Randomised positions draw them. Where `positions` rise from token to token, these
        must rise too: by that a token sees those that it follows.

        Args:
          key: in training a random key, else None.
        """
        del batch, key
        return positions

    def embed(
        self, params: Params, x: Float[Array, "*batch length width"], positions: Positions
    ) -> Float[Array, "*batch length width"]:
        """The token embeddings `x` with position added to them."""
        del params, positions
        return x

    def queries(
        self, params: Params, query: Float[Array, "*batch q heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch q heads head_dim"]:
        """The queries after position has entered them, rotated or scaled for example; in the dtype that they had.

        Positions are NumPy's where they are known when the program is traced; what is computed of these by NumPy is
        computed once.
        """
        del params, positions
        return query

    def keys(
        self, params: Params, key: Float[Array, "*batch k heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch k heads head_dim"]:
        """The keys after position has entered them, as in `queries`; a cache holds these: no key is rotated twice."""
        del params, positions
        return key

    def keep(
        self,
        params: Params,
        x: Float[Array, "batch length width"],
        key: Float[Array, "batch length heads head_dim"],
        padding: Bool[Array, "batch length"] | None,
        before: PyTree[Float[Array, "batch heads ..."]] | None,
    ) -> PyTree[Float[Array, "batch length heads ..."]]:
        """What `content_bias` will need of each token besides its position.

        It is computed once, when a token is read, and a cache keeps it beside the token's key.

        Args:
          x: the attention layer's input.
          key: the keys as the layer projects them, before `keys`.
          padding: where a slot of a cache is to hold no token; None: nowhere. Padding may stand between tokens too.
          before: what was kept of the token before the first of `x`; if there is none, None, or zeros from an empty
            cache.
        """
        del params, x, key, padding, before
        return None

    def bias(self, params: Params) -> Bias | None:
        """The bias of the logits, or None, where it depends on positions and parameters alone."""
        del params
        return None

    def content_bias(
        self,
        params: Params,
        query: Float[Array, "batch q heads head_dim"],
        of_queries: PyTree[Float[Array, "batch q heads ..."]],
        of_keys: PyTree[Float[Array, "batch k heads ..."]],
    ) -> Bias | None:
        """The bias of the logits, where it depends on the content of tokens; by default it is that of `bias`.

        Args:
          query: what `queries` returned.
          of_queries, of_keys: what `keep` returned for the tokens of the queries, and for those of all keys.
        """
        del query, of_queries, of_keys
        return self.bias(params)
