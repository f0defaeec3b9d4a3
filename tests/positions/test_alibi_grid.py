"""ALiBi in a grid and with free tokens: a loop over pairs, in each backend, for rectangles and other
resolutions than before.
"""

import dataclasses
import functools

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alibi
from alibi.attention.accelerator import plan
from alibi.attention.backends import refusal
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.skipping import skipped_share
from alibi.positions.contract import check_contract
from alibi.positions.metric import Metric, MetricBias
from tests.attention.calls import assert_equals_reference, formula, inputs
from tests.refusals import assert_refused

HEADS = 2


def made(position="alibi_grid", length=16, causal=False, **options):
    sizes = {"num_heads": HEADS, "head_dim": 4, "width": 8, "train_length": length}
    return alibi.make_position(position, causal=causal, options=options, **sizes)


def by_hand(rows, columns, free, metric, slopes):
    """The bias pair by pair."""
    places = [None] * free + [(row, column) for row in range(rows) for column in range(columns)]
    bias = np.zeros((len(slopes), len(places), len(places)))
    for i, one in enumerate(places):
        for j, other in enumerate(places):
            if one is not None and other is not None:
                apart = abs(np.subtract(one, other))
                distance = apart.sum() if metric == "manhattan" else np.sqrt((apart**2).sum())
                bias[:, i, j] = -np.asarray(slopes) * distance
    return bias


@pytest.mark.parametrize("metric", ["manhattan", "euclidean"])
@pytest.mark.parametrize(
    ("rows", "columns", "free", "options"),
    [
        (4, 4, 0, {}),  # a square needs no columns
        (3, 5, 2, {"columns": 5}),
        (5, 3, 1, {"rows": 5}),
        (1, 7, 0, {"rows": 1, "columns": 7}),
    ],
)
def test_the_bias_is_that_of_pairs(metric, rows, columns, free, options):
    method = made(metric=metric, free_tokens=free, **options).at_length(rows * columns + free)
    check_contract("alibi_grid", method)
    positions = np.arange(rows * columns + free)
    bias = jax.jit(lambda: method.bias({})(jnp.asarray(positions), jnp.asarray(positions)))()
    want = by_hand(rows, columns, free, metric, alibi.alibi_slopes(HEADS))
    np.testing.assert_allclose(bias, want, rtol=1e-6)


@pytest.mark.parametrize("position", ["alibi", "alibi_learned", "alibi_interpolated"])
@pytest.mark.parametrize("causal", [True, False])
def test_free_tokens_of_a_line(position, causal):
    method = made(position, length=6, causal=causal, free_tokens=2)
    positions = jnp.arange(6)
    bias = np.asarray(method.bias(method.init(jax.random.key(0)))(positions, positions))
    want = by_hand(1, 4, 2, "manhattan", alibi.alibi_slopes(HEADS))
    seen = np.tri(6, dtype=bool) if causal else np.ones((6, 6), bool)
    np.testing.assert_allclose(bias[:, seen], want[:, seen], rtol=1e-6)
    assert not method.shift_invariant
    assert made("alibi").shift_invariant
    assert not made("alibi_grid").shift_invariant


LINE = {"causal": True, "metric": Metric(free_tokens=3), "window": 12}
GRID = {"causal": False, "metric": Metric(6, 3, euclidean=True)}


@pytest.mark.parametrize(
    ("kernels", "arguments"),
    [(kernels, GRID) for kernels in ("blocked", "mosaic", "triton")]
    + [(kernels, LINE) for kernels in ("blocked", "mosaic")],
)
def test_tiles_and_kernels_compute_it(kernels, arguments, monkeypatch):
    """With the gradient of the slopes, and in both directions a mask of keys."""
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    monkeypatch.setattr(plan, "INTERPRET_GPU", kernels == "triton")
    for name in ("BLOCK", "GPU_BLOCK", "LANES"):
        monkeypatch.setattr(plan, name, 16)
    monkeypatch.setattr("alibi.attention.tiles.BLOCK", 16)
    arguments = dict(arguments)
    bias = MetricBias(jnp.asarray([0.5, 0.1]), arguments.pop("metric"))
    if not arguments["causal"]:
        arguments["mask"] = jnp.asarray(np.arange(39) < np.asarray([[39], [20]]))[:, None, None]
    arrays = inputs(2, 39, 39, HEADS, 8)
    assert_equals_reference(kernels if kernels == "blocked" else "fused", arrays, bias, **arguments)


def test_a_bias_without_free_tokens_skips_patches_out_of_reach(monkeypatch):
    """At 16 x 16 with a steep slope, a quarter of the tiles or more; the result is the same."""
    monkeypatch.setattr("alibi.attention.tiles.BLOCK", 32)
    query, key, value, _ = map(jnp.asarray, inputs(1, 256, 256, HEADS, 8))
    bias, positions = MetricBias(jnp.asarray([64.0, 32.0]), Metric(16)), np.arange(256)
    call = AttentionCall(
        *(query, key, value),
        bias,
        causal=False,
        query_positions=positions,
        key_positions=positions,
        options=AttentionOptions(backend="blocked"),
    )
    assert skipped_share(call) > 0.25
    how = {"bias": bias, "causal": False, "backend": "blocked"}
    attend = jax.jit(functools.partial(alibi.attend, **how), static_argnames="skip_epsilon")
    ways = [attend(query, key, value, skip_epsilon=epsilon) for epsilon in (0.0, None)]
    np.testing.assert_array_equal(*ways)


def test_it_makes_no_array_of_pairs():
    """128 x 128 patches of 2 heads: one array [q, k] would be a GiB."""
    method = made(length=2**14 + 1, free_tokens=1)
    array = jax.ShapeDtypeStruct((1, 2**14 + 1, HEADS, 4), jnp.float32)

    def loss(*x):
        return alibi.attend(*x, bias=method.bias({}), causal=False, backend="blocked").sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(array, array, array).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**27


def test_flax_s_layers_take_other_resolutions():
    """The layer of 4 x 4 reads 4 x 6 with the same parameters: its result is that of a bias made by
    hand.
    """
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1 + 4 * 6, 8)), jnp.float32)

    def layers(**options):
        how = {"num_heads": HEADS, "causal": False, "options": {"free_tokens": 1, **options}}
        attention = alibi.attention_fn("alibi_grid", **how)
        own = nnx.MultiHeadAttention(
            HEADS, 8, decode=False, attention_fn=attention, rngs=nnx.Rngs(0)
        )
        return (
            nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention),
            alibi.linen.SelfAttention(position="alibi_grid", **how),
            own,
        )

    @jax.jit
    def results():
        params = layers()[0].init(jax.random.key(0), x[:, :17])
        flax, ours, own = layers(columns=6)
        return params, flax.apply(params, x), ours.apply(params, x), own(x)

    params, got, by_ours, by_own = results()
    np.testing.assert_allclose(by_ours, got, atol=1e-6)
    query, key, value = (
        np.einsum("bld,dhf->blhf", x, params["params"][name]["kernel"])
        for name in ("query", "key", "value")
    )
    attended = formula(query, key, value, by_hand(4, 6, 1, "manhattan", alibi.alibi_slopes(HEADS)))
    want = np.einsum("blhf,hfd->bld", attended, params["params"]["out"]["kernel"])
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert by_own.shape == x.shape


def test_kernels_refuse_a_grid_under_a_causal_mask():
    array = jnp.zeros((1, 16, HEADS, 8))
    call = AttentionCall(
        array, array, array, MetricBias(jnp.ones(2), Metric(4)), True, np.arange(16), np.arange(16)
    )
    assert "hide no keys by order in a grid" in refusal("fused", call)
    assert "not ALiBi's" in refusal("augmented", dataclasses.replace(call, devices=1))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: made(length=15).bias({}), "15 patches don't fill 3 rows of 3; give the grid of"),
        (lambda: made(columns=5).bias({}), "16 patches don't fill 3 rows of 5"),
        (lambda: made(rows=2, columns=9).bias({}), "got 16 tokens, 0 of them free, and 16 patches"),
        (
            lambda: made(free_tokens=1).bias({}),
            "1 of them free, and 15 patches don't fill 3 rows of 3",
        ),
        (
            lambda: made(free_tokens=17),
            "free_tokens=17 are more than the 16 tokens of train_length",
        ),
        (lambda: made("alibi", free_tokens=-1), "free_tokens=-1 .* at least 0"),
        (lambda: made("alibi", free_tokens=1, slopes_after="paper"), "leave slopes_after out"),
        (lambda: made(slopes_after="paper"), "AlibiGrid with free_tokens=0 has the same slopes"),
        (lambda: made(metric="chebyshev"), "metric='chebyshev' .* manhattan, euclidean"),
        (
            lambda: alibi.attention_fn(
                "alibi_grid", num_heads=2, causal=False, options={"columns": 5}
            )(*(jnp.zeros((1, 16, 2, 4)),) * 3),
            "16 patches don't fill 3 rows of 5",
        ),
    ],
)
def test_a_mistake_is_a_line(use, message):
    assert_refused(message, use)
