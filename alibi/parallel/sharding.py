"""The device mesh, and where each array lies on it, by rules outside the model."""

import math
import re

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from alibi.config import MeshConfig

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
_AXIS_TYPES = (AxisType.Auto,) * len(AXES)

# The first pattern that is found in a parameter's path says how its dimensions are split.
# Kernels are [in, out], attention's [width, heads, head_dim] and [heads, head_dim, width].
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"embedding$", ("tensor", "fsdp")),
    (r"attention/(query|key|value)/kernel$", ("fsdp", "tensor", None)),
    (r"attention/(query|key|value)/bias$", ("tensor", None)),
    (r"attention/out/kernel$", ("tensor", None, "fsdp")),
    (r"position/(query|key)_kernel$", ("fsdp", "tensor", None)),
    (r"up/kernel$", ("fsdp", "tensor")),
    (r"up/bias$", ("tensor",)),
    (r"down/kernel$", ("tensor", "fsdp")),
)


def make_mesh(mesh: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh `data, fsdp, tensor` of the config's sizes over `devices` (all by default); ValueError as `mesh_sizes`.

    `abstract_mesh` is the same without devices.
    """
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh(mesh_sizes(mesh, len(devices)), AXES, axis_types=_AXIS_TYPES, devices=devices)


def abstract_mesh(mesh: MeshConfig, devices: int) -> AbstractMesh:
    """That of so many devices, none of which is here: for shapes, shardings and traces; ValueError as `mesh_sizes`."""
    return AbstractMesh(mesh_sizes(mesh, devices), AXES, axis_types=_AXIS_TYPES)


def mesh_sizes(mesh: MeshConfig, devices: int) -> tuple[int, ...]:
    """How many of `devices` lie along each of `AXES`.

    Raises:
      ValueError: sizes that the devices don't divide into, or more than one -1.
    """
    sizes = [mesh[axis] for axis in AXES]
    got = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size != -1 and size < 1 for size in sizes):
        raise ValueError(f"{got}: sizes must be positive, one of them may be -1 (all remaining devices)")
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and devices % known == 0:
        sizes[sizes.index(-1)] = devices // known
    if math.prod(sizes) != devices:
        raise ValueError(f"{got} do not fit {devices} devices; make their product {devices}, or one of them -1")
    return tuple(sizes)


def batch_sharding(mesh: Mesh | AbstractMesh, leading: int = 0) -> NamedSharding:
    """The sharding of arrays whose dimension number `leading` is the batch."""
    return NamedSharding(mesh, P(*(None,) * leading, BATCH_AXES))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def tree_shardings(tree: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """The sharding of each leaf of parameters or optimizer state, by `RULES`; other leaves are replicated.

    A dimension that the devices don't divide is not split.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _leaf_sharding(path, leaf, mesh), tree)


def laid_out(shapes: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """The `shapes` of parameters or optimizer state with the sharding of each leaf, see `tree_shardings`."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        tree_shardings(shapes, mesh),
    )


def _leaf_sharding(path: tuple, leaf: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    stacked = "/layers/" in f"/{name}/"  # parameters of all layers in one, see alibi.model.layers
    for pattern, axes in RULES:
        axes = (None, *axes) if stacked else axes
        if re.search(pattern, name) and len(axes) == len(leaf.shape):
            sizes = zip(axes, leaf.shape, strict=True)
            return NamedSharding(
                mesh, P(*(axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in sizes))
            )
    return replicated(mesh)


def batch_parts(sharding: Sharding | None) -> int:
    """Into how many parts a sharding splits the first dimension; None: one."""
    if sharding is None:
        return 1
    size = sharding.num_devices
    return size // sharding.shard_shape((size,))[0]


def local_rows(sharding: Sharding, rows: int) -> Int[np.ndarray, " local"]:
    """The numbers of those of `rows` rows, split by `sharding`, that this host's devices hold, ascending."""
    held = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index] for index in held]))


def split_batch(
    x: Float[Array, "batch length features"], sharding: NamedSharding | None, *, split_features: bool = False
) -> Float[Array, "batch length features"]:
    """`x` laid out by `sharding`, where its parts divide the batch.

    Without this, split parameters win and each device does all. With `split_features` the other dimensions lie as the
    compiler chooses, as logits do by a vocabulary that is split; else each device has them whole.
    """
    if sharding is None or x.shape[0] % batch_parts(sharding):
        return x
    if split_features:
        over_batch = sharding.spec[0] if sharding.spec else None
        sharding = NamedSharding(sharding.mesh, P(over_batch, *(P.UNCONSTRAINED,) * (x.ndim - 1)))
    return jax.lax.with_sharding_constraint(x, sharding)


def heads_sharding(sharding: NamedSharding | None) -> NamedSharding | None:
    """The sharding of queries, keys and values `[batch, length, heads, head_dim]`, given that of activations.

    The axes of the mesh that don't split the batch split the heads.
    """
    if sharding is None:
        return None
    over_batch = sharding.spec[0] if sharding.spec else None
    taken = over_batch if isinstance(over_batch, tuple) else (over_batch,)
    rest = tuple(axis for axis in sharding.mesh.axis_names if axis not in taken)
    return NamedSharding(sharding.mesh, P(over_batch, None, rest or None))
