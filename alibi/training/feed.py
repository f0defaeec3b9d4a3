"""Batches on the devices: each host reads its own rows, one update ahead."""

import concurrent.futures

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from alibi.data.batches import TrainBatches
from alibi.parallel.sharding import batch_sharding

Batch = tuple[Int[Array, "micro batch length"], Int[Array, "micro batch length"]]


class Feed:
    """Gives the batch of each update as global arrays `[micro, batch, length]`, batch split over the mesh.

    Row r of micro-batch m is row m * batch + r of the update's sequences, so the data
    of an update depends neither on the devices nor on the hosts.
    """

    def __init__(self, batches: TrainBatches, mesh: Mesh, micro_batches: int):
        self._batches = batches
        self._sharding = batch_sharding(mesh, leading=1)
        self._shape = (micro_batches, batches.batch_size // micro_batches, batches.length)
        self._rows = _local_rows(self._sharding, self._shape)
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._ahead: tuple[int, concurrent.futures.Future] | None = None

    @property
    def abstract(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of a batch."""
        array = jax.ShapeDtypeStruct(self._shape, np.int32, sharding=self._sharding)
        return array, array

    def read_ahead(self, step: int) -> None:
        """Starts to read the batch of update number `step`, on a thread of its own."""
        self._ahead = step, self._pool.submit(self._read, step)

    def get(self, step: int, *, last: bool = False) -> Batch:
        """The batch of update number `step` (from 0); starts to read the next one unless this is the last."""
        ahead = self._ahead
        local = ahead[1].result() if ahead is not None and ahead[0] == step else self._read(step)
        self._ahead = None
        if not last:
            self.read_ahead(step + 1)
        inputs, targets = (jax.make_array_from_process_local_data(self._sharding, rows, self._shape) for rows in local)
        return inputs, targets

    def _read(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        micro_batches, _, length = self._shape
        rows = np.arange(micro_batches)[:, None] * self._shape[1] + self._rows[None, :]
        inputs, targets = self._batches.rows(step, rows.ravel().tolist())
        return inputs.reshape(micro_batches, -1, length), targets.reshape(micro_batches, -1, length)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _local_rows(sharding: jax.sharding.NamedSharding, shape: tuple[int, int, int]) -> np.ndarray:
    """The rows of the batch dimension that this host's devices hold, ascending."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([np.arange(shape[1])[index[1]] for index in indices if index is not None]))
