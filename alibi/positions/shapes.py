"""Array shapes in the contracts of position methods and biases, as jaxtyping writes them."""

import numpy as np
from jaxtyping import Array, Float, Integer, PyTree

# NumPy's positions are known when a program is traced: sines of them are constants, and attention
# skips hidden keys.
Positions = Integer[Array | np.ndarray, "*#batch length"]
KnownPositions = Integer[Array | np.ndarray, "*#batch _"]
QueryPositions = Integer[Array, "*#batch q"]
KeyPositions = Integer[Array, "*#batch k"]

Features = Float[Array, "*batch length width"]
Queries = Float[Array, "*batch q heads head_dim"]
Keys = Float[Array, "*batch k kv_heads head_dim"]
TurnedQueries = Float[Array, "*batch q heads turned_dim"]
TurnedKeys = Float[Array, "*batch k kv_heads turned_dim"]
PerQuery = PyTree[Float[Array, "batch q heads ..."]]
PerKey = PyTree[Float[Array, "batch k heads ..."]]

PerHead = Float[Array, " heads"]
Distances = Integer[Array | np.ndarray, "*shape"]
AtDistances = Float[Array, "heads ..."]
Tile = Float[Array, "*#batch heads q k"]  # of the logits, or of a bias of them
Weights = Float[Array, "*batch heads q k"]
BlockBounds = Float[Array, "#batch heads q_blocks k_blocks"]
