"""The CPU's attention for short lengths against the dense formula in float64, in value and all gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.attention import AttentionOptions, method_attention_fn
from alibi.cpu import saved
from alibi.cpu.saved import LEAST_ROWS, MOST_ROWS, QueryBlock, query_blocks, saved_attention
from alibi.positions import make_position


def attention(query, key, value, bias, *, causal, window=None):
    """`saved_attention` with a bias that is written out for all queries and keys, or for all keys in one row."""

    def of_block(block):
        rows = slice(block.start, block.stop) if bias.shape[-2] > 1 else slice(None)
        return bias[..., rows, : block.seen]

    return saved_attention(query, key, value, None if bias is None else of_block, causal=causal, window=window)


compiled_attention = jax.jit(attention, static_argnames="causal")


def _inputs(q_length, k_length, heads=2, head_dim=4, batch=2, biased=True):
    rng = np.random.default_rng(0)
    query, out = rng.standard_normal((2, batch, q_length, heads, head_dim))
    key, value = rng.standard_normal((2, batch, k_length, heads, head_dim))
    bias = rng.standard_normal((heads, q_length, k_length)) if biased else None
    return query, key, value, bias, out


def _dense(query, key, value, bias, out, causal, window=None):
    """Value and gradients of sum(out * attention), from the formulas of softmax, in float64."""
    q_length, k_length, scale = query.shape[1], key.shape[1], query.shape[-1] ** -0.5
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) * scale + (0 if bias is None else bias)
    visible = np.ones((q_length, k_length), bool)
    if causal:
        visible = np.arange(k_length) <= np.arange(q_length)[:, None] + k_length - q_length
    if window is not None:
        visible = visible & (np.abs(np.arange(q_length)[:, None] + k_length - q_length - np.arange(k_length)) < window)
    exponentials = np.where(visible, np.exp(logits), 0.0)
    total = exponentials.sum(-1, keepdims=True)
    weights = exponentials / np.where(total == 0, 1, total)
    attended = np.einsum("bhqk,bkhd->bqhd", weights, value)
    of_weights = np.einsum("bqhd,bkhd->bhqk", out, value)
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))
    return attended, (
        np.einsum("bhqk,bkhd->bqhd", of_logits, key) * scale,
        np.einsum("bhqk,bqhd->bkhd", of_logits, query) * scale,
        np.einsum("bhqk,bqhd->bkhd", weights, out),
        of_logits.sum(0),
    )


def _value_and_gradients(query, key, value, bias, out, causal, window=None):
    """The same by `saved_attention`, in float32 and as one program."""

    @jax.jit
    def compute(arrays, out):
        attended, vjp = jax.vjp(lambda *x: attention(*x, causal=causal, window=window), *arrays)
        return attended, vjp(out)

    arrays = [None if x is None else jnp.asarray(x, jnp.float32) for x in (query, key, value, bias)]
    return compute(arrays, jnp.asarray(out, jnp.float32))


# Of one block, two, an odd last one; fewer queries than keys, more, and a single one.
LENGTHS = [(5, 5), (128, 128), (131, 131), (70, 200), (3, 1), (1, 9), (300, 300)]


CALLS = [*((*lengths, True) for lengths in LENGTHS), (131, 131, False), (70, 200, False), (1, 9, False)]


@pytest.mark.parametrize(("q_length", "k_length", "causal"), CALLS)
def test_value_and_gradients_are_those_of_dense_attention(q_length, k_length, causal):
    inputs = _inputs(q_length, k_length)
    expected, expected_gradients = _dense(*inputs, causal)
    actual, gradients = _value_and_gradients(*inputs, causal)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    for got, needed in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, needed, atol=2e-5)


def test_a_query_before_the_first_key_gives_zeros():
    *inputs, _ = _inputs(5, 2)
    attended = compiled_attention(*(jnp.asarray(x, jnp.float32) for x in inputs), causal=True)
    assert not attended[:, :3].any()
    assert attended[:, 3:].all()


def test_without_bias():
    inputs = _inputs(9, 9, biased=False)
    expected, expected_gradients = _dense(*inputs, causal=True)
    actual, gradients = _value_and_gradients(*inputs, causal=True)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    for got, needed in zip(gradients[:3], expected_gradients[:3], strict=True):
        np.testing.assert_allclose(got, needed, atol=1e-5)


@pytest.mark.parametrize(("q_length", "k_length", "causal"), [(131, 131, True), (70, 200, True), (131, 131, False)])
def test_a_window_hides_what_is_farther(q_length, k_length, causal):
    inputs = _inputs(q_length, k_length)
    expected, expected_gradients = _dense(*inputs, causal, window=20)
    actual, gradients = _value_and_gradients(*inputs, causal, window=20)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    for got, needed in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, needed, atol=2e-5)


@pytest.mark.parametrize("position", ["fox", "shaw"])
def test_a_window_on_a_bias_of_each_sequence(position):
    """Which has a batch dimension that the window lacks; values and gradients are those of the dense formula."""
    method = make_position(position, num_heads=2, head_dim=4, width=8, train_length=64)
    params = method.init_layer(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 70, 8))
    arrays = [jax.random.normal(jax.random.key(seed), (2, 70, 2, 4)) for seed in (2, 3, 4)]

    def loss(params, arrays, backend):
        options = AttentionOptions(window=7, backend=backend)
        places = dict.fromkeys(("query_positions", "key_positions"), np.arange(70))
        return jnp.sin(method_attention_fn(method, params, x, **places, options=options)(*arrays)).sum()

    with jax.numpy_rank_promotion("raise"):
        found = [
            jax.value_and_grad(loss, (0, 1))(params, arrays, backend) for backend in ("saved", "reference", "blocked")
        ]
    for other in found[1:]:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5), found[0], other)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("position", ["rotary", "kerple_log", "fire", "fox", "shaw"])
def test_positions_that_are_drawn_when_the_program_runs(position, alike):
    """A mask of places in the sequence is that of positions that rise; unless the caller says so it is refused.

    Also where all sequences stand at the same positions; FIRE's queries stand before and behind its threshold.
    """
    options = {"threshold": 150} if position == "fire" else {}
    method = make_position(position, num_heads=2, head_dim=4, width=8, train_length=64, options=options)
    params = {**method.init(jax.random.key(0)), **method.init_layer(jax.random.key(0))}
    x = jax.random.normal(jax.random.key(1), (2, 70, 8))
    arrays = [jax.random.normal(jax.random.key(seed), (2, 70, 2, 4)) for seed in (2, 3, 4)]
    seeds = (0,) if alike else (0, 1)
    drawn = jnp.asarray([np.sort(np.random.default_rng(seed).choice(300, 70, replace=False)) for seed in seeds])

    def loss(params, arrays, backend, queries, ascending):
        places = {"query_positions": drawn[:, -queries:], "key_positions": drawn}
        options = AttentionOptions(backend=backend)
        attend = method_attention_fn(method, params, x, **places, ascending=ascending, options=options)
        return jnp.sin(attend(arrays[0][:, -queries:], *arrays[1:])).sum()

    for queries in (70, 9):
        found, expected = (
            jax.value_and_grad(loss, (0, 1))(params, arrays, backend, queries, True)
            for backend in ("saved", "reference")
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=3e-5), found, expected)
    with pytest.raises(ValueError, match="'saved' can't do this call: positions are not known when it is traced"):
        loss(params, arrays, "saved", 70, False)


@pytest.mark.parametrize("of_sequences", [False, True])
@pytest.mark.parametrize(("q_length", "k_length", "causal"), CALLS)
def test_a_bias_of_keys_alone_is_as_if_written_out(q_length, k_length, causal, of_sequences):
    """Its gradient is the written one's, summed over what shares it; nothing has the size of the logits."""
    query, key, value, _, out = _inputs(q_length, k_length)
    bias = np.random.default_rng(1).standard_normal((2, 2, 1, k_length) if of_sequences else (2, 1, k_length))
    whole = np.broadcast_to(bias, (*bias.shape[:-2], q_length, k_length))
    expected, expected_gradients = _value_and_gradients(query, key, value, whole, out, causal)
    actual, gradients = _value_and_gradients(query, key, value, bias, out, causal)
    assert gradients[3].shape == bias.shape
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    for got, needed in zip(gradients[:3], expected_gradients[:3], strict=True):
        np.testing.assert_allclose(got, needed, atol=1e-6)
    np.testing.assert_allclose(gradients[3], expected_gradients[3].sum(-2, keepdims=True), atol=2e-5)


def test_a_constant_bias_costs_no_gradient(monkeypatch):
    query, key, value, bias, _ = (jnp.asarray(x, jnp.float32) for x in _inputs(128, 128, heads=3))
    summed, sum_first = [], saved.sum_first
    monkeypatch.setattr(saved, "sum_first", lambda x: summed.append(x.shape) or sum_first(x))

    def loss(query, bias):
        return attention(query, key, value, bias, causal=True).sum()

    jax.make_jaxpr(jax.grad(loss))(query, bias)
    assert summed == []
    jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(query, bias)
    assert summed == [(2, 3, 64, 64), (2, 3, 64, 128)]  # the gradient of each block's bias, summed over the batch


def test_logits_above_the_diagonal_are_not_computed():
    # Two blocks at 128: the second half of the keys never meets the first half of the queries.
    query, key, value, bias, _ = (jnp.asarray(x, jnp.float32) for x in _inputs(128, 128, heads=3))
    assert query_blocks(128, 128, causal=True) == [
        QueryBlock(0, 64, own=0, seen=64),
        QueryBlock(64, 128, own=64, seen=128),
    ]
    text = jax.jit(lambda q: attention(q, key, value, bias, causal=True)).lower(query).as_text()
    assert "tensor<6x64x64xf32>" in text
    assert "tensor<6x64x128xf32>" in text
    assert "tensor<6x128x128xf32>" not in text


def test_large_logits_neither_overflow_nor_vanish():
    *inputs, _ = _inputs(6, 6)
    query, key, value, bias = (jnp.asarray(x, jnp.float32) for x in inputs)
    attended = compiled_attention(query * 1e3, key * 1e3, value, bias, causal=True)
    assert np.isfinite(attended).all()
    np.testing.assert_allclose(attended[:, 0], value[:, 0], atol=1e-6)  # the first query sees one key


def test_bfloat16_is_as_near_to_float32_as_the_rounding_of_its_inputs():
    *inputs, out = _inputs(130, 130, head_dim=8)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]]
    expected, _ = _dense(*(np.asarray(x, np.float64) for x in rounded), inputs[3], out, causal=True)
    actual = compiled_attention(*rounded, jnp.asarray(inputs[3], jnp.float32), causal=True)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(actual.astype(jnp.float32), expected, atol=2**-6)


def test_nan_is_not_hidden():
    query, key, value, bias, _ = (jnp.asarray(x, jnp.float32) for x in _inputs(6, 6))
    attended = compiled_attention(query.at[0, 3].set(jnp.nan), key, value, bias, causal=True)
    assert np.isnan(attended[0, 3]).all()
    assert np.isfinite(attended[0, 4:]).all()


def test_under_jit_scan_and_remat_the_gradient_is_the_same():
    query, key, value, bias, _ = (jnp.asarray(x, jnp.float32) for x in _inputs(20, 20))

    def layers(query, wrapped):
        def layer(x, _):
            return wrapped(lambda x: attention(x, key, value, bias, causal=True))(x), None

        return jax.lax.scan(layer, query, None, length=2)[0].sum()

    plain = jax.grad(layers)(query, lambda f: f)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda q: layers(q, jax.checkpoint)))(query), plain, atol=1e-6)


def test_blocks_cover_every_query_that_sees_a_key_once():
    for length in (1, 63, 64, 65, 128, 500, 4096):
        for more in (0, 30):
            blocks = query_blocks(length + more, length, causal=True)
            assert [row for block in blocks for row in range(block.start, block.stop)] == list(
                range(more, length + more)
            )
            assert all(block.stop - block.start <= MOST_ROWS for block in blocks)
            assert all(block.stop - block.start >= LEAST_ROWS for block in blocks[:-1])
            assert all(block.own == block.start - more and block.seen == block.stop - more for block in blocks)
        assert {block.seen for block in query_blocks(9, length, causal=False)} == {length}
