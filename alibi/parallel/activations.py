"""How activations lie on the devices: the batch stays split, whatever lies on the other side of a product."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float


def batch_parts(sharding: NamedSharding | None) -> int:
    """Into how many parts a sharding splits the first dimension; None: one."""
    if sharding is None:
        return 1
    size = sharding.mesh.size
    return size // sharding.shard_shape((size,))[0]


def split_batch(
    x: Float[Array, "batch length features"], sharding: NamedSharding | None
) -> Float[Array, "batch length features"]:
    """`x` laid out by `sharding`, where its parts divide the batch.

    Without this, split parameters win and each device does all.
    """
    if sharding is None or x.shape[0] % batch_parts(sharding):
        return x
    return jax.lax.with_sharding_constraint(x, sharding)


def heads_sharding(sharding: NamedSharding | None) -> NamedSharding | None:
    """Of queries, keys and values `[batch, length, heads, head_dim]`, given that of activations.

    The axes of the mesh that don't split the batch split the heads.
    """
    if sharding is None:
        return None
    over_batch = sharding.spec[0] if sharding.spec else None
    taken = over_batch if isinstance(over_batch, tuple) else (over_batch,)
    rest = tuple(axis for axis in sharding.mesh.axis_names if axis not in taken)
    return NamedSharding(sharding.mesh, P(over_batch, None, rest or None))
