"""Array shapes in the contracts for position methods and biases, as jaxtyping writes them."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer, PyTree, Shaped

# NumPy's positions are known when a program is traced: sines of them are constants, and attention
# skips hidden keys.
Positions = Integer[Array | np.ndarray, "*#batch length"]
KnownPositions = Integer[Array | np.ndarray, "*#batch _"]
QueryPositions = Integer[Array, "*#batch q"]
KeyPositions = Integer[Array, "*#batch k"]

Features = Float[Array, "*batch length width"]
Queries = Float[Array, "*batch q heads head_dim"]
Keys = Float[Array, "*batch k kv_heads head_dim"]
Values = Float[Array, "*batch k kv_heads value_dim"]
Slopes = Float[ArrayLike, "*#batch heads"] | Sequence[float]
Segments = Int[Array, "*batch length"] | tuple[Array, Array]
Mask = Shaped[Array, "*#batch #heads #q #k"]
TurnedQueries = Float[Array, "*batch q heads turned_dim"]
TurnedKeys = Float[Array, "*batch k kv_heads turned_dim"]
PerQuery = PyTree[Float[Array, "batch q heads ..."]]
PerKey = PyTree[Float[Array, "batch k heads ..."]]

PerHead = Float[Array, " heads"]
Distances = Integer[Array | np.ndarray, "*shape"]
AtDistances = Float[Array, "heads ..."]
Tile = Float[Array, "*#batch heads q k"]  # of the logits, or of a bias of them
Weights = Float[Array, "*batch heads q k"]
Visible = Bool[Array, "*batch heads q k"]  # True where a query sees a key
BlockBounds = Float[Array, "#batch heads q_blocks k_blocks"]

# for errors about heads and lengths, which are mixed up where both fit
LAYOUT = (
    "query, key and value are [*batch, length, heads, head_dim]: give x.swapaxes(-3, -2) of each if their heads stand "
    "before their length"
)
