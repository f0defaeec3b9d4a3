"""Batches on the devices: each host reads its own rows, one update ahead."""

import concurrent.futures
import time

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from alibi.data.batches import TrainBatches
from alibi.parallel.sharding import batch_sharding, local_rows

Batch = tuple[Int[Array, "micro batch length"], Int[Array, "micro batch length"]]


class Feed:
    """Gives the batch of each update as global arrays `[micro, batch, length]`, batch split over the mesh.

    Row r of micro-batch m is row m * batch + r of the update's sequences, so the data
    of an update depends neither on the devices nor on the hosts.
    """

    def __init__(self, batches: TrainBatches, mesh: Mesh, micro_batches: int):
        rows = batches.batch_size // micro_batches
        self._batches = batches
        self._sharding = batch_sharding(mesh, leading=1)
        self._shape = (micro_batches, rows, batches.length)
        self._rows = np.arange(micro_batches)[:, None] * rows + local_rows(batch_sharding(mesh), rows)
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._ahead: dict[int, concurrent.futures.Future] = {}
        self.waited = 0.0  # seconds that `get` has waited for rows to be read, in all

    @property
    def abstract(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of a batch."""
        array = jax.ShapeDtypeStruct(self._shape, np.int32, sharding=self._sharding)
        return array, array

    def read_ahead(self, step: int) -> None:
        """Starts to read the batch of update number `step`, on a thread of its own."""
        self._ahead[step] = self._pool.submit(self._read, step)

    def get(self, step: int, *, last: bool = False) -> Batch:
        """The batch of update number `step` (from 0); starts to read the next one unless this is the last."""
        if step not in self._ahead:
            self.read_ahead(step)
        start = time.perf_counter()
        local = self._ahead.pop(step).result()
        self.waited += time.perf_counter() - start
        if not last:
            self.read_ahead(step + 1)
        inputs, targets = (jax.make_array_from_process_local_data(self._sharding, rows, self._shape) for rows in local)
        return inputs, targets

    def _read(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (*self._rows.shape, self._batches.length)
        inputs, targets = self._batches.rows(step, self._rows.ravel().tolist())
        return inputs.reshape(shape), targets.reshape(shape)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
