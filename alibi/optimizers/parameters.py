"""What each parameter is, for optimizers: which decay, and which are matrices."""

import jax
import optax
from jaxtyping import PyTree
from optax.contrib import MuonDimensionNumbers

from alibi.parallel.axes import leaf_of, path_name


def decayed(params: optax.Params) -> PyTree:
    """Returns True for each parameter on which weight decay acts: matrices (kernels, embeddings), not
    biases, norms and position parameters.
    """
    return jax.tree.map_with_path(
        lambda path, leaf: leaf_of(path_name(path), leaf.ndim)[0].decays, params
    )


def matrices(params: optax.Params) -> PyTree:
    """Returns, for each parameter that is a layer's matrix, which axes are its inputs and its outputs, and
    None for any other. Axes of neither, such as those of stacked layers, hold a matrix each.
    """

    def of(path: tuple, leaf: jax.Array) -> MuonDimensionNumbers | None:
        kind, axes = leaf_of(path_name(path), leaf.ndim)
        if not kind.is_matrix:
            return None
        places = ([axes.index(name) for name in names] for names in (kind.inputs, kind.outputs))
        return MuonDimensionNumbers(*map(tuple, places))

    return jax.tree.map_with_path(of, params)
