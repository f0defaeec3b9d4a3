"""Rotary's family against formulas in float64 and against peers; logits scaled by ln n."""

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.attention import attend
from alibi.config import make_config, replaced
from alibi.model.decoder import build_model
from alibi.model.positions import init_position, scaled_queries
from alibi.positions import PositionMethod, make_position, rotary
from tests.programs import AS_USERS
from tests.refusals import assert_refused

HEADS, HEAD_DIM, TRAIN_LENGTH, LENGTH = 2, 16, 16, 24
HALF = HEAD_DIM // 2


def make(
    name: str, *, heads: int = HEADS, length: int = LENGTH, **options: object
) -> PositionMethod:
    sizes = {
        "num_heads": heads,
        "head_dim": HEAD_DIM,
        "width": heads * HEAD_DIM,
        "train_length": TRAIN_LENGTH,
    }
    return make_position(name, **sizes, options=options).at_length(length)


@functools.partial(jax.jit, static_argnums=(0, 5))
def logits_and_gradients(method: PositionMethod, params, query, key, weights, known=True):
    """The logits before their scaling, `[batch, heads, q, k]`, and the gradients of their product
    with `weights`.
    """

    def product(params, query, key):
        positions = (np if known else jnp).arange(query.shape[1])
        turned = (
            method.queries(params, query, positions, None),
            method.keys(params, key, positions, None),
        )
        logits = jnp.einsum("bqhd,bkhd->bhqk", *turned, precision="highest")
        return (logits * weights).sum(), logits

    gradients, logits = jax.grad(product, (0, 1, 2), has_aux=True)(params, query, key)
    return logits, gradients


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (2, LENGTH, HEADS, HEAD_DIM), (2, LENGTH, HEADS, HEAD_DIM), (2, HEADS, LENGTH, LENGTH)
    query, key, weights = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return query, key, weights


def series(base: float = 10_000.0, dim: int = HEAD_DIM) -> np.ndarray:
    return np.asarray([base ** (-2 * k / dim) for k in range(dim // 2)])


def yarn_series(s: float, fast: float, slow: float, base: float, length: int) -> np.ndarray:
    def pair(turns):
        return HEAD_DIM * np.log(length / (2 * np.pi * turns)) / (2 * np.log(base))

    low, high = max(np.floor(pair(fast)), 0), np.ceil(pair(slow))
    found = []
    for k, theta in enumerate(series(base)):
        ramp = min(max((k - low) / (high - low), 0), 1)
        found.append(theta / s * ramp + theta * (1 - ramp))
    return np.asarray(found)


S = LENGTH / TRAIN_LENGTH
FAST = {"base": 10.0, "fast": 8.0, "slow": 0.25}
# Name, options, angle of each pair, and what multiplies its product at distance 1 and everywhere.
CASES = [
    ("rotary", {}, series(), 1.0, 1.0),
    ("rotary", {"base": 100.0}, series(100.0), 1.0, 1.0),
    ("rotary", {"share": 0.625, "share_of": "frequencies"}, [*series()[:5], 0, 0, 0], 1.0, 1.0),
    ("rotary_interpolated", {"factor": 4.0}, series() / 4, 1.0, 1.0),
    ("rotary_interpolated", {}, series() / S, 1.0, 1.0),
    ("rotary_interpolated", {"original_length": 4}, series() / 6, 1.0, 1.0),
    ("rotary_interpolated", {"original_length": 48}, series(), 1.0, 1.0),
    ("rotary_ntk", {"factor": 4.0}, series(10_000 * 4 ** (HEAD_DIM / (HEAD_DIM - 2))), 1.0, 1.0),
    ("rotary_ntk", {}, series(10_000 * S ** (HEAD_DIM / (HEAD_DIM - 2))), 1.0, 1.0),
    ("rotary_ntk", {"original_length": 48}, series(), 1.0, 1.0),
    (
        "yarn",
        {"factor": 4.0, **FAST},
        yarn_series(4, 8, 0.25, 10, 16),
        1.0,
        (0.1 * np.log(4) + 1) ** 2,
    ),
    ("yarn", FAST, yarn_series(S, 8, 0.25, 10, 16), 1.0, (0.1 * np.log(S) + 1) ** 2),
    (
        "yarn",
        {"original_length": 64, "factor": 2, "temperature": 0.0},
        yarn_series(2, 2, 1, 10_000, 64),
        1.0,
        1.0,
    ),
    (
        "xpos",
        {},
        series(),
        [((2 * k + 0.4 * 16) / (1.4 * 16)) ** (2 / TRAIN_LENGTH) for k in range(HALF)],
        1.0,
    ),
    # Of pairs that aren't turned nothing decays either.
    (
        "xpos",
        {"share": 0.5, "share_of": "frequencies", "scale_base": 512},
        [*series()[: HALF // 2], *[0.0] * (HALF - HALF // 2)],
        [
            ((2 * k + 0.4 * 16) / (1.4 * 16)) ** (1 / 512) if k < HALF // 2 else 1.0
            for k in range(HALF)
        ],
        1.0,
    ),
    (
        "xpos",
        {"scale_base": 21},
        series(),
        [((2 * k + 0.4 * 16) / (1.4 * 16)) ** (1 / 21) for k in range(HALF)],
        1.0,
    ),
]


@pytest.mark.parametrize(("name", "options", "angles", "decay", "factor"), CASES)
def test_logits_and_gradients_are_those_of_the_formula(
    name, options, angles, decay, factor
) -> None:
    """The logit of i and j: the sum over pairs of Re(q conj(k) e^(i (i-j) theta)) zeta^(i-j), times
    the square of a.
    """
    query, key, weights = inputs()
    complexes = [
        x[..., :HALF].astype(np.float64) + 1j * x[..., HALF:].astype(np.float64)
        for x in (query, key)
    ]
    distance = np.arange(LENGTH)[:, None, None] - np.arange(LENGTH)[None, :, None]
    turn = factor * np.asarray(decay) ** distance * np.exp(1j * distance * np.asarray(angles))
    expected = np.einsum("bqhp,bkhp,qkp->bhqk", complexes[0], complexes[1].conj(), turn).real
    of_query = np.einsum("bhqk,bkhp,qkp->bqhp", weights, complexes[1], turn.conj())
    of_key = np.einsum("bhqk,bqhp,qkp->bkhp", weights, complexes[0], turn)
    logits, (_, *gradients) = logits_and_gradients(make(name, **options), {}, query, key, weights)
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max())
    for gradient, right in zip(gradients, (of_query, of_key), strict=True):
        right = np.concatenate([right.real, right.imag], axis=-1)
        np.testing.assert_allclose(gradient, right, atol=2e-5 * np.abs(right).max())


def peer_arrays() -> dict[str, np.ndarray]:
    with np.load(pathlib.Path(__file__).parent / "rotary_peers.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("case", json.loads(str(peer_arrays()["cases"])))
def test_the_peers_compute_the_same(case: str) -> None:
    """`transformers` (default, partial, proportional, linear, dynamic, yarn) and `x-transformers`
    (xPos).
    """
    arrays, (name, *words) = peer_arrays(), case.split()
    config = make_config()
    for word in words:
        config = replaced(
            config, {f"position_options.{word.partition('=')[0]}": word.partition("=")[2]}
        )
    # their own lengths, whatever the training length
    theirs = {"xpos": {"scale_base": 512.0}, "yarn": {"fast": 32.0}}.get(name, {})
    method = make(name, heads=1, **theirs | dict(config.position_options))
    query, key = (np.swapaxes(arrays[side], 1, 2) for side in ("query", "key"))
    logits, (_, *gradients) = logits_and_gradients(method, {}, query, key, arrays["weights"])
    np.testing.assert_allclose(logits, arrays[f"{case}/logits"], atol=2e-5)
    for side, gradient in zip(("query", "key"), gradients, strict=True):
        np.testing.assert_allclose(
            np.swapaxes(gradient, 1, 2), arrays[f"{case}/{side}_gradient"], atol=5e-5
        )


def test_sines_of_known_positions_are_constants_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XLA's CPU backend would compute them for each sequence and head. The program computes a large
    table.
    """
    method, arguments = make("xpos"), ({}, *map(jnp.asarray, inputs()))
    traced, known = (logits_and_gradients(method, *arguments, known) for known in (False, True))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), known, traced)

    def computes_sines(length: int, known: bool) -> bool:
        program = logits_and_gradients.lower(
            make("xpos", length=length), *arguments, known
        ).compile(compiler_options=AS_USERS)
        return any(
            operation in program.as_text() for operation in ("cosine(", "sine(", "exponential(")
        )

    assert not computes_sines(LENGTH, known=True)
    traced_program = logits_and_gradients.lower(method, *arguments, True).as_text()
    tables = 4  # of queries and keys, which decay by their inverses
    assert (
        len(re.findall(rf'constant dense<"\w*"> : tensor<1x{LENGTH}x1x{HALF}xf32>', traced_program))
        == tables
    )
    assert computes_sines(LENGTH, known=False)
    monkeypatch.setattr(rotary, "MOST_IN_TABLE", LENGTH * HALF - 1)
    assert computes_sines(LENGTH + 1, known=True)  # another length, of which no program was made


def test_xpos_of_a_small_scale_base_ends_where_the_mask_would_not_hide_later_keys():
    """Attention of short sequences hides a key by adding -1e30; e^79, with a base of 1, is more."""
    sizes = {"num_heads": 2, "head_dim": 16, "width": 32, "train_length": 16}
    method = make_position("xpos", **sizes, options={"scale_base": 1.0})
    length = method.max_length
    assert length == int(60 / np.log(3.5))
    method, positions = method.at_length(length), np.arange(length)
    query, key, value = (jax.random.normal(jax.random.key(i), (1, length, 2, 16)) for i in range(3))

    @jax.jit
    def attended(key, value):
        turned = (
            method.queries({}, query, positions, None),
            method.keys({}, key, positions, None),
        )
        return attend(*turned, value, backend="saved")

    later = jnp.arange(length)[:, None, None] >= length // 2
    changed = attended(jnp.where(later, -3.0 * key, key), jnp.where(later, value + 1.0, value))
    np.testing.assert_array_equal(changed[:, : length // 2], attended(key, value)[:, : length // 2])


def test_halves_of_xpos_decay_are_numbers_at_its_longest() -> None:
    """At both ends of 65,391 tokens, where uncentred halves would be e^-160 and e^160."""
    method = make("xpos", length=65_391, scale_base=512.0)
    assert method.max_length == 65_391
    method.check_length(65_391)
    needed = r"65391 positions and got a sequence of 65392 tokens; use 65391 or fewer"
    assert_refused(needed, method.check_length, 65_392)
    x = jnp.full((1, 2, HEADS, HEAD_DIM), 0.5)
    for first in (0, 65_389):
        query, key = (
            method.queries({}, x, jnp.arange(first, first + 2), None),
            method.keys({}, x, jnp.arange(first, first + 2), None),
        )
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        np.testing.assert_allclose(logits[..., 0, 0], 0.25 * HEAD_DIM, rtol=1e-4)
        assert np.isfinite(logits).all()


@pytest.mark.parametrize("rule", ["log_n", "log_n_beyond", "ssmax", "ssmax_queries", "llama4"])
def test_logits_grow_with_the_logarithm_of_the_keys_seen(rule: str) -> None:
    """Query i sees i + 1 = n keys and is multiplied by ln n / ln L, at least 1 with log_n_beyond, by
    s ln n of its head, or by 1 + 0.1 ln(floor(n / L) + 1). Biases: see test_scaled.py.
    """
    query, s, log_n = inputs()[0], np.asarray([0.3, 0.7]), np.log(np.arange(1, LENGTH + 1))
    params = {"ssmax": jnp.asarray(s, jnp.float32)}
    factor = {
        "log_n": (log_n / np.log(TRAIN_LENGTH))[:, None],
        "log_n_beyond": np.maximum(log_n / np.log(TRAIN_LENGTH), 1)[:, None],
        "ssmax": s * log_n[:, None],
        "ssmax_queries": s * log_n[:, None],
        "llama4": 1 + 0.1 * np.log(np.arange(1, LENGTH + 1) // TRAIN_LENGTH + 1)[:, None],
    }[rule]
    scaled = jax.jit(scaled_queries, static_argnums=(0, 1))(
        rule, make("rotary"), params, query, np.arange(LENGTH)
    )
    np.testing.assert_allclose(scaled, query * factor[None, :, :, None], rtol=1e-5, atol=1e-6)


def test_ssmax_starts_with_a_mean_of_one_over_the_training_length() -> None:
    """For the 1,024 tokens of the paper s = 0.168; a method's own parameters stay."""
    sizes = {"num_heads": 2, "head_dim": 4, "width": 8, "train_length": 1024}
    start, of_queries = (
        init_position(make_position("fox", **sizes), rule, jax.random.key(0))
        for rule in ("ssmax", "ssmax_queries")
    )
    np.testing.assert_array_equal(start["ssmax"], of_queries["ssmax"])
    assert set(start) == {"kernel", "bias", "ssmax"}
    np.testing.assert_allclose(
        start["ssmax"], np.full(2, 1 / np.log(np.arange(1, 1025)).mean()), rtol=1e-6
    )
    np.testing.assert_allclose(start["ssmax"], 0.168, atol=5e-4)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        *(
            (name, {"head_dim": 5}, "even head_dim and got 5; change num_heads or width")
            for name in ("rotary", "yarn", "rotary_ntk", "xpos")
        ),
        ("xpos", {"causal": False}, "products with later keys would grow"),
    ],
)
def test_sizes_that_are_refused(name: str, changed: dict, message: str) -> None:
    sizes = {"num_heads": 2, "head_dim": 4, "width": 8, "train_length": 8}
    assert_refused(message, make_position, name, **sizes | changed)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("model.logit_scale=log", "model.logit_scale='log'"),
        ("model.logit_scale=log_n,length=1", "needs a train_length of at least 2"),
        (
            "model.logit_scale=log_n,model.window=8",
            "model.logit_scale=log_n, model.window=8 exclude each other",
        ),
        (
            "model.max_position=256,model.window=8",
            "model.max_position=256, model.window=8 exclude each other",
        ),
        ("model.max_position=256,model.logit_scale=ssmax", "exclude each other"),
        (
            "model.max_position=100",
            "model.max_position=100 must be at least train_length=128, or 0",
        ),
        (
            "model.max_position=131072,position=xpos,position_options.scale_base=512",
            "XPos has 65391 positions",
        ),
    ],
)
def test_positions_and_scales_of_the_model_that_are_refused(keys: str, message: str) -> None:
    assert_refused(message, lambda: build_model(make_config(keys), 100))
