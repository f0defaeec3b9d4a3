"""Keeps the batch of activations split over the devices, whatever lies on the other side of a product."""

import jax
from jax.sharding import NamedSharding
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
