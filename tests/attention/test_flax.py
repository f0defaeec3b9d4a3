"""The closure inside unchanged Flax layers, against the paper's formula in float64 NumPy."""

import functools

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi import alibi_attention_fn, alibi_slopes
from tests.attention.calls import formula

HEADS, DIM = 4, 8


def numpy_attention(query, key, value, *, causal=True, mask=None, window=None) -> np.ndarray:
    """softmax(q k^T / sqrt(d) - m (i - j)) v, bottom-right aligned, from `[batch, length, heads,
    dim]`.
    """
    q_length, k_length = query.shape[1], key.shape[1]
    distance = (np.arange(q_length) + k_length - q_length)[:, None] - np.arange(k_length)[None, :]
    visible = (
        ((distance >= 0) | (not causal))
        & (np.abs(distance) < (window or k_length))
        & (mask is None or mask)
    )
    slopes = np.asarray(alibi_slopes(query.shape[2]), np.float64)[:, None, None]
    return formula(query, key, value, -slopes * np.abs(distance), visible)


def random_qkv(
    q_length: int, k_length: int, heads: int = HEADS, batch: int = 2
) -> list[np.ndarray]:
    rng = np.random.default_rng(q_length * 100 + k_length)
    lengths = (q_length, k_length, k_length)
    return [rng.standard_normal((batch, length, heads, DIM), np.float32) for length in lengths]


def random_activations(length: int = 9) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, length, 32), np.float32)


@pytest.mark.parametrize(
    ("q_length", "k_length", "heads", "window"),
    [
        (1, 1, 4, None),
        (7, 7, 12, None),
        (3, 7, 4, None),
        (1, 9, 1, None),
        (6, 6, 3, None),
        (70, 200, 2, 20),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_formula(
    q_length: int, k_length: int, heads: int, window: int | None, causal: bool
) -> None:
    """The reference has the formula. The other backends equal the reference, see
    test_backend_grid.py.
    """
    arrays, how = random_qkv(q_length, k_length, heads), {"causal": causal, "window": window}
    attention = alibi_attention_fn(heads, backend="reference", **how)
    if q_length != 3:  # three queries go without jit, as users also call it
        attention = jax.jit(attention)
    np.testing.assert_allclose(
        attention(*map(jnp.asarray, arrays)), numpy_attention(*arrays, **how), atol=1e-5
    )


def linen_layer(*, causal: bool = True, **options: object) -> nn.MultiHeadDotProductAttention:
    attention = alibi_attention_fn(HEADS, causal=causal)
    return nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention, **options)


def linen_formula(params: dict, x: np.ndarray, **options: object) -> np.ndarray:
    params = jax.tree.map(np.asarray, params)
    query, key, value = (
        np.einsum("blw,whd->blhd", x, params[name]["kernel"]) + params[name]["bias"]
        for name in ("query", "key", "value")
    )
    return (
        np.einsum(
            "blhd,hdw->blw", numpy_attention(query, key, value, **options), params["out"]["kernel"]
        )
        + params["out"]["bias"]
    )


@pytest.mark.parametrize(("causal", "dtype"), [(True, bool), (False, np.float32)])
def test_the_linen_layer_computes_the_papers_attention_under_padding_masks(
    causal: bool, dtype: type
) -> None:
    """As booleans, and as numbers from Flax's own `make_attention_mask`."""
    x = random_activations()
    mask = (np.arange(9)[None, :] < np.asarray([9, 5])[:, None])[:, None, None, :]
    layer = linen_layer(causal=causal)
    variables = jax.jit(layer.init)(jax.random.key(1), x)
    apply = jax.jit(layer.apply)
    result = np.asarray(apply(variables, x, mask=mask.astype(dtype)))
    expected = linen_formula(variables["params"], x, causal=causal, mask=mask)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    alone = apply(variables, x[0])  # without a batch dimension, and without padding
    np.testing.assert_allclose(alone, result[0], atol=1e-6)
    x[1, 5:] += 1.0
    changed = np.asarray(apply(variables, x, mask=mask.astype(dtype)))
    np.testing.assert_array_equal(changed[1, :5], result[1, :5], err_msg="padding was seen")


def test_decoding_is_exact_far_from_the_caches_end() -> None:
    """The bias is relative to the last key seen, so an early token in a long cache loses no
    precision.
    """
    query, key, value = random_qkv(1, 10)
    padded = [np.pad(x, ((0, 0), (0, 65_526), (0, 0), (0, 0))) for x in (key, value)]
    mask = (np.arange(65_536) < 10)[None, None, None, :]
    result = jax.jit(alibi_attention_fn(HEADS))(query, *padded, mask=mask)
    np.testing.assert_allclose(result, numpy_attention(query, key, value), atol=2e-6)


def nnx_layer(**options: object) -> nnx.MultiHeadAttention:
    own = {"decode": False, "attention_fn": alibi_attention_fn(HEADS), **options}
    return nnx.jit(lambda: nnx.MultiHeadAttention(HEADS, 32, rngs=nnx.Rngs(0), **own))()


@functools.partial(nnx.jit, static_argnames=("decode", "deterministic"))
def call_nnx(layer: nnx.MultiHeadAttention, x: jax.Array, **options: bool) -> jax.Array:
    return layer(x, **options)


def nnx_params(layer: nnx.MultiHeadAttention) -> dict[str, dict[str, np.ndarray]]:
    layers = {name: getattr(layer, name) for name in ("query", "key", "value", "out")}
    return {
        name: {"kernel": np.asarray(x.kernel), "bias": np.asarray(x.bias)}
        for name, x in layers.items()
    }


def test_nnx_layer_and_its_decoding() -> None:
    """With fewer key heads: neighbouring query heads share a key head, each with its own slope."""
    x = random_activations()
    layer = nnx_layer(num_kv_heads=2)
    params = nnx_params(layer)
    for name in ("key", "value"):
        assert params[name]["bias"].shape == (2, DIM)
        params[name] = {
            leaf: np.repeat(array, HEADS // 2, axis=-2) for leaf, array in params[name].items()
        }
    whole = np.asarray(layer(x))  # without jit, as users may call it
    np.testing.assert_allclose(whole, linen_formula(params, x), atol=1e-5)
    np.testing.assert_allclose(call_nnx(layer, x[0]), whole[0], atol=1e-6)
    layer.init_cache((2, 16, 32))
    for i in range(9):
        decoded = np.asarray(call_nnx(layer, x[:, i : i + 1], decode=True))
        np.testing.assert_allclose(decoded[:, 0], whole[:, i], atol=1e-5)


def test_attention_dropout_acts() -> None:
    """A closure with **kwargs would get no dropout from Flax, silently."""
    x = random_activations()
    layer = linen_layer(dropout_rate=0.5)
    variables = jax.jit(functools.partial(layer.init, deterministic=True))(jax.random.key(1), x)
    still = jax.jit(functools.partial(layer.apply, deterministic=True))(variables, x)
    dropping = jax.jit(functools.partial(layer.apply, deterministic=False))
    first, second, again = (
        dropping(variables, x, rngs={"dropout": jax.random.key(seed)}) for seed in (2, 3, 2)
    )
    assert np.abs(np.subtract(first, still)).max() > 1e-2
    assert np.abs(np.subtract(first, second)).max() > 1e-2
    np.testing.assert_array_equal(first, again)
    layer = nnx_layer(dropout_rate=0.5)
    dropped, still = (call_nnx(layer, x, deterministic=still) for still in (False, True))
    assert np.abs(np.subtract(dropped, still)).max() > 1e-2


def test_bf16_stays_bf16_and_close_to_float32_at_16k() -> None:
    """A bias built in bf16 would put whole blocks of keys at the same distance: errors of 0.9 in L1
    at 1k tokens.
    """
    query, key, value = random_qkv(4, 16_384, batch=1)
    attention = jax.jit(alibi_attention_fn(HEADS))
    exact = attention(query, key, value)
    half = attention(*(x.astype(jnp.bfloat16) for x in (query, key, value)))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), exact, atol=0.03)


def test_sown_weights_are_a_causal_distribution() -> None:
    x = random_activations(5)
    layer = linen_layer()
    variables = jax.jit(layer.init)(jax.random.key(1), x)
    apply = jax.jit(functools.partial(layer.apply, sow_weights=True, mutable=["intermediates"]))
    _, state = apply(variables, x)
    weights = np.asarray(state["intermediates"]["attention_weights"][0])
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(np.triu(weights, 1), 0.0)
