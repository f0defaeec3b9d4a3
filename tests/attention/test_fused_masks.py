"""Masks in the fused kernels: equal to the reference in values and gradients, tiles that are hidden
whole are left out, and a padded batch stays in the kernels.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import make_attention_mask
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alibi import alibi_slopes, attend
from alibi.attention.accelerator import plan
from alibi.attention.backends import choose, refusal
from alibi.attention.call import AttentionCall
from alibi.attention.skipping import tiles_needed
from alibi.attention.tiles import make_sides
from alibi.positions import AlibiBias
from alibi.positions.sided import SidedBias
from tests.attention.calls import inputs
from tests.attention.test_fused import (
    KERNELS,
    assert_equals_reference,
    bias_of,
    call_of,
    small_blocks,  # noqa: F401
)
from tests.refusals import assert_refused

BATCH, QUERIES, KEYS = 2, 27, 40
PADDED = np.arange(KEYS) < np.asarray(
    [[KEYS], [11]]
)  # a key in its first block, none in the others


def drawn(*shape):
    """A mask with hidden rows, hidden tiles and pairs that chance hides."""
    mask = np.random.default_rng(0).random(shape) < 0.7
    mask[..., 5:9, :] = False
    mask[..., 16:, 16:32] = False
    return mask


MASKS = {
    "keys": PADDED[:, None, None, :],
    "keys of all": PADDED[None, None, 1:],
    "keys of heads": drawn(1, 2, 1, KEYS),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_mask_of_each_head(kernels, monkeypatch):
    """A query that sees no key gives zeros, and takes no gradient."""
    monkeypatch.setattr(plan, "INTERPRET_GPU", kernels == "triton")
    assert_equals_reference(
        inputs(BATCH, QUERIES, KEYS, 2, 8),
        *bias_of("t5", 2, 8),
        mask=jnp.asarray(drawn(BATCH, 2, QUERIES, KEYS)),
    )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("kernels", "mask"), [("mosaic", "pairs"), ("triton", "keys")])
def test_with_segments_shared_keys_a_window_a_sink_and_a_cap(kernels, mask, monkeypatch):
    monkeypatch.setattr(plan, "INTERPRET_GPU", kernels == "triton")
    segments = jnp.asarray(np.stack([np.arange(KEYS) // 15, np.zeros(KEYS, int)]))
    whole = PADDED[:, None, None] if mask == "keys" else drawn(BATCH, 1, KEYS, KEYS)
    assert_equals_reference(
        inputs(BATCH, KEYS, KEYS, 4, 8, kv_heads=2, value_dim=12),
        *bias_of("alibi_learned", 4, 8),
        sink=jnp.asarray([0.0, 0.5, -1.0, 2.0]),
        window=12,
        logit_cap=2.0,
        segment_ids=segments,
        mask=jnp.asarray(whole),
    )


@pytest.mark.usefixtures("small_blocks")
def test_tiles_that_are_hidden_whole_are_left_out():
    """A causal mask shows 10 of 4 x 4 tiles. The second sequence has 20 tokens: keys of two
    blocks, so that rows of tiles have 1, 2, 2 and 2. As queries are padding too, so do the last two
    rows lose theirs.
    """
    array = jnp.zeros((BATCH, 64, 2, 8))
    tokens = np.arange(64) < np.asarray([[64], [20]])
    call = AttentionCall(
        array, array, array, None, True, query_positions=np.arange(64), key_positions=np.arange(64)
    )
    documents = jnp.asarray(np.arange(64) // 32)
    for expected, changes in (
        ([10, 7], {"mask": tokens[:, None, None]}),
        ([10, 3], {"mask": make_attention_mask(tokens, tokens, dtype=bool)}),
        ([3 + 3] * 2, {"query_segments": documents, "key_segments": documents}),
    ):
        changes = {name: jnp.asarray(x) for name, x in changes.items()}
        own = dataclasses.replace(call, **changes).with_mask_in_segments()
        assert (own.mask is None) == (expected != [10, 3])
        of_call = plan.make_plan(own)
        needed = tiles_needed(own, of_call, make_sides(own, of_call))
        assert np.asarray(needed)[:, 0].sum(axis=(1, 2)).tolist() == expected


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_auto_takes_fused_for_a_padded_batch(platform):
    plain = call_of(platform, AlibiBias(alibi_slopes(4)))
    for shape in ((1, 1, 1, 1024), (1, 1, 1024, 1024), (1, 4, 1024, 1024)):
        assert choose(dataclasses.replace(plain, mask=jnp.ones(shape, bool))) == "fused"
    dropped = {"mask": jnp.ones((1, 1, 1, 1024), bool), "dropout_rate": 0.5}
    dropped = dataclasses.replace(plain, dropout_rng=jax.random.key(0), **dropped)
    assert "no dropout" in refusal("fused", dropped)


def test_devices_compute_their_own_sequences_of_a_padded_batch():
    """A mask of keys is split with them, as segments are."""
    axes = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[:4]}
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), **axes)
    sharding = NamedSharding(mesh, P("data", None, "tensor"))
    query, key, value, _ = map(jnp.asarray, inputs(BATCH, QUERIES, KEYS, 2, 8))
    arguments = {"slopes": alibi_slopes(2), "mask": jnp.asarray(MASKS["keys"]), "causal": False}

    @jax.jit
    def split(*x):
        return attend(*x, **arguments, sharding=sharding)

    text = split.lower(query, key, value).as_text()
    assert "manual_computation" in text or "shmap" in text
    want = attend(query, key, value, **arguments, backend="reference")
    np.testing.assert_allclose(split(query, key, value), want, atol=1e-6)


@pytest.mark.usefixtures("small_blocks")
def test_two_sides_stay_in_the_kernels_for_a_padded_batch():
    slopes = jnp.asarray([0.5, 0.1])
    assert_equals_reference(
        inputs(BATCH, KEYS, KEYS, 2, 8),
        SidedBias(AlibiBias(slopes), AlibiBias(slopes[::-1])),
        lambda bias: bias,
        causal=False,
        mask=jnp.asarray(MASKS["keys of all"]),
    )


def test_masks_that_would_be_spread_to_pairs_go_elsewhere():
    query, key, value, *_ = map(jnp.asarray, inputs(BATCH, QUERIES, KEYS, 2, 8))
    assert_refused(
        "'fused'.*mask of keys",
        attend,
        query,
        key,
        value,
        mask=jnp.asarray(MASKS["keys of heads"]),
        backend="fused",
    )


@pytest.mark.usefixtures("small_blocks")
def test_a_mask_of_keys_hides_them_in_segments_of_few_bits():
    """int8 has no -2^31: as int32 the hidden keys are in a segment of their own."""
    params, bias = bias_of("none", 2, 8)
    assert_equals_reference(
        inputs(BATCH, QUERIES, KEYS, 2, 8),
        params,
        bias,
        mask=jnp.asarray(MASKS["keys"]),
        segment_ids=(jnp.zeros((BATCH, QUERIES), jnp.int8), jnp.zeros((BATCH, KEYS), jnp.int8)),
        causal=False,
    )
