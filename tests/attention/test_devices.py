"""Attention that each of several devices computes of its own sequences and heads equals the one of a single device."""

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alibi import alibi_slopes, attend
from alibi.attention.augmented import augmented_attention
from alibi.attention.blocked import blocked_attention
from alibi.attention.call import AttentionCall
from alibi.attention.devices import on_each_device
from alibi.attention.tiles import make_plan
from alibi.batch_split import heads_sharding
from alibi.positions import AlibiBias, make_position

attend_module = importlib.import_module("alibi.attention.attend")  # the package has a function of that name
SPLIT = P(("data", "fsdp"), None, "tensor")


def mesh(data=2, fsdp=2, tensor=2):
    return jax.make_mesh((data, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def inputs(batch, length, heads, head_dim, *, kv_heads=None, seed=0):
    of_query, of_key, of_value, of_gradient = jax.random.split(jax.random.key(seed), 4)
    query, gradient = (jax.random.normal(key, (batch, length, heads, head_dim)) for key in (of_query, of_gradient))
    kv_shape = (batch, length, kv_heads or heads, head_dim)
    return query, jax.random.normal(of_key, kv_shape), jax.random.normal(of_value, kv_shape), gradient


def value_and_gradients(arrays, bias, sharding, **arguments):
    *arrays, gradient = arrays
    if sharding is not None:
        arrays = [jax.device_put(x, sharding) for x in arrays]

    def scalar(arrays, bias):
        attended = attend(*arrays, bias=bias, sharding=sharding, **arguments)
        return (attended * gradient).sum(), attended

    gradients, attended = jax.jit(jax.grad(scalar, argnums=(0, 1), has_aux=True))(arrays, bias)
    return jax.tree.leaves((attended, gradients))


def assert_as_on_one(arrays, bias, sharding, **arguments):
    expected = value_and_gradients(arrays, bias, None, **{**arguments, "backend": "reference"})
    for got, right in zip(value_and_gradients(arrays, bias, sharding, **arguments), expected, strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=2e-5 * (1 + np.abs(right).max()))


def t5_bias(heads):
    position = make_position("t5", num_heads=heads, head_dim=8, width=heads * 8, train_length=64, options={})
    return position.bias(position.init(jax.random.key(3)))


@pytest.mark.parametrize("backend", ["auto", "reference", "saved", "blocked", "augmented"])
def test_learned_slopes_and_a_table_go_with_their_heads(backend):
    """A head that got another's slope, or a gradient of one device alone, would show."""
    sharding, arrays = NamedSharding(mesh(), SPLIT), inputs(4, 40, 4, 8)
    assert_as_on_one(arrays, AlibiBias(alibi_slopes(4)), sharding, backend=backend)
    if backend != "augmented":
        assert_as_on_one(arrays, t5_bias(4), sharding, backend=backend)


def test_positions_segments_and_shared_keys_are_split_with_their_sequences():
    sharding, arrays = NamedSharding(mesh(), SPLIT), inputs(4, 40, 4, 8, kv_heads=2)
    starts = np.array([0, 10, 25, 39])[:, None]
    segments = jnp.asarray(np.arange(40)[None, :] >= starts, jnp.int32)
    positions = jnp.asarray(np.where(segments, np.arange(40) - starts, np.arange(40)))
    sides = {"query_positions": positions, "key_positions": positions, "segment_ids": segments}
    assert_as_on_one(arrays, AlibiBias(alibi_slopes(4)), sharding, backend="blocked", **sides)
    assert_as_on_one(arrays, AlibiBias(alibi_slopes(4)), sharding, backend="auto", **sides)


@pytest.mark.parametrize("arguments", [{"mask": jnp.ones((1, 1, 12, 12), bool)}, {"backend": "saved"}])
def test_what_cannot_be_split_is_left_to_the_compiler(arguments):
    """A mask, and three sequences on four parts of the batch."""
    batch = 4 if "mask" in arguments else 3
    arrays, bias = inputs(batch, 12, 4, 8), AlibiBias(alibi_slopes(4))
    replicated = [*arrays[:3]]
    got = attend(*replicated, bias=bias, sharding=NamedSharding(mesh(), SPLIT), **arguments)
    expected = attend(*arrays[:3], bias=bias, backend="reference")
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_each_device_skips_by_its_own_heads():
    """Where the compiler splits heads they go together, and the gentlest slope of all keeps every tile."""
    sharding = NamedSharding(mesh(1, 1, 8), SPLIT)
    query, key, value, _ = inputs(1, 2048, 8, 8)
    bias, groups = AlibiBias(alibi_slopes(8)), []

    def heads_together(own):
        plan = make_plan(own, "cpu")
        groups.append((own.query.shape, plan.head_groups))
        return blocked_attention(own)

    call = AttentionCall(query, key, value, bias, True, np.arange(2048), np.arange(2048))
    attended = on_each_device(call, sharding, heads_together)
    assert groups == [((1, 2048, 1, 8), 1)]
    assert make_plan(call, "cpu").head_group == 8
    np.testing.assert_allclose(attended, attend(query, key, value, bias=bias, backend="reference"), atol=2e-5)
    program = jax.jit(lambda *x: attend(*x, bias=bias, backend="blocked", sharding=sharding))
    placed = [jax.device_put(x, sharding) for x in (query, key, value)]
    text = program.lower(*placed).compile().as_text()
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", text)


def test_auto_takes_a_kernel_on_each_of_several_tpus(monkeypatch):
    """The slopes of a device's own heads are picked when it runs, and count as known all the same."""
    taken = []
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(attend_module, "compute", lambda call, name: taken.append(name) or call.query)
    arrays, sharding = [jnp.zeros((4, 1024, 4, 64), jnp.bfloat16)] * 3, NamedSharding(mesh(), SPLIT)
    attend(*arrays, slopes=alibi_slopes(4))
    attend(*arrays, slopes=alibi_slopes(4), sharding=sharding)
    assert taken == ["reference", "augmented"]
    jax.grad(lambda slopes: attend(*arrays, slopes=slopes, sharding=sharding).astype(jnp.float32).sum())(
        alibi_slopes(4)
    )
    assert taken[2] == "reference", "slopes that learn"


@pytest.mark.parametrize("gradient", [False, True])
def test_splash_attention_lowers_for_several_tpus(gradient):
    """Mosaic's lowering, not the TPU compiler's. Each device gets its two sequences and two heads."""
    tpu = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    axes = {"axis_types": (AxisType.Auto,) * 3, "abstract_device": tpu}
    sharding = NamedSharding(jax.sharding.AbstractMesh((2, 1, 2), ("data", "fsdp", "tensor"), **axes), SPLIT)
    arrays = [jax.ShapeDtypeStruct((4, 256, 4, 64), jnp.bfloat16, sharding=sharding)] * 3

    def attention(query, key, value):
        positions = np.arange(256)
        call = AttentionCall(query, key, value, AlibiBias(alibi_slopes(4)), True, positions, positions)
        return on_each_device(call, sharding, lambda own: augmented_attention(own, "tpu"))

    step = jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2)) if gradient else attention
    with jax.sharding.use_abstract_mesh(sharding.mesh):
        module = jax.export.export(jax.jit(step), platforms=["tpu"])(*arrays).mlir_module()
    assert module.count("tpu_custom_call") == (3 if gradient else 1)
    assert re.search(r"tpu_custom_call.*2x2x256x72xbf16", module), "a device's sequences and heads, with the columns"


def test_the_axes_that_do_not_split_the_batch_split_the_heads():
    batch = NamedSharding(mesh(), P(("data", "fsdp")))
    assert heads_sharding(batch).spec == P(("data", "fsdp"), None, ("tensor",))
    assert heads_sharding(None) is None


def test_a_sharding_of_lengths_is_refused():
    query, key, value, _ = inputs(4, 16, 4, 8)
    with pytest.raises(ValueError, match="it may split batch and heads alone"):
        attend(query, key, value, slopes=alibi_slopes(4), sharding=NamedSharding(mesh(), P("data", "tensor")))
