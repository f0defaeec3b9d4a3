"""Biases against their papers' formulas in NumPy's float64, in values and derivatives, and against
other libraries.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi import alibi_slopes
from alibi.positions import PositionMethod, make_position, products
from alibi.positions.alibi import AlibiBias
from alibi.positions.deberta import Deberta
from alibi.positions.fox import Fox
from alibi.positions.t5 import T5Bias
from tests.attention.calls import check_derivatives, double
from tests.refusals import assert_refused

HEADS, HEAD_DIM, WIDTH, TRAIN_LENGTH, LENGTH = 4, 8, 32, 16, 12
PAPER = np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
QUERY, KEY = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
D = QUERY - KEY


def make(name: str, *, causal: bool = True, length: int = 0, **options: object) -> PositionMethod:
    sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "width": WIDTH, "train_length": TRAIN_LENGTH}
    method = make_position(name, **sizes, causal=causal, options=options)
    return method.at_length(length) if length else method


def params_of(method: PositionMethod) -> dict[str, jax.Array]:
    """Returns the initial parameters, moved a little, so none is 0 or 1."""
    key = jax.random.key(0)
    params = jax.jit(lambda: {**method.init(key), **method.init_layer(key)})()
    return {
        name: x + 0.05 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
        for name, x in params.items()
    }


def tokens() -> dict[str, np.ndarray]:
    """A layer's input, and its queries, keys and values, of two sequences."""
    rng, heads = np.random.default_rng(0), (2, LENGTH, HEADS, HEAD_DIM)
    shapes = {"x": (2, LENGTH, WIDTH), "query": heads, "key": heads, "value": heads}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def per_head(x: np.ndarray) -> np.ndarray:
    return np.asarray(x)[:, None, None]


def falling(before: np.ndarray, after: np.ndarray):
    return lambda given: -per_head(before) * np.maximum(D, 0) - per_head(after) * np.maximum(-D, 0)


def learned(before: str, after: str):
    return lambda given: falling(np.exp(given[before]), np.exp(given[after]))(given)


def t5(given):
    """4 of 8 buckets for each side hold a distance each, the others grow up to 20."""
    bucket = np.empty(D.shape, int)
    for i, j in np.ndindex(D.shape):
        n = abs(i - j)
        far = 4 + int(np.log(max(n, 4) / 4) / np.log(20 / 4) * 4 + 1e-12)
        bucket[i, j] = (8 if j > i else 0) + (n if n < 4 else min(7, far))
    return np.moveaxis(given["table"][bucket], -1, 0)


def kerple_log(given):
    return -per_head(given["r1"]) * np.log(1 + per_head(given["r2"]) * abs(D))


def kerple_power(given):
    return -per_head(given["r1"]) * abs(D).astype(float) ** per_head(given["r2"])


def kerple_square(given):
    return -per_head(given["r1"]) * D.astype(float) ** 2


def bam(given):
    away = abs(D - per_head(given["mean"])) + 1e-5
    return -np.exp(per_head(given["scale"])) * away ** per_head(given["power"])


def sandwich(given):
    cosines = sum(np.cos(D / 10_000 ** (2 * k / 128)) - 1 for k in range(64))
    return cosines / per_head(8 * np.arange(1, HEADS + 1) / HEADS)


def fire(given):
    def psi(x):
        return np.log(abs(given["c"]) * x + 1)

    threshold = 7 * abs(given["threshold_multiple"])
    normalized = psi(abs(D)) / psi(np.maximum(threshold, QUERY))
    hidden = np.maximum(normalized[..., None] * given["hidden_kernel"] + given["hidden_bias"], 0)
    # and a number for each head, which no softmax shows
    return np.moveaxis(hidden @ given["kernel"], -1, 0)


def shaw(given):
    vectors = given["vectors"][np.clip(-D, -3, 3) + 3]
    return np.einsum("bihd,ijd->bhij", given["query"], vectors) / np.sqrt(HEAD_DIM)


def deberta(given):
    """Returns the bias for k = 4, without q_i . k_j / sqrt(3 head_dim)."""
    keys, queries = (
        np.einsum("nw,whd->nhd", given["table"], given[f"{side}_kernel"])
        for side in ("key", "query")
    )
    to_position = np.einsum("bihd,ijhd->bhij", given["query"], keys[np.clip(D + 4, 0, 7)])
    from_position = np.einsum("bjhd,ijhd->bhij", given["key"], queries[np.clip(4 - D, 0, 7)])
    return (to_position + from_position) / np.sqrt(3 * HEAD_DIM)


def fox(given):
    logarithms = -np.log1p(np.exp(-(given["x"] @ given["kernel"] + given["bias"])))
    so_far = np.cumsum(logarithms, axis=1).swapaxes(1, 2)
    return so_far[..., :, None] - so_far[..., None, :]


GIVEN = (0.5, 0.0, 0.3, 2.0)
BOTH = {"causal": False}
SIDES = {"slopes_after": "closed_form", "slopes": GIVEN}
CASES = [
    ("alibi", BOTH, falling(PAPER, PAPER)),
    ("alibi", BOTH | SIDES, falling(GIVEN, PAPER)),
    ("alibi", {"alibi_bias_max": 16.0}, falling(PAPER**2, PAPER)),
    ("alibi_learned", {"per_layer": True}, learned("log_slopes", "log_slopes")),
    ("alibi_learned", BOTH | {"slopes_after": "random"}, learned("log_slopes", "log_slopes_after")),
    ("alibi_interpolated", {"length": 40}, falling(PAPER / 2.5, PAPER)),
    ("alibi_ntk", {"length": 40}, falling(PAPER * 2.5 ** -(np.arange(4) / 3), PAPER)),
    ("alibi_by_layer", {"factor": 0.5}, falling(PAPER / 2, PAPER)),
    ("bam", {}, bam),
    ("bam", BOTH, bam),
    ("t5", BOTH | {"num_buckets": 16, "max_distance": 20}, t5),
    ("kerple_log", BOTH, kerple_log),
    ("kerple_power", {}, kerple_power),
    ("kerple_power", BOTH | {"exponent": 2.0}, kerple_square),
    ("sandwich", BOTH, sandwich),
    ("fire", BOTH | {"threshold": 7}, fire),
    ("fox", {}, fox),
]  # shaw's and deberta's: test_content.py


@pytest.mark.parametrize(("name", "options", "formula"), CASES)
def test_the_bias_and_its_gradients_are_those_of_the_paper(name, options, formula) -> None:
    method, sides = make(name, **options), tokens()
    params = params_of(method)
    seen = D >= 0 if method.causal else np.ones(D.shape, bool)
    wanted = np.random.default_rng(1).normal(size=(2, HEADS, LENGTH, LENGTH)) * seen

    @jax.jit
    def run(given):
        def loss(given):
            kept = method.keep(given, given["x"], given["key"], padding=None, before=None)
            query = method.queries(given, given["query"], jnp.arange(LENGTH), kept)
            bias = method.content_bias(given, query, kept, kept).tabulated(*[np.arange(LENGTH)] * 2)
            whole = jnp.broadcast_to(bias(jnp.arange(LENGTH), jnp.arange(LENGTH)), wanted.shape)
            return (whole * wanted.astype(np.float32)).sum(), whole

        return jax.grad(loss, has_aux=True)(given)

    gradients, bias = run(params | sides)
    exact = double(params | sides)
    expected = np.broadcast_to(formula(exact), wanted.shape) * seen
    np.testing.assert_allclose(np.asarray(bias) * seen, expected, atol=3e-6, rtol=3e-6)
    check_derivatives(lambda given: (formula(given) * wanted).sum(), exact, gradients)
    assert all(np.abs(gradients[leaf]).max() > 0 for leaf in params), "each parameter is moved"


@pytest.fixture(scope="module")
def peers() -> dict[str, np.ndarray]:
    """The arrays of make_bias_peers.py."""
    with np.load(pathlib.Path(__file__).with_name("bias_peers.npz")) as file:
        return dict(file)


def compare(name: str, peers: dict[str, np.ndarray], bias, seen: np.ndarray, **inputs: str) -> None:
    """Compares `bias` with the peer's, where `seen`; `inputs` maps names of arrays to the peer's
    names.
    """
    given = {ours: jnp.asarray(peers[f"{name} {theirs}"]) for ours, theirs in inputs.items()}
    weights = (peers[f"{name} weights"] * seen).astype(np.float32)

    def loss(given):
        block = bias(**given)
        return (block * weights).sum(), block

    gradients, block = jax.jit(jax.grad(loss, has_aux=True))(given)
    np.testing.assert_allclose(np.asarray(block) * seen, peers[name] * seen, atol=2e-6)
    if (weights == peers[f"{name} weights"]).all():
        for ours, theirs in inputs.items():
            np.testing.assert_allclose(
                gradients[ours], peers[f"{name} gradient {theirs}"], atol=2e-5
            )


def test_slopes_are_those_of_mpt_and_x_transformers(peers) -> None:
    for heads in (1, 2, 3, 6, 8, 12, 16, 40):
        for most in (8, 16):
            slopes = alibi_slopes(heads, alibi_bias_max=most)
            np.testing.assert_allclose(slopes, peers[f"mpt {heads} {most}"], rtol=1e-6)
    bias = AlibiBias(alibi_slopes(12), symmetric=True)(jnp.arange(LENGTH), jnp.arange(LENGTH))
    np.testing.assert_allclose(bias, peers["alibi"], rtol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_t5_is_that_of_transformers_and_x_transformers(peers, causal: bool) -> None:
    """Except distances with whole logarithms, which float32 rounds down or up."""
    name = "t5 causal" if causal else "t5 both"
    distances = (peers[f"{name} buckets"].size - 1) // 2
    away = np.arange(-distances, distances + 1)
    of_side = 32 if causal else 16
    of_both = np.arange(32, dtype=np.float32)[:, None]
    ours = np.asarray(
        T5Bias(jnp.asarray(of_both), 128, signed=not causal)(jnp.asarray(away), jnp.zeros(1, int))
    )
    differ = away[ours[0, :, 0] != peers[f"{name} buckets"]]
    exact = np.arange(of_side // 2, 129)
    places = np.log(exact / (of_side // 2)) / np.log(128 / (of_side // 2)) * (of_side // 2)
    edges = exact[np.abs(places - np.round(places)) < 1e-6]
    assert set(np.abs(differ)) <= set(edges), f"off at {differ}"
    sizes = {"num_heads": 2, "head_dim": 4, "width": 8, "train_length": 512}
    method = make_position("t5", **sizes, causal=causal)
    compare(
        name,
        peers,
        lambda table: method.bias({"table": table})(*[jnp.arange(LENGTH)] * 2),
        1,
        table="table",
    )


@pytest.mark.parametrize(("part", "side"), [("c2p", "query"), ("p2c", "key")])
def test_deberta_is_that_of_transformers(peers, part: str, side: str) -> None:
    """Their code, as the authors', reads Qr at the row of i - j, the paper at j - i: here their
    table is mirrored.

    The mirrored table lacks a row for keys farther than k - 1 after the query.
    """
    clip = peers[f"{part} table"].shape[0] // 2
    mirror = (
        np.r_[2 * clip - 1, np.arange(2 * clip - 1, 0, -1)]
        if part == "p2c"
        else np.arange(2 * clip)
    )
    method = Deberta(2, 4, 8, 8, max_distance=clip, causal=False)
    none = jnp.zeros((1, LENGTH, 2, 4))

    def bias(table, kernel, features):
        kernels = dict.fromkeys(("key_kernel", "query_kernel"), jnp.zeros((8, 2, 4)))
        kernels["key_kernel" if part == "c2p" else "query_kernel"] = kernel.T.reshape(8, 2, 4)
        params = {"table": table[mirror], **kernels}
        sides = {"query": none, "key": none} | {side: features.swapaxes(1, 2)}
        kept = method.keep(
            params, jnp.zeros((1, LENGTH, 8)), sides["key"], padding=None, before=None
        )
        query = method.queries(params, sides["query"], jnp.arange(LENGTH), kept)
        return method.content_bias(params, query, kept, kept)(
            jnp.arange(LENGTH), jnp.arange(LENGTH)
        )

    seen = np.where(part == "p2c", -clip < D, True)
    compare(part, peers, bias, seen, table="table", kernel="kernel", features=side)


def test_fox_is_that_of_x_transformers(peers) -> None:
    method, none = Fox(2, 4, 8, 8), jnp.zeros((1, LENGTH, 2, 4))

    def bias(x, kernel, start):
        kept = method.keep({"kernel": kernel.T, "bias": start}, x, none, padding=None, before=None)
        return method.content_bias({}, none, kept, kept)(jnp.arange(LENGTH), jnp.arange(LENGTH))

    compare("fox", peers, bias, np.tril(np.ones_like(D)), x="x", kernel="kernel", start="bias")


def test_sandwich_is_exact_far_away_and_bounded_by_what_lies_beyond() -> None:
    """Where positions are known, cosines are computed in float64, and the bound is the largest of
    all farther keys.
    """
    positions = np.arange(65_536 - 64, 65_536)
    bias = make("sandwich").bias({}).tabulated(positions[-2:], np.arange(65_536))
    far = np.asarray(bias.values, np.float64)
    distances = np.maximum(np.arange(far.shape[1]) + bias.lowest, 0)
    exact = sum(np.cos(distances / 10_000 ** (2 * k / 128)) - 1 for k in range(64))
    np.testing.assert_allclose(far[0], exact / 2, atol=4e-6)
    envelope = np.asarray(bias.function.envelope(jnp.arange(65_536)))[0]
    beyond = exact[-65_536:]
    np.testing.assert_allclose(envelope, np.maximum.accumulate(beyond[::-1])[::-1] / 2, atol=4e-6)
    assert envelope[2000] < -10, "far keys are known to be far"
    assert (np.asarray(bias.function.envelope(jnp.asarray([65_600]))) == 0).all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "alibi",
            {"slopes": (0.5, -0.1, 0.2, 0.1)},
            r"slopes=\[0.5, -0.1, 0.2, 0.1\] must be 4 finite numbers of at",
        ),
        (
            "alibi",
            {"slopes": (0.5, 0.1)},
            "must be 4 finite numbers of at least 0, one for each head",
        ),
        (
            "alibi",
            {"alibi_bias_max": 0.0},
            "alibi_bias_max=0.0 must be a number above 0, such as the paper's 8",
        ),
        (
            "alibi",
            {"alibi_bias_max": 126},
            "alibi_bias_max=126.0 must be a number above 0, .* and at most 125",
        ),
        ("alibi_ntk", {"alibi_bias_max": 400}, "the flattest slope is 2.-alibi_bias_max"),
        ("alibi", {"alibi_bias_max": 16, "slopes": (1, 1, 1, 1)}, "changes named slopes"),
        (
            "alibi_learned",
            {"slopes": (0.5, 1.3e-38, 1, 1)},
            r"must be above 0 \(in float32, at least 2.-125\)",
        ),
        (
            "alibi",
            {"slopes": (0.5, 1e-50, 1, 1)},
            "must be 0 or of a size from 1.2e-38 to 3.4e.38, as in float32",
        ),
        (
            "alibi_learned",
            {"causal": False, "slopes_after": (0.5, 0, 1, 1)},
            r"slopes=\[0.5, 0.0, 1.0, 1.0\], which must",
        ),
        (
            "alibi",
            {"slopes_after": "paper"},
            "slopes_after='paper' are for keys after the query, which causal=True",
        ),
        ("alibi", {"causal": False, "slopes_after": "pape"}, "slope convention 'pape' is unknown"),
        (
            "alibi_ntk",
            {"slopes": (0.5, 0.0, 1, 1)},
            "AlibiNtk takes logarithms of slopes=.* must be above 0",
        ),
        (
            "kerple_power",
            {"exponent": 2.5},
            "option exponent=2.5 of position method 'kerple_power' must be above 0 and at most 2",
        ),
        (
            "sandwich",
            {"features": 7},
            "sandwich needs an even number of features, such as 128, and got 7",
        ),
        (
            "t5",
            {"causal": False, "num_buckets": 5},
            "with causal=False needs an even num_buckets >= 4",
        ),
        (
            "deberta",
            {"max_distance": -1},
            "max_distance=-1 .* must be at least 0 and at most 1,048,576",
        ),
        ("fox", {"causal": False}, "Fox needs causal=True"),
        ("rotary", {"bass": 3.0}, "has no option 'bass'; did you mean 'base'"),
        (
            "rotary",
            {"share": 0.0},
            "option share=0.0 of position method 'rotary' must be above 0 and at most 1",
        ),
        ("yarn", {"share": 0.3}, "share that makes whole pairs .* and got share=0.3"),
        (
            "rotary",
            {"share_of": "heads"},
            "share_of='heads' .* must be one of features, frequencies",
        ),
        (
            "rotary_ntk",
            {"factor": 0.5},
            "factor=0.5 .* must be at least 1",
        ),
        ("rotary_ntk", {"share": 0.25}, "rotary_ntk needs a head_dim of at least 4 and got 2"),
        (
            "yarn",
            {"slow": 32.0, "fast": 32.0},
            "slow < fast turns, such as 1 and 32, or fast=0 .* got slow=32.0, fast=32.0",
        ),
        ("yarn", {"base": 1.0}, "base=1.0 .* must be above 1"),
    ],
)
def test_options_that_are_refused(name: str, options: dict[str, object], message: str) -> None:
    assert_refused(message, make, name, **options)


def test_parameters_start_as_in_the_papers() -> None:
    key, many = (
        jax.random.key(0),
        {"num_heads": 2000, "head_dim": 8, "width": 16_000, "train_length": 16},
    )
    start = make_position("kerple_power", **many).init(key)
    logarithmic = make_position("kerple_log", **many).init(key)
    for of_heads, most in (
        (start["r1"], 1.0),
        (start["r2"], 2.0),
        (logarithmic["r1"], 2.0),
        (logarithmic["r2"], 1.0),
    ):
        assert (of_heads.min(), of_heads.max()) == pytest.approx((0.01, most), abs=0.01), "uniform"
        assert of_heads.mean() == pytest.approx(most / 2, abs=0.05)
    np.testing.assert_allclose(
        np.exp(make("alibi_learned").init(key)["log_slopes"]), PAPER, rtol=1e-6
    )
    fire, fox, shaw = (
        {**make(name).init(key), **make(name).init_layer(key)} for name in ("fire", "fox", "shaw")
    )
    assert (fire["c"], fire["threshold_multiple"]) == (np.float32(0.1), 1.0)
    assert fire["hidden_kernel"].shape == (32,)
    assert fox["kernel"].shape == (WIDTH, HEADS)
    np.testing.assert_array_equal(fox["bias"], 0.0)
    assert shaw["vectors"].shape == (2 * 16 + 1, HEAD_DIM)
    table = np.asarray(make("deberta").init(key)["table"])
    assert table.shape == (2 * TRAIN_LENGTH, WIDTH)
    assert table.std() == pytest.approx(0.02, rel=0.1)
    assert set(make("shaw", values=True).init_layer(key)) == {"vectors", "value_vectors"}


@pytest.mark.parametrize(
    ("rows", "columns", "first", "distances"),
    [(5, 7, -3, 4), (4, 4, 0, 1)],
)
def test_products_looked_up_on_a_tpu_are_those_elsewhere(rows, columns, first, distances):
    """On both sides, and with a single distance."""
    rng = np.random.default_rng(0)
    places = first + jnp.arange(columns)[None] - jnp.arange(rows)[:, None]
    given = jnp.asarray(rng.standard_normal((2, rows, distances), np.float32))
    incoming = jnp.asarray(rng.standard_normal((2, rows, columns), np.float32))

    @jax.jit
    def both(given, incoming):
        selected, back = jax.vjp(lambda x: products.selected_products(x, places), given)
        expected, of_expected = jax.vjp(
            lambda x: products.spread_products(x, places, distances), given
        )
        return (selected, *back(incoming)), (expected, *of_expected(incoming))

    (selected, gradient), (expected, of_expected) = both(given, incoming)
    np.testing.assert_array_equal(selected, expected)
    np.testing.assert_allclose(gradient, of_expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "distances", "lowest"),
    [
        (products.QueryProducts, 200, -150),
        (products.QueryProducts, 1, 0),
        (products.KeyProducts, 200, -150),
    ],
)
def test_products_of_consecutive_positions_are_those_of_any(
    kind, distances: int, lowest: int
) -> None:
    """Values and gradients; the first and the last vector serve beyond both ends."""
    rng, sides = np.random.default_rng(0), (np.arange(30) + 40, np.arange(50))
    tokens = rng.normal(size=(2, 30 if kind is products.QueryProducts else 50, 3, 8))
    vectors = rng.normal(size=(distances, 3, 8))
    plain = kind(jnp.asarray(tokens, jnp.float32), jnp.asarray(vectors, jnp.float32), lowest)
    in_order = plain.tabulated(*sides)
    assert (plain.in_order, in_order.in_order) == (False, True)

    @jax.jit
    def run(bias):
        whole, to_gradient = jax.vjp(lambda bias: bias(*map(jnp.asarray, sides)), bias)
        incoming = jax.random.normal(jax.random.key(1), whole.shape)
        return whole, jax.tree.leaves(to_gradient(incoming))

    expected, of_plain = run(plain)
    got, of_in_order = run(in_order)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    for one, other in zip(of_in_order, of_plain, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


def test_fires_hidden_units_are_never_those_of_all_pairs():
    """They are 32 floats a pair. The backward pass held four times as many when it took all rows at once."""
    method = make_position("fire", num_heads=2, head_dim=8, width=16, train_length=64)
    positions = jnp.arange(512)

    def total(params):
        return jnp.sin(method.bias(params)(positions, positions)).sum()

    step = jax.jit(jax.grad(total)).lower(method.init_layer(jax.random.key(0))).compile()
    assert step.memory_analysis().temp_size_in_bytes < 4 * 32 * (positions.size**2)
