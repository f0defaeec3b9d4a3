"""The contract of a position method.

The methods that the paper compares differ only in where position enters a transformer. A
method is a frozen dataclass without arrays. Its fields are its options. Each function is one
place where position can enter: `embed`, `queries`, `keys`, `bias`, and, for biases that depend
on content, `content_bias`. `keep` computes data of the tokens for `queries`, `keys` and
`content_bias`. A method overrides the functions that it uses. `init` makes the parameters that
all layers share, `init_layer` those of each layer; the other functions get both in one mapping,
`params`. All are plain functions of arrays, so a method serves Linen, NNX and bare JAX.

Positions are always passed in, never counted inside, so a key-value cache, padding and packed
documents work for every method. Ranks are never promoted (the tests raise on promotion): give a
parameter the rank of the array that it is added to or multiplied with.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from alibi.positions.bias import Bias
from alibi.positions.shapes import (
    Features,
    Keys,
    PerKey,
    PerQuery,
    Positions,
    Queries,
    TurnedKeys,
    TurnedQueries,
)

Params = Mapping[str, Any]

# The most tokens that an option may name: distances are computed in float32, which represents no
# more exactly.
MOST_TOKENS = 2**24
MOST_DISTANCE = 2**20  # the same for options by which each distance gets a number or a vector


@dataclasses.dataclass(frozen=True)
class About:
    """The description of a method in docs/methods.md.

    Attributes:
      formula: for query i and key j <= i, head h of H, training length L and evaluation length L'.
      source: authors, year and link.
      caveats: known problems.
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
      causal: a token sees only the tokens before it; otherwise it sees both sides.
      length: tokens of the computed sequences: an evaluation's windows, or the final length in
        generation. 0: the training length; see `at_length`.
    """

    about: ClassVar[About | None] = None  # required in the registry

    # Whether the result stays the same if one number is added to all positions.
    shift_invariant = False
    # Whether heads of keys may be fewer than heads of queries (grouped-query attention).
    takes_shared_keys = True
    # The least and the greatest value of a parameter, by its name: training clips it after each
    # update.
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}
    # The longest sequence, in tokens, for which the method is defined; None: no limit.
    max_length = cast(Any, None)

    num_heads: int
    head_dim: int
    width: int
    train_length: int
    causal: bool = dataclasses.field(default=True, kw_only=True)
    length: int = dataclasses.field(default=0, kw_only=True)

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Returns the names and defaults of the fields that the method adds, except those with
        `init=False`.
        """
        common = {field.name for field in dataclasses.fields(PositionMethod)}
        added = [
            field for field in dataclasses.fields(cls) if field.init and field.name not in common
        ]
        return {field.name: field.default for field in added}

    def shares_parameters(self, other: "PositionMethod") -> bool:
        """Returns whether parameters of the same name and shape mean the same in both methods."""
        for name in ("init", "init_layer"):
            own, theirs, none = (
                getattr(kind, name) for kind in (type(self), type(other), PositionMethod)
            )
            if own is not theirs and none not in (own, theirs):
                return False
        return True

    def at_length(self, length: int) -> "PositionMethod":
        """Returns the method for sequences of `length` tokens: functions read `self.length` or
        `self.scale`.
        """
        return (
            self
            if length == (self.length or self.train_length)
            else dataclasses.replace(self, length=length)
        )

    @property
    def reads_kept_of_keys(self) -> bool:
        """Whether the bias of later queries needs the result of `keep` for earlier tokens."""
        return type(self).content_bias is not PositionMethod.content_bias

    @property
    def scale(self) -> float:
        """The length of the computed sequences divided by the training length."""
        return (self.length or self.train_length) / self.train_length

    def check_length(self, length: int) -> None:
        """Raises ValueError if the method is not defined for `length` tokens."""
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"position method {type(self).__name__} has {self.max_length} positions and got a sequence of "
                f"{length} tokens; use {self.max_length} or fewer, or train it for more"
            )

    def init(self, key: PRNGKeyArray) -> Params:
        """Returns initial parameters that all layers share, float32."""
        return {}

    def init_layer(self, key: PRNGKeyArray) -> Params:
        """Returns initial parameters of one layer, float32; their names differ from those of
        `init`.
        """
        return {}

    def embed(self, params: Params, x: Features, positions: Positions) -> Features:
        """Returns the token embeddings `x` with position added."""
        return x

    def queries(
        self, params: Params, query: Queries, positions: Positions, kept: PerQuery
    ) -> TurnedQueries:
        """Returns the queries with position in them, for example rotated, in the dtype of `query`.

        They may have another number of features than `query`, the same as `keys` gives. Attention
        divides their products by the square root of this number.

        Args:
          positions: NumPy positions are known when the program is traced; NumPy functions of them
            are computed once.
          kept: the result of `keep` for these tokens.
        """
        return query

    def keys(self, params: Params, key: Keys, positions: Positions, kept: PerKey) -> TurnedKeys:
        """Returns the keys with position in them; arguments as in `queries`.

        A cache holds these, so no key is rotated twice.
        """
        return key

    def keep(
        self,
        params: Params,
        x: Float[Array, "batch length width"],
        key: Float[Array, "batch length kv_heads head_dim"],
        padding: Bool[Array, "batch length"] | None,
        before: PyTree[Float[Array, "batch heads ..."]] | None,
        segments: Int[Array, "batch length"] | None = None,
    ) -> PyTree[Float[Array, "batch length heads ..."]]:
        """Returns the data of each token that `queries`, `keys` or `content_bias` need besides
        positions.

        It is computed once, when the token is read. It may depend on earlier tokens, by `before`:
        running sums, or convolutions, whose last inputs each token keeps. A cache keeps the data
        of each token for `content_bias`; if the method has none, it keeps only the newest token's.

        Args:
          x: the attention layer's input.
          key: the layer's projected keys, before `keys`.
          padding: True for cache slots without a token, which may lie between tokens; None: there
            are none. Data that later tokens need passes through padding unchanged.
          before: the data of the token, or padding, before the first token of `x`; None, or zeros
            from an empty cache, if there is none.
          segments: the number of each token's segment, such as a packed document; no data passes
            from one segment to the next. None: a single segment, as with a cache.
        """
        return None

    def bias(self, params: Params) -> Bias | None:
        """Returns the bias of the logits, or None, for methods whose bias depends on positions and
        parameters alone.
        """
        return None

    def content_bias(
        self, params: Params, query: Queries, of_queries: PerQuery, of_keys: PerKey
    ) -> Bias | None:
        """Returns the bias of the logits, for methods whose bias depends on content; by default
        that of `bias`.

        Args:
          query: the result of `queries`.
          of_queries, of_keys: the results of `keep` for the tokens of the queries and of all keys.
        """
        return self.bias(params)
