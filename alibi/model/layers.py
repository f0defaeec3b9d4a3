"""The two layouts of layers' parameters.

Unrolled layers have the trees `layers_0`, `layers_1`, ... Scanned layers have one tree `layers`, each
leaf `[layers, ...]`. Both hold the same numbers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from alibi.parallel.axes import STACKED

__all__ = ["STACKED", "is_stacked", "layer_name", "stacked", "unstacked"]


def layer_name(depth: int) -> str:
    return f"{STACKED}_{depth}"


def is_stacked(params: PyTree) -> bool:
    """Returns whether the layers' parameters are stacked."""
    return STACKED in params


def stacked(tree: PyTree) -> PyTree:
    """Returns parameters, or a state that contains them such as an optimizer's, with layers stacked."""

    def stack(params: dict) -> dict:
        names = [layer_name(depth) for depth in range(len(params)) if layer_name(depth) in params]
        others = {name: value for name, value in params.items() if name not in names}
        return others | {
            STACKED: jax.tree.map(
                lambda *leaves: jnp.stack(leaves), *(params[name] for name in names)
            )
        }

    return _where(tree, layer_name(0), stack)


def unstacked(tree: PyTree) -> PyTree:
    """Returns the inverse of `stacked`."""

    def unstack(params: dict) -> dict:
        others = {name: value for name, value in params.items() if name != STACKED}
        count = len(jax.tree.leaves(params[STACKED])[0])
        return others | {
            layer_name(i): jax.tree.map(lambda x, i=i: x[i], params[STACKED]) for i in range(count)
        }

    return _where(tree, STACKED, unstack)


def _where(tree: PyTree, name: str, change: Callable[[dict], dict]) -> PyTree:
    """Returns the tree with `change` applied to each dictionary with the key `name`."""

    def has(node: PyTree) -> bool:
        return isinstance(node, dict) and name in node

    return jax.tree.map(lambda node: change(node) if has(node) else node, tree, is_leaf=has)
