"""A window hides far keys in each backend alike, and their tiles are not computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi import attend
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.skipping import computed_ranges
from alibi.positions import AlibiBias
from tests.attention.calls import inputs

HEADS, DIM = 2, 8


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
def test_queries_that_see_no_key_are_zero(backend, causal):
    """Queries at 100 to 104, keys at 0 to 4: softmax over hidden keys alone must not become their
    mean.
    """
    query, key, value, _ = inputs(2, 5, 5, HEADS, DIM)
    far = {"query_positions": np.arange(5) + 100, "causal": causal, "backend": backend}
    both = jax.jit(lambda *x: [attend(*x, **far, window=window) for window in (50, 99)])
    none, some = map(np.asarray, both(query, key, value))
    np.testing.assert_array_equal(none, 0.0)
    np.testing.assert_array_equal(some[:, 3:], 0.0)
    # at 102, one key is less than 99 away
    np.testing.assert_allclose(some[:, 2], value[:, 4], atol=1e-6)


@pytest.mark.parametrize(
    ("bias", "causal"), [(None, False), (AlibiBias(jnp.asarray([1e-3, 1e-4])), True)]
)
def test_tiles_outside_are_not_computed(bias, causal):
    """4,096 tokens are 8 blocks; with a window of 512 each needs itself and its neighbours,
    whatever the bias.
    """
    query, key, value, _ = map(jnp.asarray, inputs(1, 4096, 4096, HEADS, DIM))
    positions = np.arange(4096)
    call = AttentionCall(
        query, key, value, bias, causal, positions, positions, options=AttentionOptions(window=512)
    )
    np.testing.assert_array_equal(
        computed_ranges(call)[0],
        [[max(block - 1, 0), block + 1 if causal else min(block + 2, 8)] for block in range(8)],
    )
