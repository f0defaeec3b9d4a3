"""The contract of a position method.

A method is a frozen dataclass without arrays, and its fields are its options. Each function is one
place where position can enter a transformer: `embed`, `queries`, `keys`, `bias`, or `content_bias`
for a bias that depends on content. `keep` computes data for each token, which `queries`, `keys` and
`content_bias` read. A method overrides the functions that it uses. `init` makes the parameters that
all layers share, `init_layer` the parameters for each layer. The other functions get both in one
mapping, `params`. All are plain functions on arrays, so a method serves Linen, NNX and bare JAX.

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

# The largest option in tokens: float32 distances are exact up to here.
MOST_TOKENS = 2**24
MOST_DISTANCE = 2**20  # for options that give each distance a number or a vector


@dataclasses.dataclass(frozen=True)
class About:
    """A method's description in docs/methods.md.

    Attributes:
      formula: for query i, key j <= i, head h among H, training length L, evaluation length L'.
      source: authors, year and link.
      caveats: known problems.
    """

    formula: str
    source: str
    caveats: str


@dataclasses.dataclass(frozen=True)
class PositionMethod:
    """A position method that adds nothing. Subclasses override the functions that they use.

    Attributes:
      num_heads: attention heads.
      head_dim: features in a head.
      width: features in the residual stream.
      train_length: tokens in a training sequence.
      causal: tokens see only earlier tokens, otherwise both sides.
      length: tokens in the computed sequences, such as an evaluation's windows or the final length
        in generation. 0 means the training length. `at_length` sets it.
    """

    about: ClassVar[About | None] = None  # required in the registry

    # The result stays the same if one number is added to all positions.
    shift_invariant = False
    # Keys may have fewer heads than queries (grouped-query attention).
    takes_shared_keys = True
    # The least and the greatest value for a parameter. Training clips it after each update.
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}
    # The longest sequence, in tokens, for which the method is defined, or None for no limit.
    max_length = cast(Any, None)
    # (option, property) for each option that follows the training length while it is 0: the property has its value.
    follow_length: ClassVar[tuple[tuple[str, str], ...]] = ()
    # Why a token must not see later ones, for a method that needs causal=True.
    only_causal = ""

    num_heads: int
    head_dim: int
    width: int
    train_length: int
    causal: bool = dataclasses.field(default=True, kw_only=True)
    length: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.only_causal and not self.causal:
            raise ValueError(
                f"position method {type(self).__name__} needs causal=True (objective=next_token): {self.only_causal}"
            )

    def check_meaning(self, trained: "PositionMethod", of: str, option: str) -> None:
        """Raises ValueError if an option that follows the training length would give the parameters in
        `trained` another meaning.

        Args:
          of: where the parameters come from, for the message.
          option: what stands before an option's name, for the message.
        """
        for name, value in self.follow_length if isinstance(self, type(trained)) else ():
            learned, here = getattr(trained, value), getattr(self, value)
            if learned != here and not getattr(self, name):
                raise ValueError(
                    f"{of} was trained with {name}={learned}, and here it would follow the training length to "
                    f"{here}, which changes what the parameters mean; set {option}{name}={learned}"
                )

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Returns the names and defaults of the fields that the class adds, without `init=False`."""
        common = {field.name for field in dataclasses.fields(PositionMethod)}
        return {
            field.name: field.default
            for field in dataclasses.fields(cls)
            if field.init and field.name not in common
        }

    def shares_parameters(self, other: "PositionMethod") -> bool:
        """Returns whether parameters with the same name and shape mean the same in both methods."""
        for name in ("init", "init_layer"):
            ours, theirs, none = (
                getattr(kind, name) for kind in (type(self), type(other), PositionMethod)
            )
            if ours is not theirs and none not in (ours, theirs):
                return False
        return True

    def at_length(self, length: int) -> "PositionMethod":
        """Returns the method for sequences of `length` tokens. Functions read `self.length` or
        `self.scale`.
        """
        return (
            self
            if length == (self.length or self.train_length)
            else dataclasses.replace(self, length=length)
        )

    @property
    def reads_kept_of_keys(self) -> bool:
        """Whether the bias of later queries needs what `keep` returned for earlier tokens."""
        return type(self).content_bias is not PositionMethod.content_bias

    @property
    def scale(self) -> float:
        """`length` / `train_length`."""
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
        """Returns one layer's initial parameters, float32, under other names than `init`'s."""
        return {}

    def embed(self, params: Params, x: Features, positions: Positions) -> Features:
        """Returns the token embeddings `x` with position added."""
        return x

    def queries(
        self, params: Params, query: Queries, positions: Positions, kept: PerQuery
    ) -> TurnedQueries:
        """Returns the queries with position in them, for example rotated, in the dtype of `query`.

        They may have more or fewer features than `query`, as many as `keys` returns. Attention
        divides the logits by the square root of this number.

        Args:
          positions: NumPy positions are known when the program is traced. NumPy computes functions
            of them once.
          kept: what `keep` returned for these tokens.
        """
        return query

    def keys(self, params: Params, key: Keys, positions: Positions, kept: PerKey) -> TurnedKeys:
        """Returns the keys with position in them, as `queries`. A cache holds these keys."""
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
        """Returns data for each token that `queries`, `keys` or `content_bias` need besides
        positions.

        It is computed once, when the token is read, and may depend on earlier tokens through
        `before`: running sums, or the last inputs for a convolution. A cache keeps each token's data
        for `content_bias`. Without `content_bias`, or with `reads_kept_of_keys = False`, it keeps only the
        newest token's data.

        Args:
          x: the attention layer's input.
          key: the layer's projected keys, before `keys`.
          padding: True for cache slots without a token, which may lie between tokens. Data that later
            tokens need passes through padding unchanged.
          before: data for the token, or padding, before the first token in `x`. It is None, or zeros
            from an empty cache, at the start.
          segments: the number of each token's segment, such as a packed document. No data passes from
            one segment to the next. None means a single segment, as with a cache.
        """
        return None

    def bias(self, params: Params) -> Bias | None:
        """Returns the bias of the logits, or None, if it depends on positions and parameters alone."""
        return None

    def content_bias(
        self, params: Params, query: Queries, of_queries: PerQuery, of_keys: PerKey
    ) -> Bias | None:
        """Returns the bias of the logits if it depends on content. Defaults to `bias`.

        Args:
          query: what `queries` returned.
          of_queries, of_keys: what `keep` returned for the query tokens and for all key tokens.
        """
        return self.bias(params)
