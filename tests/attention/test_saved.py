"""The CPU's attention for short lengths against `reference`, in value and all gradients; test_sink.py
has the formulas in float64.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi import attend
from alibi.attention import AttentionOptions, method_attention_fn
from alibi.attention.cpu import saved
from alibi.attention.cpu.saved import QueryBlock, query_blocks
from alibi.positions import Bias, make_position
from tests.attention.calls import assert_equals_reference


class Written(Bias):
    """A bias written out for all heads, queries and keys."""

    values: jax.Array = flax.struct.field(metadata={"axes": {"heads": 0, "queries": 1, "keys": 2}})

    def __call__(self, query_positions, key_positions):
        return self.values


attention = functools.partial(attend, backend="saved")


def _inputs(q_length, k_length, heads=2, head_dim=4, batch=2):
    """Query, key, value, the values of a bias, and the gradient of the result."""
    rng = np.random.default_rng(0)
    query, out = rng.standard_normal((2, batch, q_length, heads, head_dim))
    key, value = rng.standard_normal((2, batch, k_length, heads, head_dim))
    bias = rng.standard_normal((heads, q_length, k_length))
    return [jnp.asarray(x, jnp.float32) for x in (query, key, value, bias, out)]


# Two blocks of queries and an odd last one; fewer queries than keys, and a single query.
@pytest.mark.parametrize(
    ("q_length", "k_length", "causal", "window"),
    [
        (131, 131, True, None),
        (70, 200, True, 20),
        (1, 9, True, None),
        (131, 131, False, 20),
        (70, 200, False, None),
    ],
)
def test_value_and_gradients_are_those_of_dense_attention(q_length, k_length, causal, window):
    query, key, value, bias, out = _inputs(q_length, k_length)
    arrays, how = (query, key, value, out), {"causal": causal, "window": window}
    assert_equals_reference("saved", arrays, Written(bias), share=2e-5, **how)


@pytest.mark.parametrize(
    ("position", "drawn"),
    [
        ("kerple_log", 2),
        pytest.param("fire", 2, marks=pytest.mark.slow),
        ("fox", 1),
    ],
)
def test_positions_drawn_at_run_time(position, drawn):
    """Positions are drawn for each sequence, or for all.

    The mask goes by places in the sequence, since positions rise; without this promise the call is
    refused. FIRE's queries stand before and behind its threshold.
    """
    options = {"threshold": 150} if position == "fire" else {}
    method = make_position(
        position, num_heads=2, head_dim=4, width=8, train_length=64, options=options
    )
    params = {**method.init(jax.random.key(0)), **method.init_layer(jax.random.key(0))}
    x = jax.random.normal(jax.random.key(1), (2, 70, 8))
    arrays = [jax.random.normal(jax.random.key(seed), (2, 70, 2, 4)) for seed in (2, 3, 4)]
    rows = [
        np.sort(np.random.default_rng(seed).choice(300, 70, replace=False)) for seed in range(drawn)
    ]
    places = jnp.asarray(np.stack(rows))

    @functools.partial(jax.jit, static_argnums=(2, 3, 4))
    def value_and_gradients(params, arrays, backend, queries=70, ascending=True):
        def loss(params, arrays):
            options = AttentionOptions(backend=backend)
            positions = {"query_positions": places[..., -queries:], "key_positions": places}
            attend = method_attention_fn(
                method, params, x, **positions, ascending=ascending, options=options
            )
            return jnp.sin(attend(arrays[0][:, -queries:], *arrays[1:])).sum()

        return jax.value_and_grad(loss, (0, 1))(params, arrays)

    for queries in (70, 9):
        found, expected = (
            value_and_gradients(params, arrays, name, queries) for name in ("saved", "reference")
        )
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=3e-5), found, expected
        )
    with pytest.raises(ValueError, match="positions are not known when it is traced"):
        value_and_gradients(params, arrays, "saved", ascending=False)


def test_a_constant_bias_costs_no_gradient(monkeypatch):
    query, key, value, bias, _ = _inputs(128, 128, heads=3)
    summed, sum_first = [], saved.sum_first
    monkeypatch.setattr(saved, "sum_first", lambda x: summed.append(x.shape) or sum_first(x))

    def loss(query, bias):
        return attention(query, key, value, bias=Written(bias)).sum()

    jax.make_jaxpr(jax.grad(loss))(query, bias)
    assert summed == []
    jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(query, bias)
    # the gradient of each block's bias, summed over the batch
    assert summed == [(2, 3, 64, 64), (2, 3, 64, 128)]


def test_logits_above_the_diagonal_are_not_computed():
    """Two blocks at 128: the second half of the keys never meets the first half of the queries."""
    query, key, value, bias, _ = _inputs(128, 128, heads=3)
    assert query_blocks(128, 128, causal=True) == [
        QueryBlock(0, 64, 0, 64),
        QueryBlock(64, 128, 64, 128),
    ]
    text = jax.jit(lambda q: attention(q, key, value, bias=Written(bias))).lower(query).as_text()
    assert "tensor<6x64x64xf32>" in text
    assert "tensor<6x64x128xf32>" in text
    assert "tensor<6x128x128xf32>" not in text


def test_large_logits_neither_overflow_nor_vanish():
    query, key, value, bias, _ = _inputs(6, 6)
    attended = jax.jit(attention)(query * 1e3, key * 1e3, value, bias=Written(bias))
    assert np.isfinite(attended).all()
    # the first query sees one key
    np.testing.assert_allclose(attended[:, 0], value[:, 0], atol=1e-6)


def test_nan_is_not_hidden():
    query, key, value, bias, _ = _inputs(6, 6)
    attended = jax.jit(attention)(query.at[0, 3].set(jnp.nan), key, value, bias=Written(bias))
    assert np.isnan(attended[0, 3]).all()
    assert np.isfinite(attended[0, 4:]).all()
