"""Attention by tiles drops weights alike in both passes, and leaves out only tiles without
influence.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from alibi import alibi_slopes, attend
from alibi.attention import tiles
from alibi.attention.backends import BACKENDS, choose, table
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.reference import dropout_factors
from alibi.attention.skipping import LOGIT_ROUNDING, computed_ranges
from alibi.positions import AlibiBias
from tests.attention.calls import assert_near, inputs, on, reach, value_and_gradients
from tests.programs import AS_USERS


@pytest.fixture
def devices(monkeypatch):
    """Takes groups of heads and sequences in turn, as on a single device; on several they go at
    once.
    """
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)


def compiled(q, k, v, **arguments):
    """Runs `attend` as a single program; without jit each operation would be compiled by itself."""
    return np.asarray(jax.jit(lambda *x: attend(*x, **arguments))(q, k, v))


def test_unsigned_positions_do_not_wrap_around():
    """0 - 511 is four billion in uint32, which would put every key ahead of every query."""
    arrays = inputs(1, 600, 600, 2, 8)
    positions = jnp.arange(600, dtype=jnp.uint32)
    expected = compiled(*arrays[:3], slopes=alibi_slopes(2), backend="reference")
    unsigned = {"query_positions": positions, "key_positions": positions}
    got = compiled(*arrays[:3], slopes=alibi_slopes(2), backend="blocked", **unsigned)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("broadcast", [False, True])
def test_dropout_acts_alike_forward_and_backward(broadcast, small_tiles, monkeypatch):
    """Unit vectors as values show the factors; softmax times factors then has the same gradients."""
    monkeypatch.setattr(tiles, "TILE_WEIGHTS", 2 * 64**2)
    length = 100  # two tiles by two, each of one head of both sequences
    q, k, v, incoming = map(jnp.asarray, inputs(2, length, length, 2, 8))
    units = jnp.broadcast_to(jnp.eye(length)[None, :, None], (2, length, 2, length))
    dropping = {
        "dropout_rate": 0.25,
        "dropout_rng": jax.random.key(3),
        "broadcast_dropout": broadcast,
    }

    def attention(q, k, v, slopes):
        return attend(q, k, v, slopes=slopes, backend="blocked", **dropping)

    def dense(q, k, v, slopes, factors):
        distance = np.arange(length)[:, None] - np.arange(length)
        logits = (
            jnp.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
            - slopes[None, :, None, None] * distance[None, None]
        )
        weights = jax.nn.softmax(jnp.where(distance[None, None] >= 0, logits, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", weights * factors, v)

    @jax.jit
    def both(q, k, v, slopes):
        factors = jnp.where(attention(q, k, units, slopes) != 0, 1 / 0.75, 0.0).swapaxes(1, 2)
        got, to_gradients = jax.vjp(attention, q, k, v, slopes)
        expected, to_expected = jax.vjp(lambda *x: dense(*x, factors), q, k, v, slopes)
        return factors, (got, *to_gradients(incoming)), (expected, *to_expected(incoming))

    factors, got, expected = jax.device_get(both(q, k, v, alibi_slopes(2)))
    seen = factors[:, :, np.tri(length, dtype=bool)]
    assert abs((seen != 0).mean() - 0.75) < 0.02  # of 5,050 weights or four times as many
    # Each head of each sequence drops its own weights, or all drop the same.
    others = seen.reshape(4, -1)[1:] == seen[0, 0]
    assert others.all() if broadcast else (others.mean(axis=1) < 0.7).all()
    assert_near(got, expected)


def test_the_share_of_dropped_weights_is_the_rate():
    """In 360,000 weights a rate off by a fiftieth would show."""
    factors = dropout_factors(jax.random.key(3), 0.25, (1, 1, 600, 600), broadcast=False)
    np.testing.assert_array_equal(np.unique(factors), np.float32([0, 1 / 0.75]))
    assert abs(np.mean(np.asarray(factors) != 0) - 0.75) < 0.005


def test_skipping_nothing_that_counts_gives_the_same_bits(devices):
    """In tiles of the same shapes: XLA's products of a single head and of two round differently at
    this head_dim.
    """
    arrays, bias = inputs(1, 2048, 2048, 2, 80), AlibiBias(alibi_slopes(8)[:2])
    every, skipped = (
        value_and_gradients(arrays, bias, backend="blocked", skip_epsilon=e) for e in (None, 0.0)
    )
    for one, other in zip(every, skipped, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def small_tiles(devices, monkeypatch):
    """Tiles of 64 by 64, a single head at a time, so sequences of 2,048 have many tiles to leave
    out.
    """
    monkeypatch.setattr(tiles, "BLOCK", 64)
    monkeypatch.setattr(tiles, "TILE_WEIGHTS", 64**2)


def blocks_computed(q, k, v, slopes, epsilon):
    """Returns how many blocks of keys each block of queries goes through, `[heads, q_blocks]`."""
    positions, bias = np.arange(q.shape[1]), AlibiBias(jnp.asarray(slopes))
    options = AttentionOptions(skip_epsilon=epsilon)
    call = AttentionCall(
        *map(jnp.asarray, (q, k, v)), bias, True, positions, positions, options=options
    )
    first, after_last = np.moveaxis(computed_ranges(call), -1, 0)
    return after_last - first


def test_a_far_key_with_the_greatest_possible_logit_is_not_lost(small_tiles):
    """The bound's worst case: all norms equal, a far key along the query, all near keys against it."""
    length, size, slope, epsilon, blocks = 2048, 8.0, 0.2, 1e-6, 5
    along = np.broadcast_to(size * np.eye(16, dtype=np.float32)[0], (1, length, 1, 16))
    excess = (2 + 2 * LOGIT_ROUNDING) * size * size / 4  # 2 U and rounding, as head_dim is 16
    far = float(reach(slope, excess, epsilon))
    # (2 U + 13.8 + 1.7) / m; the block that reach ends in counts.
    assert -(-far // 64) + 1 == blocks
    incoming = np.ones((1, length, 1, 1), np.float32)

    @functools.partial(jax.jit, static_argnums=3)
    def with_gradients(q, k, v, epsilon):
        attended, back = jax.vjp(
            lambda *x: attend(
                *x, slopes=jnp.full(1, slope), backend="blocked", skip_epsilon=epsilon
            ),
            q,
            k,
            v,
        )
        return attended, *back(jnp.asarray(incoming))

    for distance, skipped in ((int(far) - 3, False), (int(far) + 200, True)):
        is_far = (np.arange(length) == length - 1 - distance)[None, :, None, None]
        # The result is the far key's weight.
        arrays = along, np.where(is_far, along, -along), is_far.astype(np.float32)
        assert blocks_computed(*arrays, [slope], epsilon)[0].max() == blocks  # of 32
        exact, rough = (
            [np.asarray(x) for x in with_gradients(*arrays, e)] for e in (None, epsilon)
        )
        # The bounds are those of docs/attention.md.
        assert np.abs(exact[0] - rough[0]).max() <= epsilon
        assert np.linalg.norm(exact[1] - rough[1], axis=-1).max() <= 6 * epsilon * size / 4
        weight, left = exact[0][0, -1, 0, 0], rough[0][0, -1, 0, 0]
        if skipped:
            assert weight > left == 0
            assert np.abs(exact[1][0, -1]).max() > np.abs(rough[1][0, -1]).max() == 0
        else:
            # It has weight near the bound, which allows for 1 / (1 - exp(-m)) = 5.5 such keys on as
            # many near ones, and for rounding: exp(2 U 2^-6) = 1.65.
            assert epsilon > left > epsilon / 5.6**2 / 1.7


@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_nothing_gives_nothing(backend):
    """Without sequences, queries or keys the result is zeros, or empty."""
    for batch, q, k in ((0, 3, 3), (2, 0, 3), (2, 3, 0), (1, 0, 0)):
        query, key, value, _ = inputs(batch, q, k, 2, 8, value_dim=4)
        attended = attend(
            *map(jnp.asarray, (query, key, value)), slopes=alibi_slopes(2), backend=backend
        )
        np.testing.assert_array_equal(attended, np.zeros((batch, q, 2, 4)))


def test_nan_is_not_hidden(small_tiles):
    slopes = jnp.full(2, 2.0)  # all but two tiles of each row are out of reach
    attention = jax.jit(functools.partial(attend, slopes=slopes, backend="blocked"))
    for name in ("q", "k", "v"):
        arrays = dict(zip("qkv", inputs(1, 256, 256, 2, 8)[:3], strict=True))
        arrays[name][0, 3] = np.nan
        attended = np.asarray(attention(*arrays.values()))
        assert np.isnan(attended[0, 3:4] if name == "q" else attended[0, 3:]).all(), name


@pytest.mark.parametrize(
    ("bias", "causal"), [(None, False), (AlibiBias(jnp.asarray([1e-3, 1e-4])), True)]
)
def test_tiles_outside_a_window_are_not_computed(bias, causal):
    """4,096 tokens are 8 blocks; with a window of 512 each needs itself and its neighbours,
    whatever the bias.
    """
    query, key, value, _ = map(jnp.asarray, inputs(1, 4096, 4096, 2, 8))
    positions = np.arange(4096)
    call = AttentionCall(
        query, key, value, bias, causal, positions, positions, options=AttentionOptions(window=512)
    )
    np.testing.assert_array_equal(
        computed_ranges(call)[0],
        [[max(block - 1, 0), block + 1 if causal else min(block + 2, 8)] for block in range(8)],
    )


def test_tokens_near_eight_thousand_by_sampled_rows():
    """Against the formula in float64, for rows where a float32 bias in the shift form would be off
    by 5e-5.
    """
    q, k, v, _ = inputs(1, 1024, 1024, 2, 8)
    slopes, positions = np.asarray([0.25, 0.0039]), 7168 + np.arange(1024)
    how = {"query_positions": positions, "key_positions": positions, "backend": "blocked"}
    attended = compiled(q, k, v, slopes=jnp.asarray(slopes, jnp.float32), **how)
    for row in (0, 511, 512, 1023):
        for head in range(2):
            logits = (
                np.asarray(k, np.float64)[0, : row + 1, head]
                @ np.asarray(q, np.float64)[0, row, head]
                / np.sqrt(8)
            )
            logits -= slopes[head] * (row - np.arange(row + 1))
            weights = np.exp(logits - logits.max())
            expected = weights @ np.asarray(v, np.float64)[0, : row + 1, head] / weights.sum()
            np.testing.assert_allclose(attended[0, row, head], expected, atol=2e-6)


def test_groups_are_copied_one_at_a_time():
    """Whole copies of queries, keys, values and their gradients, turned to heads first, would be
    six more.
    """
    x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)  # goes in eight groups of one head
    one_device = NamedSharding(
        jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), PartitionSpec()
    )

    def product(q, k, v, w):
        return (attend(q, k, v, slopes=alibi_slopes(8), sharding=one_device) * w).sum()

    step = jax.jit(jax.grad(product, argnums=(0, 1, 2)))
    memory = step.lower(x, x, x, x).compile(compiler_options=AS_USERS).memory_analysis()
    assert memory.temp_size_in_bytes < 4 * x.size * x.dtype.itemsize


def test_split_over_batch_and_heads_without_gathering():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("data", None, "tensor", None))
    # two sequences and two heads a device
    arrays, bias = inputs(8, 600, 600, 4, 8), AlibiBias(alibi_slopes(4))
    expected = value_and_gradients(arrays, bias, backend="reference")
    placed = tuple(jax.device_put(x, split) for x in arrays)

    @jax.jit
    def both(q, k, v, incoming):
        attended, back = jax.vjp(lambda *x: attend(*x, bias=bias, backend="blocked"), q, k, v)
        return attended, *back(incoming)

    compiled = both.lower(*placed).compile(compiler_options=AS_USERS)
    assert "all-gather" not in compiled.as_text()
    results = compiled(*placed)
    assert all(result.sharding.is_equivalent_to(split, 4) for result in results)
    assert_near(results, expected[:4])


def call(batch, q, k, heads=8, *, dtype=jnp.float32, **arguments):
    def array(length):
        return jax.ShapeDtypeStruct((batch, length, heads, 64), dtype)

    positions = {"query_positions": np.arange(k - q, k), "key_positions": np.arange(k)}
    bias = AlibiBias(alibi_slopes(heads))
    return AttentionCall(
        array(q), array(k), array(k), bias=bias, causal=True, **positions, **arguments
    )


def test_auto_takes_what_can_do_the_call(unchecked):
    assert choose(call(4, 128, 128)) == "saved"
    assert [choose(call(4, length, length)) for length in (1024, 1025)] == ["saved", "blocked"]
    dropout = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
    assert choose(call(4, 128, 128, **dropout)) == "reference"
    assert choose(call(4, 1024, 1024, **dropout)) == "blocked"
    # only it has the weights
    assert choose(call(4, 8192, 8192, sow=lambda weights: None)) == "reference"
    # cuDNN's flash kernel has no float32
    assert choose(on(call(1, 16384, 16384), "gpu")) == "blocked"
    for rule in table().splitlines()[2:]:
        assert rule.split("|")[3].strip() in BACKENDS
