"""A single query against a cache: equals the dense formula, reads no more than the slopes need, and
loses nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alibi import alibi_slopes, attend, generation
from alibi.attention import backends
from alibi.attention.backends import choose, compute
from alibi.attention.cache import KeyValues, Slots, norm_of_all
from alibi.attention.call import AttentionCall, AttentionOptions, dense
from alibi.attention.cpu import decoding
from alibi.attention.skipping import LOGIT_ROUNDING
from alibi.model.decoder import build_model
from alibi.positions import AlibiBias
from tests.attention.calls import on, reach
from tests.programs import AS_USERS

EPSILONS = (None, 0.0, 1e-6)


@pytest.fixture
def blocks(monkeypatch):
    """Small blocks, so short caches have many."""
    monkeypatch.setattr(decoding, "BLOCK", 64)


def inputs(k, heads, head_dim, *, batch=2, kv_heads=None, seed=0):
    rng = np.random.default_rng(seed)
    kv = (batch, k, kv_heads or heads, head_dim)
    return tuple(
        rng.standard_normal(shape, np.float32) for shape in ((batch, 1, heads, head_dim), kv, kv)
    )


def as_call(q, k, v, slopes, epsilon=0.0, **arguments):
    positions = {
        "query_positions": np.arange(k.shape[1] - 1, k.shape[1]),
        "key_positions": np.arange(k.shape[1]),
    }
    arguments = {**positions, **arguments}
    return AttentionCall(
        q,
        k,
        v,
        bias=AlibiBias(slopes),
        causal=True,
        options=AttentionOptions(skip_epsilon=epsilon),
        **arguments,
    )


@functools.partial(jax.jit, static_argnames=("epsilons", "knows"))
def dense_and_decoded(q, k, v, index, epsilons=(0.0,), knows=True):
    """The reference, then with each epsilon, and lastly the blocks read; the cache of b is filled
    to slot index[b].

    A single program, since compiling takes most of the time.
    """
    slots = jnp.arange(k.shape[1])
    arguments = {
        "query_positions": index[:, None],
        "key_positions": jnp.broadcast_to(slots, (k.shape[0], slots.size)),
        "mask": (slots[None] <= index[:, None])[:, None, None, :],
        "key_norm": norm_of_all(k, v) if knows else None,
    }
    calls = [
        as_call(q, k, v, alibi_slopes(q.shape[2]), epsilon, **arguments) for epsilon in epsilons
    ]
    attended, blocks = zip(*map(decoding.attended_and_blocks, calls), strict=True)
    return dense(calls[0]), *attended, blocks


def test_skipping_loses_no_bit_or_no_more_than_it_may(blocks):
    arrays = inputs(4096, 8, 16)
    for index in ((4095, 0), (63, 64), (2047, 3333)):
        expected, every, skipped, rough, _ = dense_and_decoded(*arrays, np.asarray(index), EPSILONS)
        np.testing.assert_allclose(every, expected, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(skipped, every)
        # Leaving out a share e of the mass moves the mean of values by at most 2 e of the largest.
        np.testing.assert_allclose(rough, every, rtol=0, atol=2e-6 * np.abs(arrays[2]).max() + 1e-6)


def test_slots_may_come_first_or_last(blocks):
    """As Flax's cache and this project's hold them, with keys for each head or shared by two."""

    @jax.jit
    def attended(*arrays):
        call = as_call(*arrays, alibi_slopes(4))
        calls = [dataclasses.replace(call, slots_last=last) for last in (False, True)]
        return dense(call.with_own_heads()), [
            compute(call, name) for call in calls for name in ("single", "decoding")
        ]

    for kv_heads in (4, 2):
        expected, found = attended(*inputs(300, 4, 16, kv_heads=kv_heads))
        for got in found:
            np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


def test_half_precision_is_no_worse_than_dense(blocks):
    arrays, index = inputs(300, 12, 80), np.asarray([299, 200])
    right = dense_and_decoded(*arrays, index)[0]
    rough, got, _ = dense_and_decoded(*(x.astype(jnp.bfloat16) for x in arrays), index)
    assert got.dtype == jnp.bfloat16
    errors = [
        np.sqrt(np.mean((np.asarray(x, np.float32) - np.asarray(right)) ** 2)) for x in (rough, got)
    ]
    assert errors[1] <= 1.02 * errors[0]


def test_a_far_key_with_the_greatest_possible_logit_is_not_lost(blocks):
    """The bound's worst case: all norms equal, a far key along the query, all near keys against it."""
    length, size, slope = 4096, 12.0, jnp.full(1, 0.05)
    bound = jnp.full(1, size * size / 4)  # U, as head_dim is 16
    q = jnp.asarray(size * np.eye(16, dtype=np.float32)[None, None, :1])

    @jax.jit
    def weights_of(far):
        is_far = (jnp.arange(length) == far)[None, :, None, None]
        # so the result is the far key's weight
        arrays = q, jnp.where(is_far, q, -q), is_far.astype(jnp.float32)
        return [
            decoding.attended_and_blocks(as_call(*arrays, slope, epsilon)) for epsilon in EPSILONS
        ]

    reaches = [int(reach(slope, 2 * bound, epsilon)[0]) for epsilon in EPSILONS[1:]]
    for distance in (*(far + more for far in reaches for more in (-3, 200)), 1000, 70):
        (every, all_blocks), *skipping = jax.device_get(weights_of(length - 1 - distance))
        for epsilon, far, (skipped, some_blocks) in zip(
            EPSILONS[1:], reaches, skipping, strict=True
        ):
            assert abs(every - skipped).max() <= epsilon
            assert some_blocks[0, 0] < all_blocks[0, 0] == length // 64
            if distance < far / 2:
                assert skipped.max() > 0.9


def test_steep_heads_read_few_blocks_however_long_the_cache_is(blocks):
    """The second sequence's cache has 2,048 older keys."""
    q, k, v = inputs(4096, 8, 16)
    q = np.broadcast_to(q[:1] / 4, q.shape)
    k[0] = np.roll(k[1], 2048, axis=0)  # so both have the same largest norms
    *_, (every, *skipping) = dense_and_decoded(q, k, v, np.asarray([2047, 4095]), EPSILONS)
    np.testing.assert_array_equal(every, [[32] * 8, [64] * 8])
    bound = (
        (1 + LOGIT_ROUNDING)
        * np.linalg.norm(q[0, 0], axis=-1)
        * np.linalg.norm(k[1], axis=-1).max(axis=0)
        / 4
    )
    totals = []
    for epsilon, blocks_read in zip(EPSILONS[1:], skipping, strict=True):
        short, long = np.asarray(blocks_read)
        # No more than what is out of reach before any key is seen, and the block that a window
        # begins in; with the sums of blocks, which know only the nearest key of each, one more.
        window = reach(alibi_slopes(8), 2 * bound, epsilon)
        assert (long <= np.minimum(np.ceil(window / 64) + 1 + (epsilon > 0), 64)).all()
        assert (np.diff(long) >= 0).all()
        assert (short <= long).all()
        # their windows end within the shorter cache
        np.testing.assert_array_equal(short[:4], long[:4])
        totals.append(long.sum())
    assert totals[1] < totals[0] < 64 * 8 * 3 / 4


@pytest.mark.parametrize("knows", [True, False])
def test_nan_is_not_hidden(knows, blocks):
    for name in "qkv":
        arrays = dict(zip("qkv", inputs(300, 12, 80), strict=True))
        arrays[name][1, 0] = np.nan
        got = np.asarray(dense_and_decoded(**arrays, index=np.asarray([299, 200]), knows=knows)[1])
        assert np.isnan(got[1]).all(), name
        assert np.isfinite(got[0]).all(), name


def test_a_query_that_sees_no_key_gives_zeros(blocks):
    attended = np.asarray(dense_and_decoded(*inputs(300, 12, 80), np.asarray([-1, 5]))[1])
    np.testing.assert_array_equal(attended[0], 0.0)
    assert attended[1].all()


def test_a_slope_below_zero_skips_nothing_or_is_refused(blocks):
    arrays, slopes = (
        [jnp.asarray(x) for x in inputs(300, 2, 16, batch=1)],
        jnp.asarray([2.0, -0.05]),
    )
    with pytest.raises(ValueError, match=r"below zero.*use skip_epsilon=0"):
        attend(*arrays, slopes=slopes, skip_epsilon=1e-6, backend="decoding")
    call = as_call(*arrays, slopes)
    (got, read), expected = jax.jit(lambda: (decoding.attended_and_blocks(call), dense(call)))()
    assert read.tolist() == [[2, 5]]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_positions_in_any_order_segments_and_masks_of_heads(blocks):
    """As in a ring buffer: positions of slots don't ascend, and some belong to other documents."""
    arrays = inputs(300, 4, 16)
    arguments = {
        "query_positions": jnp.asarray([[299], [150]]),
        "key_positions": jnp.asarray(np.stack([np.roll(np.arange(300), 77), np.arange(300)[::-1]])),
        "segment_ids": (
            jnp.zeros((2, 1), int),
            jnp.asarray(np.broadcast_to(np.arange(300) % 5 // 4, (2, 300))),
        ),
        "mask": jnp.asarray(np.random.default_rng(1).random((2, 4, 1, 300)) < 0.7),
    }

    @jax.jit
    def all_ways(*arrays):
        ways = []
        for bias in (AlibiBias(alibi_slopes(4)), AlibiBias(jnp.full(4, 2.0), symmetric=True)):
            call = {"bias": bias, "causal": not bias.symmetric, **arguments}
            ways.append(
                [attend(*arrays, **call, backend=backend) for backend in ("decoding", "reference")]
            )
        return ways

    for got, expected in all_ways(*arrays):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_fewer_key_heads_no_batch_and_vmap(blocks):
    """And a gradient, which is the dense one's."""
    arrays, slopes = inputs(300, 4, 16, kv_heads=2), alibi_slopes(4)

    def loss(q, k, v, slopes, backend):
        attended = attend(q, k, v, slopes=slopes, backend=backend)
        return (attended**2).sum(), attended

    @functools.partial(jax.jit, static_argnums=3)
    def attended_and_gradients(q, k, v, backend):
        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, slopes, backend)

    (got, attended), (expected, exact) = (
        attended_and_gradients(*arrays, name) for name in ("decoding", "reference")
    )
    np.testing.assert_allclose(attended, exact, atol=1e-5)
    for one, right in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, right, atol=1e-5 * (1 + np.abs(right).max()))
    mapped = jax.jit(jax.vmap(functools.partial(attend, slopes=slopes, backend="decoding")))(
        *arrays
    )
    np.testing.assert_allclose(mapped, exact, atol=1e-5)


def test_auto_takes_it_for_one_query_on_one_cpu(unchecked):
    shared = as_call(*map(jnp.asarray, inputs(32768, 2, 16)), alibi_slopes(2))
    assert choose(dataclasses.replace(shared, key_norm=jnp.ones((2, 2)))) == "reference"
    unknown = dataclasses.replace(shared, devices=1)
    call = dataclasses.replace(unknown, key_norm=jnp.ones((2, 2)))
    assert choose(call) == "decoding"
    assert choose(on(call, "gpu")) == "reference"
    assert choose(unknown) == "single"  # finding it costs more than the loop saves
    q, k, v = map(jnp.asarray, inputs(16, 2, 16))
    short = as_call(q, k, v, alibi_slopes(2))
    assert choose(short) == "saved"
    assert choose(dataclasses.replace(short, devices=1, key_norm=jnp.ones((2, 2)))) == "single"
    with pytest.raises(
        ValueError, match="'decoding' can't do this call: its bias has no upper bound"
    ):
        attend(q, k, v, backend="decoding")
    with pytest.raises(ValueError, match="it is for one query of each sequence, and got 16"):
        attend(k, k, v, slopes=alibi_slopes(2), backend="decoding")
    with pytest.raises(ValueError, match=r"key_norm has shape \(2, 1\); it must be \(2, 2\)"):
        attend(q, k, v, slopes=alibi_slopes(2), key_norm=jnp.ones((2, 1)))


def test_the_model_decodes_by_it_and_remembers_norms(tiny_config, monkeypatch):
    """Token by token as the whole sequence, with sequences at positions of their own."""
    model = build_model(tiny_config(position="alibi", model__num_layers=1), 40)
    tokens = np.random.default_rng(0).integers(0, 40, (2, 12), np.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    whole = np.asarray(jax.jit(model.apply)(variables, tokens))
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    started = jax.jit(functools.partial(model.init, decode=True))(
        jax.random.key(0), np.zeros((2, 32768), np.int32)
    )
    cache = started["cache"]
    assert not np.any(cache["layers_0"]["held"].key_norm)
    monkeypatch.setattr(decoding, "BLOCK", 4)
    known = []
    run = decoding.decoding_attention
    counted = dataclasses.replace(
        backends.BACKENDS["decoding"], run=lambda call: known.append(call.key_norm) or run(call)
    )
    monkeypatch.setitem(backends.BACKENDS, "decoding", counted)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, token, positions):
        now = {"params": variables["params"], "cache": cache}
        return model.apply(now, token, positions=positions, decode=True, mutable=["cache"])

    compiled = step.lower(cache, tokens[:, :1], np.zeros((2, 1), np.int32)).compile(
        compiler_options=AS_USERS
    )
    # The dense formula holds two transposed copies.
    assert compiled.memory_analysis().temp_size_in_bytes < cache["layers_0"]["held"].value.nbytes
    for i in range(12):
        # The second sequence begins at position 100: only distances count.
        logits, updated = compiled(
            cache, tokens[:, i : i + 1], np.asarray([[i], [100 + i]], np.int32)
        )
        cache = updated["cache"]
        np.testing.assert_allclose(np.asarray(logits)[:, 0], whole[:, i], atol=2e-5)
    assert len(known) == 1
    assert known[0] is not None
    norms = np.linalg.norm(cache["layers_0"]["held"].key, axis=2)
    np.testing.assert_allclose(cache["layers_0"]["held"].key_norm, norms.max(axis=-1), rtol=1e-6)


@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 4), (4, 4), (4, 2)])
def test_decoding_from_a_short_cache_copies_it_at_no_token(
    batch, kv_heads, tiny_config, monkeypatch
):
    """XLA would hold the cache twice more, and copy it to write each token."""
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    sizes = {"width": 64, "num_heads": 4, "num_kv_heads": kv_heads, "num_layers": 1}
    config = tiny_config(position="alibi", **{f"model__{key}": size for key, size in sizes.items()})
    model = build_model(config, 40)
    params = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))["params"]
    cache = jax.eval_shape(lambda: generation.new_cache(model, batch, 2048))
    keys, logits = jax.random.split(jax.random.key(0), batch), np.zeros((batch, 1, 40), np.float32)
    compiled = generation.decode.lower(
        model, params, cache, logits, keys, 0, sample=generation.GREEDY, count=4
    ).compile(compiler_options=AS_USERS)
    held = cache["layers_0"]["held"].value
    assert compiled.memory_analysis().temp_size_in_bytes < held.size * held.dtype.itemsize


def test_the_remembered_norm_is_of_all_keys_and_a_key_that_is_no_number_stays_known():
    keys = np.zeros((1, 4, 2, 3), np.float32)
    keys[0, :, :, 0] = np.transpose([[1.0, np.nan, 5.0, 2.0], np.arange(4)])
    slots, one = Slots.empty(1, 4, 4), jnp.zeros((1, 1, 2, 3))
    held, found = KeyValues.empty(4, *[jnp.zeros((1, 4, 2, 3))] * 2, None), []
    for newest in range(4):
        position = jnp.full((1, 1), newest)
        held = held.append(slots, jnp.asarray(keys[:, newest : newest + 1]), one, None)
        slots = slots.append(position, position)
        found.append(np.asarray(held.key_norm)[0])
    np.testing.assert_array_equal(found, [[1, 0], [np.nan, 1], [np.nan, 2], [np.nan, 3]])
    np.testing.assert_array_equal(held.key, np.moveaxis(keys, 1, 3))


def test_several_devices_copy_their_parts_of_the_cache_at_no_token(tiny_config):
    """Split as a view, XLA would copy all keys and values before and after, for each layer."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    sizes = {"width": 64, "num_heads": 4, "num_layers": 1}
    config = tiny_config(position="alibi", **{f"model__{key}": size for key, size in sizes.items()})
    model = build_model(config, 40, sharding=NamedSharding(mesh, P("data")))

    def placed(leaf):
        of_heads = P("data", "tensor") if leaf.ndim == 4 else P("data") if leaf.ndim == 2 else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, of_heads))

    params = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))["params"]
    cache = jax.tree.map(placed, jax.eval_shape(lambda: generation.new_cache(model, 4, 2048)))
    keys, logits = jax.random.split(jax.random.key(0), 4), np.zeros((4, 1, 40), np.float32)
    compiled = generation.decode.lower(
        model, params, cache, logits, keys, 0, sample=generation.GREEDY, count=4
    ).compile(compiler_options=AS_USERS)
    held = cache["layers_0"]["held"].value
    assert compiled.memory_analysis().temp_size_in_bytes < held.size * held.dtype.itemsize // 4
