"""A single query against a cache equals the dense formula, and the cache is copied at no token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alibi import alibi_slopes, generation
from alibi.attention.backends import choose, compute
from alibi.attention.call import AttentionCall
from alibi.attention.reference import dense
from alibi.model.decoder import build_model
from alibi.positions import AlibiBias
from tests.attention.calls import inputs, on
from tests.programs import AS_USERS


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
