"""Learning rates at the updates where the recipe says them, and NAG by its own equations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alibi.config import make_config, read_config
from alibi.optimizers import make_optimizer, make_schedule
from configs import wikitext103

RECIPE = {0: 1e-7, 8_000: 0.50000005, 16_000: 1.0, 83_500: 0.853568, 151_000: 0.50005, 218_500: 0.146532,
          285_999: 1.0000e-4, 286_000: 0.75}  # fmt: skip


def test_the_papers_rates() -> None:
    schedule = jax.jit(make_schedule(read_config(wikitext103.get_config()).optimizer, 286_001))
    for update, rate in RECIPE.items():
        np.testing.assert_allclose(schedule(update), rate, rtol=1e-6, err_msg=str(update))


def test_restarts_follow_the_formula_to_six_digits() -> None:
    """Each cycle twice as long and 0.75 as high; the last updates of a cycle are where float32 is
    lost otherwise.
    """
    config = read_config(
        wikitext103.get_config("optimizer.warmup_steps=16,optimizer.period_steps=40")
    ).optimizer
    schedule = jax.jit(jax.vmap(make_schedule(config, 300)))
    expected = [1e-7 + (1 - 1e-7) * k / 16 for k in range(16)]
    for cycle in range(3):
        length, low, high = 40 * 2**cycle, 1e-4 * 0.75**cycle, 0.75**cycle
        expected += [
            low + (high - low) * 0.5 * (1 + np.cos(np.pi * k / length)) for k in range(length)
        ]
    np.testing.assert_allclose(schedule(jnp.arange(296)), expected[:296], rtol=1e-6)


def test_rates_that_do_not_end_with_the_run() -> None:
    """fairseq's inverse_sqrt at its `num_updates`, and a constant rate, both after the warm-up."""
    updates, rates = np.asarray([0, 5, 10, 40, 1000]), {}
    for name in ("inverse_sqrt", "constant"):
        config = make_config(f"optimizer.schedule={name},optimizer.warmup_steps=10").optimizer
        rates[name] = jax.jit(jax.vmap(make_schedule(config, 10**9)))(updates)
    falling = [0.0, 1.5e-3, *(3e-3 * 10**0.5 * updates[2:] ** -0.5)]
    np.testing.assert_allclose(rates["inverse_sqrt"], falling, rtol=1e-6)
    np.testing.assert_allclose(rates["constant"], [0.0, 1.5e-3, 3e-3, 3e-3, 3e-3], rtol=1e-6)
    for name in ("inverse_sqrt", "constant"):
        at_once = make_config(f"optimizer.schedule={name},optimizer.warmup_steps=0").optimizer
        np.testing.assert_allclose(make_schedule(at_once, 9)(0), 3e-3, rtol=1e-6)


def test_nag_is_the_update_of_the_papers_code() -> None:
    """fairseq's buffer holds the learning rate: v' = mu (lr / old lr) v - lr g, p' = p + mu (lr' /
    lr) v' - lr g.
    """
    config = read_config(
        wikitext103.get_config(
            "optimizer.warmup_steps=2,optimizer.period_steps=8,optimizer.clip_norm=0.0"
        )
    )
    optimizer, schedule = make_optimizer(config.optimizer, 10)
    params = jnp.asarray([1.0, -2.0])
    state, theirs, buffer, old = (
        optimizer.init(params),
        np.asarray(params, np.float64),
        np.zeros(2),
        float(schedule(0)),
    )
    for update in range(8):
        gradient = np.array([0.3, -0.1]) * (update + 1) / 10
        updates, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
        rate = float(schedule(update))
        buffer = 0.99 * rate / old * buffer - rate * gradient
        theirs = theirs + 0.99 * buffer - rate * gradient
        old = rate
        np.testing.assert_allclose(params, theirs, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.name=nag", "optimizer.weight_decay=0.1: nag has none"),
        (
            "optimizer.schedule=cosine_restarts,optimizer.min_learning_rate=0.1",
            "min_learning_rate=0.1 must be at most",
        ),
        ("optimizer.schedule=cosine_restarts,optimizer.period_steps=1", "more than 64 cycles"),
        ("optimizer.warmup_steps=600", "optimizer.warmup_steps=600 must be below train.steps=600"),
    ],
)
def test_what_makes_no_optimizer_is_refused(change: str, message: str) -> None:
    config = make_config(change)
    with pytest.raises(ValueError, match=message):
        make_optimizer(config.optimizer, config.train.steps)
