"""One update of the parameters."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from alibi.model.decoder import DecoderLM
from alibi.runs.checkpoint import TrainState

Metrics = dict[str, Float[Array, ""]]
TrainStep = Callable[[TrainState, Int[Array, "micro batch length"], Int[Array, "micro batch length"]],
                     tuple[TrainState, Metrics]]  # fmt: skip


def make_train_step(
    model: DecoderLM,
    optimizer: optax.GradientTransformation,
    seed: int,
    *,
    schedule: optax.Schedule = lambda step: jnp.nan,
    state_shardings: TrainState | None = None,
) -> jax.stages.Wrapped:
    """A jitted function of (state, inputs, targets) `[micro, batch, length]` to (state, metrics); donates the state.

    The update follows the gradient of the mean NLL of all the tokens of all
    micro-batches. The metrics are nll_nats and tokens, which are sums, gradient_norm
    (before clipping), update_norm and learning_rate.

    Args:
      schedule: the learning rate of update number k, from 0; for the metrics only.
      state_shardings: of the state that comes out; None: as the compiler chooses.
    """

    token_nll = nn.apply(DecoderLM.token_nll, model)

    def loss(params: PyTree, inputs: Array, targets: Array, key: Array) -> Array:
        variables, rngs = {"params": params}, {"dropout": key}
        return jnp.sum(token_nll(variables, inputs, targets, deterministic=False, rngs=rngs))

    def update(state: TrainState, inputs: Array, targets: Array) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        nll, gradient = _summed(jax.value_and_grad(loss), state.params, inputs, targets, key)
        tokens = (targets >= 0).sum().astype(jnp.float32)
        gradient = jax.tree.map(lambda leaf: leaf / jnp.maximum(tokens, 1.0), gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        update_norm = optax.tree.norm(updates)
        # An update that is no number is not applied. So the norm comes first, and XLA, which
        # otherwise copies all parameters before each step for its sake, writes the new ones in their place.
        params = jax.tree.map(
            lambda new, old: jnp.where(jnp.isfinite(update_norm), new, old),
            model.position.within_limits(optax.apply_updates(state.params, updates)),
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

    # The state goes in as it comes out, or the second update would be another program than the first.
    out_shardings = None if state_shardings is None else (state_shardings, None)
    return jax.jit(update, donate_argnums=0, out_shardings=out_shardings)


def _summed(
    value_and_gradient: Callable[..., tuple[Array, PyTree]], params: PyTree, inputs: Array, targets: Array, key: Array
) -> tuple[Array, PyTree]:
    """The sum over micro-batches, one in memory at a time."""
    micro_batches = inputs.shape[0]
    if micro_batches == 1:
        return value_and_gradient(params, inputs[0], targets[0], jax.random.fold_in(key, 0))

    def add(total: PyTree, micro: tuple[Array, Array, Array]) -> tuple[PyTree, None]:
        index, *batch = micro
        part = value_and_gradient(params, *batch, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, total, part), None

    zero = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
    total, _ = jax.lax.scan(add, zero, (jnp.arange(micro_batches), inputs, targets))
    return total
