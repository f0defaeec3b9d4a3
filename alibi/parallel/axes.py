"""The axes of the model's parameters, declared once: sharding, weight decay and Muon read them here."""

import dataclasses
import re
from typing import Any

import jax

STACKED = "layers"  # the name of all layers' parameters in one, see alibi.model.layers


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the path of a leaf in a tree as text, such as "layers_0/attention/query/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(tree: Any) -> dict[str, Any]:
    """Returns a tree's leaves under their paths."""
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A kind of parameter.

    Attributes:
      path: a pattern of its path in the tree, such as layers_0/attention/query/kernel.
      inputs, outputs: its axes' names, in their order. Sharding maps each name to an axis of the mesh.
      decays: weight decay acts on it.
      is_matrix: it is W in a layer's x W, from all inputs to all outputs, which an optimizer of matrices
        sees as one matrix.
    """

    path: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    decays: bool = False
    is_matrix: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return self.inputs + self.outputs


WIDTH, VOCABULARY, HIDDEN, HEADS = ("width",), ("vocabulary",), ("hidden",), ("heads", "head_dim")

# The first pattern that is found in a path tells its axes. Any other parameter is whole on each device,
# and not decayed.
LEAVES = (
    # A position method's are never decayed, and no matrices of a layer.
    Leaf(r"position/(query|key)_kernel$", WIDTH, HEADS),
    Leaf(r"(^|/)position/"),
    Leaf(r"adaptive.*kernel$", decays=True),
    Leaf(r"clusters$", decays=True),
    Leaf(r"embedding$", VOCABULARY, WIDTH, decays=True),
    Leaf(r"head$", VOCABULARY, WIDTH, decays=True),
    Leaf(r"token_types$", decays=True),
    Leaf(r"head_dense/kernel$", ("inputs",), ("outputs",), decays=True, is_matrix=True),
    Leaf(r"attention/(query|key|value)/kernel$", WIDTH, HEADS, decays=True, is_matrix=True),
    Leaf(r"attention_gate/kernel$", WIDTH, HEADS, decays=True, is_matrix=True),
    Leaf(r"attention/(query|key|value)/bias$", (), HEADS),
    Leaf(r"attention/out/kernel$", HEADS, WIDTH, decays=True, is_matrix=True),
    Leaf(r"(up|gate)/kernel$", WIDTH, HIDDEN, decays=True, is_matrix=True),
    Leaf(r"(up|gate)/bias$", (), HIDDEN),
    Leaf(r"down/kernel$", HIDDEN, WIDTH, decays=True, is_matrix=True),
)
OTHER = Leaf("")


def leaf_of(path: str, rank: int) -> tuple[Leaf, tuple[str, ...]]:
    """Returns what a parameter is, and the names of its axes, with "layers" first if it has those of all
    layers.

    Args:
      path: with slashes. An optimizer's state may have more before it.
      rank: how many axes it has. Unless they are as many as declared, it has no names.

    Raises:
      ValueError: a kernel of a layer that has no axes here.
    """
    layers = (STACKED,) if f"/{STACKED}/" in f"/{path}/" else ()
    leaf = next((leaf for leaf in LEAVES if re.search(leaf.path, path)), OTHER)
    if leaf is OTHER and path.endswith("/kernel"):
        raise ValueError(
            f"the parameter {path} has no axes; add a line with its inputs and outputs to LEAVES in "
            "alibi/parallel/axes.py"
        )
    axes = layers + leaf.axes
    return leaf, axes if len(axes) == rank else ()
