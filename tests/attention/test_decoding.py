"""One query against a cache: equals the dense formula, reads no more than the slopes need, and loses nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi import alibi_slopes, attend
from alibi.attention import backends, decoding
from alibi.attention.backends import choose
from alibi.attention.call import AttentionCall
from alibi.attention.decoding import blocks_read, norm_of_all
from alibi.attention.skipping import skip_distance
from alibi.model import build_model
from alibi.positions import AlibiBias, make_position


@pytest.fixture
def blocks(monkeypatch):
    """Small ones, so that short caches have many."""
    monkeypatch.setattr(decoding, "BLOCK", 64)


def arrays(k, heads, head_dim, *, batch=2, kv_heads=None, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    kv = (batch, k, kv_heads or heads, head_dim)
    return tuple(jax.random.normal(key, s) for key, s in zip(keys, ((batch, 1, heads, head_dim), kv, kv), strict=True))


@functools.partial(jax.jit, static_argnames=("backend", "skip_epsilon", "knows"))
def decode(q, k, v, index, *, backend="decoding", skip_epsilon=0.0, knows=True):
    """As `alibi.model.DecoderLM` calls it: the cache of sequence b is filled up to slot index[b]."""
    slots = jnp.arange(k.shape[1])
    return attend(
        q,
        k,
        v,
        slopes=alibi_slopes(q.shape[2]),
        query_positions=index[:, None],
        key_positions=jnp.broadcast_to(slots, (k.shape[0], slots.size)),
        mask=(slots[None] <= index[:, None])[:, None, None, :],
        key_norm=norm_of_all(k, v) if knows else None,
        skip_epsilon=skip_epsilon,
        backend=backend,
    )


@pytest.mark.parametrize(("k", "heads", "head_dim"), [(1, 1, 16), (7, 12, 80), (300, 8, 64), (4096, 8, 16)])
def test_equals_reference(k, heads, head_dim, blocks):
    q, key, value = arrays(k, heads, head_dim)
    for index in ({0, k - 1}, {k // 2, k // 3}, {min(63, k - 1), min(64, k - 1)}):
        filled = jnp.asarray((sorted(index) * 2)[:2])
        expected = decode(q, key, value, filled, backend="reference")
        every = decode(q, key, value, filled, skip_epsilon=None)
        np.testing.assert_allclose(every, expected, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(decode(q, key, value, filled), every)
        # Leaving out a share e of the mass moves the mean of values by at most 2 e of the largest.
        rough = decode(q, key, value, filled, skip_epsilon=1e-6)
        np.testing.assert_allclose(rough, every, rtol=0, atol=2e-6 * float(jnp.abs(value).max()) + 1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_no_worse_than_dense(dtype):
    exact = arrays(300, 8, 64)
    rough = tuple(x.astype(dtype) for x in exact)
    filled = jnp.asarray([299, 200])
    right = decode(*exact, filled, backend="reference")
    dense, got = (decode(*rough, filled, backend=name) for name in ("reference", "decoding"))
    assert got.dtype == dtype
    errors = [float(jnp.sqrt(((x.astype(jnp.float32) - right) ** 2).mean())) for x in (dense, got)]
    assert errors[1] <= 1.02 * errors[0]


@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_a_far_key_with_the_greatest_possible_logit_is_not_lost(epsilon, blocks):
    """The case that the bound is made for: all norms equal, one far key along the query, all near ones against it."""
    length, size, slope = 4096, 12.0, 0.05
    u = size * size / 4  # the largest logit, as head_dim is 16
    reach = float(skip_distance(jnp.asarray(slope), jnp.asarray(u), jnp.asarray(0.0), epsilon))
    q = jnp.zeros((1, 1, 1, 16)).at[..., 0].set(size)

    @functools.partial(jax.jit, static_argnames="epsilon")
    def weight_of(far, epsilon):
        is_far = (jnp.arange(length) == far)[None, :, None, None]
        call = as_call(q, jnp.where(is_far, q, -q), is_far.astype(jnp.float32), jnp.full(1, slope), epsilon)
        return decoding.decoding_attention(call)[0, 0, 0, 0], blocks_read(call)[0, 0]

    for distance in (int(reach) - 3, int(reach) - 100, 1000, 70, int(reach) + 200):
        every, all_blocks = weight_of(length - 1 - distance, None)
        skipped, some_blocks = weight_of(length - 1 - distance, epsilon)
        assert abs(every - skipped) <= epsilon
        assert some_blocks < all_blocks == length // 64
        if distance < reach - 100:
            assert skipped > epsilon


def as_call(q, k, v, slopes, epsilon=0.0, **arguments):
    positions = {"query_positions": np.arange(k.shape[1] - 1, k.shape[1]), "key_positions": np.arange(k.shape[1])}
    arguments = {**positions, **arguments}
    return AttentionCall(q, k, v, bias=AlibiBias(slopes), causal=True, skip_epsilon=epsilon, **arguments)


def test_steep_heads_read_few_blocks_however_long_the_cache_is(blocks):
    q, k, v = arrays(2048, 8, 16, batch=1)
    q, slopes = q / 4, alibi_slopes(8)
    read = {
        (length, epsilon): np.asarray(blocks_read(as_call(q, k[:, -length:], v[:, -length:], slopes, epsilon))[0])
        for length in (1024, 2048)
        for epsilon in (None, 0.0, 1e-6)
    }
    np.testing.assert_array_equal(read[2048, None], 32)
    for epsilon in (0.0, 1e-6):
        # Never more than what is out of reach before any key is seen, and the block that a window begins in.
        bound = jnp.linalg.norm(q, axis=-1)[0, 0] * jnp.linalg.norm(k, axis=-1).max(axis=(0, 1)) / 4
        window = skip_distance(slopes, bound, jnp.zeros(8), epsilon)
        assert (read[2048, epsilon] <= np.minimum(np.ceil(window / 64) + 1, 32)).all()
        assert (np.diff(read[2048, epsilon]) >= 0).all()
        assert (read[2048, epsilon] >= read[1024, epsilon]).all()
    assert read[2048, 1e-6].sum() < read[2048, 0.0].sum() < 32 * 8 / 2
    steep = slice(0, 3)  # their windows end within the shorter cache
    np.testing.assert_array_equal(read[2048, 0.0][steep], read[1024, 0.0][steep])


@pytest.mark.parametrize("knows", [True, False])
def test_what_is_no_number_is_not_hidden(knows):
    q, k, v = arrays(300, 8, 64)
    filled = jnp.asarray([299, 200])
    for name in ("q", "k", "v"):
        changed = {"q": q, "k": k, "v": v}
        changed[name] = changed[name].at[1, 0].set(jnp.nan)
        attended = decode(changed["q"], changed["k"], changed["v"], filled, knows=knows)
        assert np.isnan(attended[1]).all(), name
        assert np.isfinite(attended[0]).all(), name


def test_a_query_that_sees_no_key_gives_zeros():
    q, k, v = arrays(300, 8, 64)
    attended = decode(q, k, v, jnp.asarray([-1, 5]))
    np.testing.assert_array_equal(attended[0], 0.0)
    assert attended[1].all()


def test_a_slope_below_zero_skips_nothing_or_is_refused(blocks):
    q, k, v = arrays(300, 2, 16, batch=1)
    slopes = jnp.asarray([2.0, -0.05])
    with pytest.raises(ValueError, match=r"below zero.*use skip_epsilon=0"):
        attend(q, k, v, slopes=slopes, skip_epsilon=1e-6, backend="decoding")
    assert blocks_read(as_call(q, k, v, slopes))[0].tolist() == [2, 5]
    expected = attend(q, k, v, slopes=slopes, backend="reference")
    np.testing.assert_allclose(attend(q, k, v, slopes=slopes, backend="decoding"), expected, atol=1e-5)


def test_positions_in_any_order_segments_and_masks_of_heads(blocks):
    """A ring buffer, say: slots whose positions don't ascend, of which some belong to other documents."""
    q, k, v = arrays(300, 4, 16)
    arguments = {
        "query_positions": jnp.asarray([[299], [150]]),
        "key_positions": jnp.stack([jnp.roll(jnp.arange(300), 77), jnp.arange(300)[::-1]]),
        "segment_ids": (jnp.zeros((2, 1), int), jnp.broadcast_to(jnp.arange(300) % 5 // 4, (2, 300))),
        "mask": jax.random.bernoulli(jax.random.key(1), 0.7, (2, 4, 1, 300)),
    }
    for bias in (AlibiBias(alibi_slopes(4)), AlibiBias(jnp.full(4, 2.0), symmetric=True)):
        call = {"bias": bias, "causal": not bias.symmetric, **arguments}
        expected = attend(q, k, v, **call, backend="reference")
        np.testing.assert_allclose(attend(q, k, v, **call, backend="decoding"), expected, atol=1e-5)


def test_fewer_key_heads_and_no_batch(blocks):
    q, k, v = arrays(300, 4, 16, kv_heads=2)
    slopes = alibi_slopes(4)
    expected = attend(q, k, v, slopes=slopes, backend="reference")
    got = attend(q, k, v, slopes=slopes, backend="decoding", key_norm=norm_of_all(k, v))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    alone = functools.partial(attend, slopes=slopes, backend="decoding")
    np.testing.assert_allclose(jax.vmap(alone)(q, k, v), expected, atol=1e-5)
    np.testing.assert_allclose(alone(q[0], k[0], v[0]), expected[0], atol=1e-5)


def test_its_gradient_is_the_dense_one():
    q, k, v = arrays(300, 4, 16, kv_heads=2)

    @functools.partial(jax.jit, static_argnums=4)
    def gradients(q, k, v, slopes, backend):
        mask = (jnp.arange(300) < 200)[None, None, None]
        loss = lambda *x: (attend(*x[:3], slopes=x[3], mask=mask, backend=backend) ** 2).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, slopes)

    results = (gradients(q, k, v, alibi_slopes(4), backend) for backend in ("decoding", "reference"))
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5 * float(1 + jnp.abs(expected).max()))


def test_auto_takes_it_for_one_query_on_one_cpu(monkeypatch):
    call = as_call(*arrays(2048, 2, 16), alibi_slopes(2))
    assert choose(call, "cpu") == "reference"  # the tests' CPU stands for several devices
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    assert choose(call, "cpu") == "decoding"
    assert choose(call, "gpu") == "reference"
    assert choose(as_call(*arrays(100, 2, 16), alibi_slopes(2)), "cpu") == "saved"
    position = make_position("t5", num_heads=2, head_dim=16, width=32, train_length=64)
    q, k, v = arrays(16, 2, 16)
    with pytest.raises(ValueError, match="'decoding' can't do this call: its bias is not ALiBi's"):
        attend(q, k, v, bias=position.bias(position.init(jax.random.key(0))), backend="decoding")
    with pytest.raises(ValueError, match="it is for one query of each sequence, and got 16"):
        attend(k, k, v, slopes=alibi_slopes(2), backend="decoding")
    with pytest.raises(ValueError, match=r"key_norm has shape \(2, 1\); it must be \(2, 2\)"):
        attend(q, k, v, slopes=alibi_slopes(2), key_norm=jnp.ones((2, 1)))


def test_the_model_decodes_by_it_and_remembers_norms(tiny_config, monkeypatch):
    """Token by token as the whole sequence, with sequences at positions of their own."""
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    monkeypatch.setattr(backends, "WORTH_A_LOOP", 1)
    monkeypatch.setattr(decoding, "BLOCK", 4)
    model = build_model(tiny_config(position="alibi"), 40)
    inputs = jax.random.randint(jax.random.key(0), (2, 12), 0, 40)
    variables = jax.jit(model.init)(jax.random.key(0), inputs)
    cache = model.init(jax.random.key(0), jnp.zeros((2, 16), jnp.int32), decode=True)["cache"]
    assert not cache["layers_0"]["key_norm"]["largest"].any()
    taken = []
    run = decoding.decoding_attention
    counted = backends.Backend(lambda call: taken.append(call) or run(call), decoding.cannot_decode, True)
    monkeypatch.setitem(backends.BACKENDS, "decoding", counted)

    @jax.jit
    def step(cache, token, positions):
        variables_now = {"params": variables["params"], "cache": cache}
        return model.apply(variables_now, token, positions=positions, decode=True, mutable=["cache"])

    whole = model.apply(variables, inputs)
    for i in range(12):
        # The second sequence begins at position 100: only distances count.
        logits, updated = step(cache, inputs[:, i : i + 1], jnp.asarray([[i], [100 + i]]))
        cache = updated["cache"]
        np.testing.assert_allclose(logits[:, 0], whole[:, i], atol=2e-5)
    assert len(taken) == 2
    assert all(call.key_norm is not None for call in taken)
    for layer in ("layers_0", "layers_1"):
        norms = jnp.linalg.norm(cache[layer]["attention"]["cached_key"], axis=-1)
        np.testing.assert_allclose(cache[layer]["key_norm"]["largest"], norms.max(axis=1), rtol=1e-6)
