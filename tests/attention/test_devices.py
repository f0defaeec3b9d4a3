"""Several devices, each with its own sequences and heads, compute the attention of a single device."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import alibi.linen
from alibi import alibi_slopes, attend
from alibi.attention import dispatch
from alibi.attention.accelerator.fused import fused_attention
from alibi.attention.blocked import blocked_attention
from alibi.attention.call import AttentionCall
from alibi.attention.dispatch import fitting_sharding, on_each_device
from alibi.attention.skipping import nearest_keys
from alibi.attention.tiles import make_tiling
from alibi.parallel.sharding import heads_sharding
from alibi.positions import AlibiBias, make_position
from alibi.positions.scaled import ScaledBias
from tests.attention.calls import abstract_device, assert_near, inputs, on, value_and_gradients
from tests.programs import AS_USERS
from tests.refusals import assert_refused

SPLIT = P(("data", "fsdp"), None, "tensor")


def mesh(data=1, fsdp=2, tensor=2):
    return jax.make_mesh(
        (data, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
    )


def assert_as_on_one(arrays, bias, sharding, **arguments):
    expected = value_and_gradients(arrays, bias, **{**arguments, "backend": "reference"})
    placed = [*(jax.device_put(x, sharding) for x in arrays[:3]), arrays[3]]
    assert_near(value_and_gradients(placed, bias, sharding=sharding, **arguments), expected, 2e-5)


def t5_bias(heads):
    position = make_position(
        "t5", num_heads=heads, head_dim=8, width=heads * 8, train_length=64, options={}
    )
    return position.bias(position.init(jax.random.key(3)))


@pytest.mark.parametrize("backend", ["auto", "blocked", "augmented", "fused"])
def test_learned_slopes_and_a_table_go_with_their_heads(backend):
    """A head with another's slope, or a gradient of a single device, would show."""
    sharding, arrays = NamedSharding(mesh(), SPLIT), inputs(4, 40, 40, 4, 8)
    if backend != "fused":  # whose kernels, interpreted, take long
        assert_as_on_one(arrays, AlibiBias(alibi_slopes(4)), sharding, backend=backend)
    if backend != "augmented":
        assert_as_on_one(arrays, t5_bias(4), sharding, backend=backend)
    if backend == "blocked":
        scaled = ScaledBias(t5_bias(4), jnp.asarray([0.3, -0.2, 0.5, 1.0]))
        assert_as_on_one(arrays, scaled, sharding, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_explicit_axes_give_the_same_and_each_device_its_own_heads(backend):
    """JAX's own default for a mesh: the type of an array says how it lies."""
    explicit = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    arrays, spec = inputs(2, 40, 40, 4, 8), P("data", None, "tensor", None)
    expected = value_and_gradients(arrays, AlibiBias(alibi_slopes(4)), backend="reference")
    with jax.set_mesh(explicit):
        placed = [jax.reshard(x, spec) for x in arrays]
        bias = AlibiBias(alibi_slopes(4))
        got = value_and_gradients(placed, bias, backend=backend)
        result = jax.jit(lambda *qkv: attend(*qkv, bias=bias, backend=backend))(*placed[:3])
    assert result.sharding.spec == spec
    assert_near(got, expected, 2e-5)


def test_weights_come_out_of_explicit_axes():
    """Also where heads share keys and a sink is split, which JAX's own types refuse."""
    explicit = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    arrays, sown = inputs(2, 12, 12, 4, 8, kv_heads=2)[:3], []
    how = {"slopes": alibi_slopes(4), "sink": jnp.arange(4.0)}
    attended = [attend(*map(jnp.asarray, arrays), sow=sown.append, **how)]
    with jax.set_mesh(explicit):
        placed = [jax.reshard(x, P("data", None, "tensor", None)) for x in arrays]
        attended.append(attend(*placed, sow=sown.append, **how))
    assert jax.typeof(sown[1]).sharding.spec == P("data", "tensor", None, None)
    for expected, found in (attended, sown):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_layers_and_closures_run_on_a_mesh_with_explicit_axes():
    x = jax.random.normal(jax.random.key(1), (2, 16, 32))
    layers = [
        *(
            alibi.linen.SelfAttention(num_heads=4, position=name)
            for name in ("t5", "deberta", "asentmax", "selective_rope")
        ),
        nn.MultiHeadDotProductAttention(4, attention_fn=alibi.alibi_attention_fn(num_heads=4)),
    ]
    for layer in layers:
        params = jax.jit(layer.init)(jax.random.key(0), x)
        expected = jax.jit(layer.apply)(params, x)
        with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))):
            got = jax.jit(layer.apply)(params, jax.reshard(x, P("data", None, None)))
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_shard_map_of_the_user_with_and_without_its_check():
    """Slopes vary with the heads; JAX's check of what varies knows `reference` alone."""
    devices, arrays = mesh(2, 1, 2), inputs(2, 40, 40, 4, 8)
    slopes, heads = alibi_slopes(4), P("data", None, "tensor")

    def of_parts(backend, **check):
        def attended(query, key, value, slopes):
            return attend(query, key, value, slopes=slopes, backend=backend)

        specs = (heads, heads, heads, P("tensor"))
        whole = jax.shard_map(attended, mesh=devices, in_specs=specs, out_specs=heads, **check)
        return jax.jit(
            jax.value_and_grad(lambda *given: (whole(*given) * arrays[3]).sum(), argnums=range(4))
        )(*arrays[:3], slopes)

    expected = of_parts("reference")
    for backend in ("saved", "blocked"):
        assert_refused(r"give jax\.shard_map check_vma=False", of_parts, backend)
        found = of_parts(backend, check_vma=False)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5), found, expected
        )


def test_positions_segments_and_shared_keys_are_split_with_their_sequences():
    sharding, arrays = NamedSharding(mesh(), SPLIT), inputs(4, 40, 40, 4, 8, kv_heads=2)
    starts = np.array([0, 10, 25, 39])[:, None]
    segments = jnp.asarray(np.arange(40)[None, :] >= starts, jnp.int32)
    positions = jnp.asarray(np.where(segments, np.arange(40) - starts, np.arange(40)))
    sides = {"query_positions": positions, "key_positions": positions, "segment_ids": segments}
    assert_as_on_one(arrays, AlibiBias(alibi_slopes(4)), sharding, backend="blocked", **sides)
    assert_as_on_one(arrays, AlibiBias(alibi_slopes(4)), sharding, backend="auto", **sides)


def test_a_mask_is_left_to_the_compiler():
    """A mask of each sequence and head."""
    arrays = inputs(4, 12, 12, 4, 8)[:3]
    attention = functools.partial(attend, slopes=alibi_slopes(4))
    mask = np.random.default_rng(5).random((4, 4, 12, 12)) < 0.5
    # Without jit, as users may call it.
    got = attention(
        *map(jnp.asarray, arrays), mask=jnp.asarray(mask), sharding=NamedSharding(mesh(), SPLIT)
    )
    expected = jax.jit(functools.partial(attention, backend="reference"))(*arrays, mask=mask)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("batch", "heads", "spec"), [(3, 4, P(None, None, "tensor")), (4, 3, P(("data", "fsdp")))]
)
def test_axes_that_do_not_divide_a_dimension_do_not_split_it(batch, heads, spec):
    """Each device then repeats the work of others; its part of a gradient must not be counted
    twice.
    """
    arrays = [jnp.asarray(x) for x in inputs(batch, 12, 12, heads, 8)]
    bias, sharding = AlibiBias(alibi_slopes(heads)), NamedSharding(mesh(), SPLIT)
    call = AttentionCall(*arrays[:3], bias, True, np.arange(12), np.arange(12))
    assert fitting_sharding(call, sharding).spec == P(*spec, *(None,) * (4 - len(spec)))
    expected = value_and_gradients(arrays, bias, backend="reference")
    query, key, value, gradient = arrays

    def scalar(arrays, bias):
        return (attend(*arrays, bias=bias, sharding=sharding, backend="saved") * gradient).sum()

    got = jax.jit(jax.grad(scalar, argnums=(0, 1)))([query, key, value], bias)
    assert_near(got, expected[1:], 2e-5)


def test_the_kernel_of_one_device_is_run_whole_where_nothing_can_be_split():
    """As for a single sequence, with which a model's parameters are made."""
    arrays = inputs(1, 32, 32, 3, 16)[:3]
    expected = jax.jit(functools.partial(attend, slopes=alibi_slopes(3), backend="reference"))(
        *arrays
    )
    sharding = NamedSharding(mesh(), SPLIT)
    for backend in ("fused", "auto"):
        got = jax.jit(
            functools.partial(attend, slopes=alibi_slopes(3), backend=backend, sharding=sharding)
        )(*arrays)
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_each_device_skips_by_its_own_heads():
    """Where the compiler splits heads they go together, and the gentlest slope of all keeps every
    tile.
    """
    sharding = NamedSharding(mesh(1, 1, 2), SPLIT)
    arrays = inputs(1, 2048, 2048, 4, 8)[:3]
    bias, positions, segments = (
        AlibiBias(alibi_slopes(4)),
        np.arange(2048),
        jnp.zeros((1, 2048), jnp.int32),
    )
    seen = []

    def on_own(own):
        seen.append(
            (own.query.shape[2], make_tiling(own).head_group, nearest_keys(own) is not None)
        )
        return blocked_attention(own)

    @jax.jit
    def on_each(*arrays):
        sides = {"query_segments": segments, "key_segments": segments}
        call = AttentionCall(*arrays, bias, True, positions, positions, **sides)
        assert make_tiling(call).head_group == 4
        return on_each_device(call, fitting_sharding(call, sharding), on_own)

    attended = on_each(*arrays)
    assert seen == [(2, 1, True)], (
        "heads of a device, how many go together, and whether own segments are known to be the same"
    )
    expected = jax.jit(lambda *x: attend(*x, bias=bias, backend="reference"))(*arrays)
    np.testing.assert_allclose(attended, expected, atol=2e-5)
    program = jax.jit(lambda *x: attend(*x, bias=bias, backend="blocked", sharding=sharding))
    placed = [jax.device_put(x, sharding) for x in arrays]
    text = program.lower(*placed).compile(compiler_options=AS_USERS).as_text()
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", text)


def test_auto_takes_a_kernel_on_each_of_several_tpus(monkeypatch):
    """The slopes of a device's own heads are picked when it runs, and count as known all the same."""
    taken = []
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(dispatch, "compute", lambda call, name: taken.append(name) or call.query)
    arrays, sharding = [jnp.zeros((4, 1024, 4, 64), jnp.bfloat16)] * 3, NamedSharding(mesh(), SPLIT)
    attend(*arrays, slopes=alibi_slopes(4))
    attend(*arrays, slopes=alibi_slopes(4), sharding=sharding)
    assert taken == ["reference", "fused"]


def test_the_fused_kernel_lowers_for_several_tpus():
    """Mosaic's lowering, not the TPU compiler's. Each device gets its two sequences and two heads."""
    axes = {"axis_types": (AxisType.Auto,) * 3, "abstract_device": abstract_device("tpu")}
    sharding = NamedSharding(
        jax.sharding.AbstractMesh((2, 1, 2), ("data", "fsdp", "tensor"), **axes), SPLIT
    )
    arrays = [jax.ShapeDtypeStruct((4, 256, 4, 64), jnp.bfloat16, sharding=sharding)] * 3

    def attention(query, key, value):
        positions = np.arange(256)
        call = AttentionCall(
            query, key, value, AlibiBias(alibi_slopes(4)), True, positions, positions
        )
        return on_each_device(
            call, fitting_sharding(call, sharding), lambda own: fused_attention(on(own, "tpu"))
        )

    step = jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    with jax.sharding.use_abstract_mesh(sharding.mesh):
        module = jax.export.export(jax.jit(step), platforms=["tpu"])(*arrays).mlir_module()
    assert module.count("tpu_custom_call") == 3
    assert re.search(r"tpu_custom_call.*2x2x256x64xbf16", module), "a device's sequences and heads"


def test_the_axes_that_do_not_split_the_batch_split_the_heads():
    batch = NamedSharding(mesh(), P(("data", "fsdp")))
    assert heads_sharding(batch).spec == P(("data", "fsdp"), None, ("tensor",))
    assert heads_sharding(None) is None
