"""The device mesh, and the sharding of each array on it, from rules outside the model."""

import math

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from alibi.config import MeshConfig
from alibi.errors import UserError
from alibi.parallel.axes import leaf_of, path_name

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
_AXIS_TYPES = (AxisType.Auto,) * len(AXES)

# The axis of the mesh that splits each named axis of the parameters.
SPLIT = {
    "vocabulary": "tensor",
    "heads": "tensor",
    "hidden": "tensor",
    "width": "fsdp",
    "head_dim": None,
}


def make_mesh(mesh: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns the mesh `data, fsdp, tensor` over `devices`, which default to all.

    Raises:
      ValueError: as in `mesh_sizes`.
      UserError: another mesh, with Explicit axes, is set.
    """
    if axes := jax.sharding.get_abstract_mesh().explicit_axes:
        raise UserError(
            f"jax.set_mesh has set a mesh with Explicit axes, {axes}, and a run makes its own mesh with Auto axes; "
            "load or train it outside that context"
        )
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh(
        mesh_sizes(mesh, len(devices)), AXES, axis_types=_AXIS_TYPES, devices=devices
    )


def abstract_mesh(mesh: MeshConfig, devices: int) -> AbstractMesh:
    """Returns `make_mesh` for a number of devices elsewhere, for shapes, shardings and traces."""
    return AbstractMesh(mesh_sizes(mesh, devices), AXES, axis_types=_AXIS_TYPES)


def mesh_sizes(mesh: MeshConfig, devices: int) -> tuple[int, ...]:
    """Returns how many devices lie along each of `AXES`.

    Raises:
      ValueError: the sizes don't multiply to `devices`, or several are -1.
    """
    sizes = [mesh[axis] for axis in AXES]
    got = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1:
        raise ValueError(f"{got}: only one of them may be -1 (all remaining devices)")
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and devices % fixed == 0:
        sizes[sizes.index(-1)] = devices // fixed
    if math.prod(sizes) != devices:
        raise ValueError(
            f"{got} do not fit {devices} devices; make their product {devices}, or one of them -1"
        )
    return tuple(sizes)


def batch_sharding(mesh: Mesh | AbstractMesh, leading: int = 0) -> NamedSharding:
    """Returns the sharding of arrays with the batch in dimension `leading`."""
    return NamedSharding(mesh, P(*(None,) * leading, BATCH_AXES))


def tree_shardings(tree: PyTree, mesh: Mesh | AbstractMesh, *, gathered: bool = False) -> PyTree:
    """Returns shardings for parameters or optimizer state, as `alibi.parallel.axes` and `SPLIT` say.

    Other leaves are replicated, and a dimension is whole if the devices don't divide it.

    Args:
      gathered: leave out fsdp: the parameters as both passes read them with `mesh.gather=update`.
    """
    splitting = {*AXES} - ({"fsdp"} if gathered else set())

    def sharding(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = path_name(path)
        _, axes = leaf_of(name, len(leaf.shape))
        split = [
            axis if axis in splitting and size % mesh.shape[axis] == 0 else None
            for axis, size in zip(map(SPLIT.get, axes), leaf.shape, strict=False)
        ]
        return NamedSharding(mesh, P(*split))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def laid_out(shapes: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Returns `shapes` with the shardings of `tree_shardings`."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        tree_shardings(shapes, mesh),
    )


def check_auto(arrays: PyTree) -> None:
    """Raises ValueError if an array is split over Explicit axes of a mesh (`jax.set_mesh`)."""
    for leaf in jax.tree.leaves(arrays):
        sharding = jax.typeof(leaf).sharding
        if sharding.mesh.explicit_axes and any(sharding.spec):
            raise ValueError(
                f"arrays of the model are split over Explicit axes of a mesh, {sharding.spec}, and the model needs "
                "Auto axes; call jax.sharding.auto_axes(model.apply, out_sharding=...), as docs/attention.md shows, or "
                "give the mesh axis_types=(jax.sharding.AxisType.Auto, ...)"
            )


def batch_parts(sharding: Sharding | None) -> int:
    """Returns into how many parts a sharding splits the first dimension, or 1 without a sharding."""
    if sharding is None:
        return 1
    size = sharding.num_devices
    return size // sharding.shard_shape((size,))[0]


def local_rows(sharding: Sharding, rows: int) -> Int[np.ndarray, " local"]:
    """Returns which of `rows` rows this host's devices hold under `sharding`, ascending."""
    held = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index] for index in held]))


def split_batch(
    x: Float[Array, "batch length features"],
    sharding: NamedSharding | None,
    *,
    split_features: bool = False,
) -> Float[Array, "batch length features"]:
    """Returns `x` constrained to `sharding`, if its parts divide the batch.

    Without the constraint the compiler follows split parameters, and each device computes the whole
    batch. Each device has the other dimensions whole, or with `split_features` as the compiler
    chooses (for logits of a split vocabulary).
    """
    if sharding is None or x.shape[0] % batch_parts(sharding):
        return x
    if split_features:
        over_batch = sharding.spec[0] if sharding.spec else None
        sharding = NamedSharding(sharding.mesh, P(over_batch, *(P.UNCONSTRAINED,) * (x.ndim - 1)))
    return jax.lax.with_sharding_constraint(x, sharding)


def whole_rows(
    table: Float[Array, "rows features"], sharding: NamedSharding | None
) -> Float[Array, "rows features"]:
    """Returns a table of which each device has whole rows, for tokens with this sharding.

    Under fsdp they are gathered here, before a loop that reads them. Each device has their gradient
    whole. The compiler for TPUs sums it over devices once, behind the loop, on CPUs in each round.
    """
    if sharding is None or sharding.mesh.shape.get("fsdp", 1) == 1:
        return table
    return jax.lax.with_sharding_constraint(
        table, NamedSharding(sharding.mesh, P(P.UNCONSTRAINED, None))
    )


def for_lookup(
    table: Float[Array, "rows features"], sharding: NamedSharding | None
) -> Float[Array, "rows features"]:
    """Returns a table to look up rows for tokens with this sharding.

    If both data and fsdp split the tokens, each device gets whole rows and sums the gradient of its
    own tokens. Otherwise XLA would gather all tokens' gradients on each device.
    """
    if sharding is None or sharding.mesh.shape.get("data", 1) == 1:
        return table
    return whole_rows(table, sharding)


def heads_sharding(sharding: NamedSharding | None) -> NamedSharding | None:
    """Returns the sharding of queries, keys and values `[batch, length, heads, head_dim]`.

    The axes of the mesh that don't split the batch in `sharding` split the heads.
    """
    if sharding is None:
        return None
    over_batch = sharding.spec[0] if sharding.spec else None
    taken = over_batch if isinstance(over_batch, tuple) else (over_batch,)
    rest = tuple(axis for axis in sharding.mesh.axis_names if axis not in taken)
    return NamedSharding(sharding.mesh, P(over_batch, None, rest or None))
