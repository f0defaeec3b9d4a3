"""An update: its batch on the devices, the state, and the jitted step."""

import concurrent.futures
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree, UInt32

from alibi.data.batches import TrainBatches
from alibi.model.decoder import DecoderLM
from alibi.model.loss import TokenLoss, cross_entropy
from alibi.objectives import Batch
from alibi.parallel.sharding import batch_sharding, laid_out, local_rows, tree_shardings
from alibi.runs.checkpoint import TrainState

Metrics = dict[str, Float[Array, ""]]
TrainStep = Callable[..., tuple[TrainState, Metrics]]  # takes a state and a batch's arrays


class Feed:
    """A run's batches: global arrays `[micro, batch, length]`, split over the mesh by batch.

    Each host reads its own rows, one update ahead. Row r of micro-batch m is row m * batch + r of an
    update's sequences, so the data depends neither on devices nor on hosts. With `others`, the batches
    of further seeds, arrays have a first axis of seeds.

    Attributes:
      waited: seconds that `get` has waited for rows so far.
    """

    def __init__(
        self,
        batches: TrainBatches,
        mesh: Mesh,
        micro_batches: int,
        others: Sequence[TrainBatches] = (),
    ):
        rows = batches.batch_size // micro_batches
        self._batches = (batches, *others)
        seeds = [len(self._batches)] if others else []
        # Not in the thread: while Grain is imported, imports of all threads are lazy (etils), and a
        # writer's class that is imported then can't be called.
        for each in self._batches:
            each.block(0, 0)
        self._sharding = batch_sharding(mesh, leading=len(seeds) + 1)
        self._shape = (*seeds, micro_batches, rows, batches.length)
        self._rows = np.arange(micro_batches)[:, None] * rows + local_rows(
            batch_sharding(mesh), rows
        )
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._ahead: dict[int, concurrent.futures.Future] = {}
        self.waited = 0.0

    @property
    def abstract(self) -> Batch:
        """Shape, dtype and sharding of a batch."""
        array = jax.ShapeDtypeStruct(self._shape, np.int32, sharding=self._sharding)
        return jax.tree.map(lambda x: array, self._batches[0].rows(0, []))

    def read_ahead(self, step: int) -> None:
        """Starts to read the batch of update `step` in a thread."""
        self._ahead[step] = self._pool.submit(self._read, step)

    def get(self, step: int, *, last: bool = False) -> Batch:
        """Returns the batch of update `step`, from 0, and starts to read the next unless it is the last."""
        if step not in self._ahead:
            self.read_ahead(step)
        start = time.perf_counter()
        local = self._ahead.pop(step).result()
        self.waited += time.perf_counter() - start
        if not last:
            self.read_ahead(step + 1)
        return jax.tree.map(
            lambda rows: jax.make_array_from_process_local_data(self._sharding, rows, self._shape),
            local,
        )

    def _read(self, step: int) -> Batch:
        shape = (*self._shape[:-3], *self._rows.shape, self._shape[-1])
        batches = [each.rows(step, self._rows.ravel().tolist()) for each in self._batches]
        return jax.tree.map(lambda *of_seeds: np.stack(of_seeds).reshape(shape), *batches)

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(cancel_futures=True)


def abstract_state(
    model: DecoderLM, optimizer: optax.GradientTransformation, mesh: Mesh | AbstractMesh
) -> TrainState:
    """Returns shapes, dtypes and shardings of the state, without allocating it."""
    initial = functools.partial(_initial, model, optimizer)
    return laid_out(jax.eval_shape(initial, np.uint32(0)), mesh)


def initial_state(
    model: DecoderLM,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    seed: int | Sequence[int],
) -> TrainState:
    """Returns the state before the first update. Each device makes its own part.

    Args:
      seed: with several, all leaves have a first axis of seeds, and each device has them whole.
    """
    seeds, shardings = np.asarray(seed, np.uint32), NamedSharding(mesh, PartitionSpec())
    if not isinstance(seed, int):
        each = jax.vmap(functools.partial(_initial, model, optimizer))
        return jax.jit(each, out_shardings=shardings)(seeds)
    abstract = abstract_state(model, optimizer, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    # by static arguments, so that a process traces it once for a model
    initial = jax.jit(_initial, static_argnums=(0, 1), out_shardings=shardings)
    return initial(model, optimizer, seeds)


@functools.partial(jax.jit, static_argnums=0)  # traced once for shapes and for values
def _initial_params(model: DecoderLM, seed: UInt32[Array, ""]) -> PyTree:
    return model.init(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))["params"]


def _initial(
    model: DecoderLM, optimizer: optax.GradientTransformation, seed: UInt32[Array, ""]
) -> TrainState:
    params = _initial_params(model, seed)
    return TrainState(
        step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params)
    )


def make_train_step(
    model: DecoderLM,
    optimizer: optax.GradientTransformation,
    seed: int | Sequence[int],
    *,
    loss: TokenLoss = cross_entropy,
    schedule: optax.Schedule = lambda step: jnp.nan,
    state_shardings: TrainState | None = None,
    gather: str = "layer",
) -> jax.stages.Wrapped:
    """Returns a jitted function from (state, *batch) to (state, metrics), which donates the state.

    Arrays of a batch are `[micro, batch, length]`. The update follows the gradient of the mean loss
    over all predicted tokens of all micro-batches. The metrics are nll_nats and tokens (sums over
    these tokens), gradient_norm (before clipping), update_norm and learning_rate.

    Args:
      seed: seeds dropout. With several, the state, arrays and metrics have a first axis of seeds, and
        each seed is updated as if alone.
      loss: a token's loss, as in `Head.token_losses`.
      schedule: learning rate of an update, from 0, for the metrics.
      state_shardings: shardings of the returned state. Defaults to the compiler's choice.
      gather: `config.mesh.gather`, for a model with a sharding.
    """

    def losses(params: PyTree, batch: Batch, key: Array) -> tuple[Array, Array]:
        variables, rngs = {"params": params}, {"dropout": key}
        arguments = {"deterministic": False, "loss": loss, "summed": True, **batch._asdict()}
        sums: Any = model.apply(variables, rngs=rngs, method="token_losses", **arguments)
        return sums

    def update(state: TrainState, *arrays: Array, seed: Any = seed) -> tuple[TrainState, Metrics]:
        batch = Batch(*arrays)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        read, constrained = state.params, jax.lax.with_sharding_constraint
        mesh = model.sharding.mesh if gather == "update" and model.sharding else None
        if mesh is not None:
            read = constrained(read, tree_shardings(read, mesh, gathered=True))
        gradient, nll = _summed(jax.grad(losses, has_aux=True), read, batch, key)
        if mesh is not None:
            gradient = constrained(gradient, tree_shardings(gradient, mesh))
        tokens = (batch.targets >= 0).sum().astype(jnp.float32)
        gradient = jax.tree.map(lambda leaf: leaf / jnp.maximum(tokens, 1.0), gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        update_norm = optax.tree.norm(updates)
        # An update that is not finite is not applied. So its norm comes first, and XLA, which would
        # otherwise copy all parameters before each step, writes the new parameters in their place.
        params = jax.tree.map(
            lambda new, old: jnp.where(jnp.isfinite(update_norm), new, old),
            model.within_limits(optax.apply_updates(state.params, updates)),
            state.params,
        )
        metrics = {
            "nll_nats": nll,
            "tokens": tokens,
            "gradient_norm": optax.tree.norm(gradient),
            "update_norm": update_norm,
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
        }
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    # The state goes in as it comes out, or the second update would be another program than the
    # first.
    out_shardings = None if state_shardings is None else (state_shardings, None)
    if isinstance(seed, int):
        return jax.jit(update, donate_argnums=0, out_shardings=out_shardings)
    of_seeds = functools.partial(jax.vmap(update), seed=np.asarray(seed, np.uint32))
    return jax.jit(of_seeds, donate_argnums=0, out_shardings=out_shardings)


def _summed(
    gradient_and_nll: Callable[..., tuple[PyTree, Array]],
    params: PyTree,
    batch: Batch,
    key: Array,
) -> tuple[PyTree, Array]:
    """Returns sums over micro-batches, with one micro-batch in memory at a time."""
    micro_batches = batch.inputs.shape[0]
    if micro_batches == 1:
        only = jax.tree.map(lambda x: x[0], batch)
        return gradient_and_nll(params, only, jax.random.fold_in(key, 0))

    def add(total: PyTree, micro: tuple[Array, Batch]) -> tuple[PyTree, None]:
        index, of_micro = micro
        sums = gradient_and_nll(params, of_micro, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, total, sums), None

    zero = jax.tree.map(jnp.zeros_like, (params, jnp.zeros(())))
    total, _ = jax.lax.scan(add, zero, (jnp.arange(micro_batches), batch))
    return total
