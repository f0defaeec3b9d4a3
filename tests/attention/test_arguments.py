"""The kinds of arguments that attention takes: masks of numbers, lists, slopes of batch entries, an
offset of the queries, and a window.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alibi import alibi_attention_fn, alibi_slopes, attend
from alibi.positions import AlibiBias
from tests.attention.calls import inputs, value_and_gradients

HEADS = 4


def random_arrays(*sizes: int) -> list[jax.Array]:
    """Returns queries, keys and values from `inputs`: four heads with 8 features."""
    return [jnp.asarray(x) for x in inputs(*sizes, HEADS, 8)[:3]]


LEAST = [-np.inf, -1e9, -1e4, float(jnp.finfo(jnp.bfloat16).min), float(jnp.finfo(jnp.float16).min)]


@pytest.mark.parametrize(
    ("least", "compiled"),
    [(LEAST[1], False), (LEAST[4], False), (LEAST[0], True), (LEAST[3], True)],
)
def test_an_additive_mask_hides_where_it_is_low(least: float, compiled: bool) -> None:
    """As T5X, PyTorch and BERT write masks: it must not be read as its opposite."""
    arrays = random_arrays(2, 6, 6)
    keep = np.random.default_rng(1).random((2, 1, 6, 6)) < 0.6
    keep[..., 0] = True
    given = jnp.where(keep, 0.0, least).astype(jnp.float16 if least == LEAST[-1] else jnp.bfloat16)
    calls = (
        lambda mask: attend(*arrays, slopes=alibi_slopes(HEADS), mask=mask),
        lambda mask: alibi_attention_fn(HEADS)(*arrays, mask=mask),
    )
    for call in map(jax.jit, calls) if compiled else calls:
        np.testing.assert_array_equal(call(given), call(jnp.asarray(keep)))


def test_queries_stand_at_the_last_positions_of_the_keys() -> None:
    query, key, value = random_arrays(1, 3, 6)
    slopes = alibi_slopes(HEADS)
    shifted = attend(query, key, value, slopes=slopes, key_positions=np.arange(6) + 100)
    expected = attend(query, key, value, slopes=slopes)
    np.testing.assert_array_equal(shifted, expected, err_msg="positions count from anywhere")


def test_a_mask_of_queries_goes_with_a_sink() -> None:
    query, key, value = random_arrays(1, 6, 6)
    shown = np.arange(6) != 2
    given = {"causal": False, "sink": jnp.ones(HEADS), "backend": "reference"}
    found = attend(query, key, value, mask=jnp.asarray(shown)[None, None, :, None], **given)
    expected = np.where(shown[:, None, None], attend(query, key, value, **given), 0.0)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_masks_of_zeros_and_ones_and_masks_that_hide_nothing() -> None:
    arrays = random_arrays(1, 6, 6)
    everything, causal = attend(*arrays, causal=False), attend(*arrays)
    shown = nn.make_causal_mask(np.ones((1, 6)))
    assert shown.dtype == jnp.float32, "Flax makes masks of numbers"
    for mask in (shown, shown.astype(int)):
        found = attend(*arrays, causal=False, mask=mask)
        np.testing.assert_allclose(found, causal, atol=1e-6)
    # an additive mask of a batch without padding
    found = attend(*arrays, causal=False, mask=jnp.zeros((1, 1, 6, 6), jnp.float32))
    np.testing.assert_allclose(found, everything, atol=1e-6)
    nothing = attend(*arrays, mask=jnp.zeros((1, 1, 6, 6), bool))
    np.testing.assert_array_equal(nothing, 0.0, err_msg="booleans mean themselves")


@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_an_entry_that_is_padding_alone_sees_nothing_whatever_the_others_see(dtype: type) -> None:
    """Integers of zeros alone are no additive mask, also where `jax.vmap` shows one entry alone."""
    arrays = random_arrays(2, 4, 4)
    mask = jnp.asarray([[1, 1, 1, 1], [0, 0, 0, 0]], dtype)[:, None, None, :]
    mapped = jax.vmap(lambda *x: attend(*x[:3], mask=x[3]))(*arrays, mask)
    np.testing.assert_array_equal(mapped[1], 0.0)
    np.testing.assert_allclose(mapped, attend(*arrays, mask=mask), atol=1e-6)
    low = jnp.where(mask, 0, -10_000)
    np.testing.assert_allclose(attend(*arrays, mask=low)[:1], mapped[:1], atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int32, bool])
@pytest.mark.usefixtures("unchecked")
def test_a_closure_takes_integers(dtype: type) -> None:
    """Flax's layers compute them in float32; `attend` refuses them (test_refusals.py)."""
    whole = [x.astype(dtype) for x in random_arrays(1, 2, 2)]
    assert alibi_attention_fn(HEADS)(*whole).dtype == jnp.float32


@pytest.mark.usefixtures("unchecked")
def test_lists_are_taken_as_arrays() -> None:
    arrays = random_arrays(1, 2, 3)
    given = {
        "slopes": [0.5, 0.25, 0.1, 0.0],
        "query_positions": [4, 9],
        "key_positions": [1, 5, 9],
        "segment_ids": ([0, 0], [1, 0, 0]),
        "mask": [[True, True, False], [True, True, True]],
        "sink": [0.5, -0.5, 0.0, 2.0],
    }
    as_arrays = jax.tree.map(jnp.asarray, given, is_leaf=lambda x: isinstance(x, list))
    expected = attend(*arrays, **as_arrays)
    np.testing.assert_array_equal(attend(*arrays, **given), expected)

    @jax.jit
    def of_scalars(last):
        """Lists that hold traced scalars."""
        changed = given | {"query_positions": [4, last], "sink": [0.5, -0.5, 0.0, last - 7.0]}
        return attend(*arrays, **changed)

    np.testing.assert_allclose(of_scalars(9), expected, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
def test_slopes_of_each_batch_entry(backend: str) -> None:
    """As FlashAttention's `[batch, heads]`: each entry is computed as if alone, gradients too."""
    arrays = [jnp.asarray(x) for x in inputs(2, 40, 40, HEADS, 8)]
    slopes = jnp.asarray(np.random.default_rng(2).uniform(0.01, 1.0, (2, HEADS)), jnp.float32)
    *given, incoming = arrays

    def of_all(slopes, query):
        attended = attend(query, *given[1:], slopes=slopes, backend=backend)
        return (attended * incoming).sum(), attended

    (of_slopes, of_queries), attended = jax.jit(jax.grad(of_all, (0, 1), has_aux=True))(
        slopes, given[0]
    )
    for entry in range(2):
        own, *gradients = value_and_gradients(
            [x[entry : entry + 1] for x in arrays], AlibiBias(slopes[entry])
        )
        np.testing.assert_allclose(attended[entry], own[0], atol=1e-5)
        np.testing.assert_allclose(of_queries[entry], gradients[0][0], atol=2e-5)
        np.testing.assert_allclose(of_slopes[entry], gradients[-1], rtol=1e-4, atol=1e-3)


def test_slopes_of_each_batch_entry_in_a_layer_and_on_several_devices() -> None:
    arrays = random_arrays(2, 6, 6)
    slopes = np.stack([np.full(HEADS, 0.5), np.full(HEADS, 0.01)]).astype(np.float32)
    expected = attend(*arrays, slopes=slopes, causal=False)
    alone = attend(*(x[1:] for x in arrays), slopes=slopes[1], causal=False)
    np.testing.assert_allclose(expected[1:], alone, atol=1e-6)
    found = alibi_attention_fn(HEADS, causal=False, slopes=slopes)(*arrays)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    thrice = [jnp.stack([jnp.asarray(x)] * 3) for x in (*arrays, slopes)]
    found = attend(*thrice[:3], slopes=thrice[3], causal=False)
    np.testing.assert_allclose(found[1], expected, atol=1e-6)
    axes = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[:4]}
    sharding = NamedSharding(
        jax.make_mesh((2, 2), ("data", "tensor"), **axes), P("data", None, "tensor")
    )
    split = attend(*arrays, slopes=slopes, causal=False, sharding=sharding)
    np.testing.assert_allclose(split, expected, atol=1e-6)


def test_cross_attention_decoded_one_by_one_stands_where_it_was_trained() -> None:
    """With 5 queries over 9 keys, the last would stand at key 8 in training and each at key 8 in
    decoding.
    """
    query, key, value = random_arrays(2, 5, 9)

    def at(offset):
        return alibi_attention_fn(HEADS, causal=False, window=3, query_offset=offset)

    trained = at(0)(query, key, value)
    expected = attend(
        query, key, value, slopes=alibi_slopes(HEADS), causal=False, window=3,
        query_positions=np.arange(5),
    )  # fmt: skip
    np.testing.assert_array_equal(trained, expected)
    padding = jnp.ones((2, 1, 1, 9), bool)
    decode = jax.jit(lambda offset, query: at(offset)(query, key, value, mask=padding))
    for step in range(5):
        offset = jnp.asarray([step, step]) if step == 4 else jnp.asarray(step)
        decoded = decode(offset, query[:, step : step + 1])
        np.testing.assert_allclose(decoded[:, 0], trained[:, step], atol=1e-6)
    assert np.abs(alibi_attention_fn(HEADS, causal=False)(query, key, value) - trained).max() > 0.1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
def test_queries_that_see_no_key_are_zero(backend, causal):
    """Queries at 100 to 104, keys at 0 to 4: softmax over hidden keys alone must not become their
    mean.
    """
    query, key, value, _ = inputs(2, 5, 5, HEADS, 8)
    far = {"query_positions": np.arange(5) + 100, "causal": causal, "backend": backend}
    both = jax.jit(lambda *x: [attend(*x, **far, window=window) for window in (50, 99)])
    none, some = map(np.asarray, both(query, key, value))
    np.testing.assert_array_equal(none, 0.0)
    np.testing.assert_array_equal(some[:, 3:], 0.0)
    # at 102, one key is less than 99 away
    np.testing.assert_allclose(some[:, 2], value[:, 4], atol=1e-6)
