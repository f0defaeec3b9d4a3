"""The CPU's attention: for short lengths against `reference`, in value and all gradients (test_sink.py
has the formulas in float64); and of a single query against a cache, which is copied at no token.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alibi import alibi_slopes, attend, generation
from alibi.attention import AttentionOptions, method_attention_fn
from alibi.attention.backends import choose, compute
from alibi.attention.call import AttentionCall
from alibi.attention.cpu import saved
from alibi.attention.cpu.saved import QueryBlock, query_blocks
from alibi.attention.reference import dense
from alibi.model.decoder import build_model
from alibi.positions import AlibiBias, Bias, make_position
from tests.attention.calls import assert_equals_reference, inputs, on
from tests.programs import AS_USERS
from tests.refusals import assert_refused


class Written(Bias):
    """A bias written out for all heads, queries and keys."""

    values: jax.Array = flax.struct.field(metadata={"axes": {"heads": 0, "queries": 1, "keys": 2}})

    def __call__(self, query_positions, key_positions):
        return self.values


attention = functools.partial(attend, backend="saved")


def _inputs(q_length, k_length, heads=2):
    """Query, key, value, the values of a bias, and the gradient of the result."""
    bias = np.random.default_rng(1).standard_normal((heads, q_length, k_length), np.float32)
    query, key, value, out = map(jnp.asarray, inputs(2, q_length, k_length, heads, 4))
    return query, key, value, jnp.asarray(bias), out


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
    assert_refused(
        "positions are not known when it is traced",
        value_and_gradients,
        params,
        arrays,
        "saved",
        ascending=False,
    )


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


def last_query(query, key, value):
    positions, heads = np.arange(key.shape[1]), query.shape[2]
    bias = AlibiBias(alibi_slopes(heads))
    return AttentionCall(query[:, -1:], key, value, bias, True, positions[-1:], positions)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_slots_may_come_first_or_last(kv_heads):
    """As Flax's cache and this project's hold them, with keys for each head or shared by two."""

    @jax.jit
    def attended(*arrays):
        call = last_query(*arrays)
        calls = [dataclasses.replace(call, slots_last=last) for last in (False, True)]
        return dense(call.with_own_heads()), [compute(call, "single") for call in calls]

    expected, results = attended(*inputs(2, 1, 300, 4, 16, kv_heads=kv_heads)[:3])
    for got in results:
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


def test_auto_takes_it_for_one_query_on_one_cpu(unchecked):
    query, key, value = map(jnp.asarray, inputs(2, 16, 16, 2, 16)[:3])
    call = last_query(query, key, value)
    assert choose(call) == "saved"
    alone = dataclasses.replace(call, devices=1)
    assert choose(alone) == "single"
    assert choose(on(alone, "gpu")) == "reference"


def test_generating_copies_a_cache_at_no_token(tiny_config, monkeypatch):
    """XLA would hold the cache twice more, and copy it to write each token."""
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    temporary, of_cache = memory_of_generating(tiny_config, 4, num_kv_heads=2)
    assert temporary < of_cache


def test_several_devices_copy_their_parts_of_the_cache_at_no_token(tiny_config):
    """Split as a view, XLA would copy all keys and values before and after, for each layer."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    temporary, of_cache = memory_of_generating(tiny_config, 4, mesh)
    assert temporary < of_cache // 4


def memory_of_generating(tiny_config, batch, mesh=None, **sizes):
    """Returns the bytes of temporary memory of a program that decodes, and the bytes of its values."""
    sizes = {"width": 64, "num_heads": 4, "num_layers": 1} | sizes
    config = tiny_config(position="alibi", **{f"model__{key}": size for key, size in sizes.items()})
    model = build_model(config, 40, sharding=mesh and NamedSharding(mesh, P("data")))

    def placed(leaf):
        if mesh is None:
            return leaf
        of_heads = P("data", "tensor") if leaf.ndim == 4 else P("data") if leaf.ndim == 2 else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, of_heads))

    params = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))["params"]
    cache = jax.tree.map(placed, jax.eval_shape(lambda: generation.new_cache(model, batch, 2048)))
    keys, logits = jax.random.split(jax.random.key(0), batch), np.zeros((batch, 1, 40), np.float32)
    compiled = generation.decode.lower(
        model, params, cache, logits, keys, 0, sample=generation.GREEDY, count=4
    ).compile(compiler_options=AS_USERS)
    held = cache["layers_0"]["held"].value
    return compiled.memory_analysis().temp_size_in_bytes, held.size * held.dtype.itemsize
