"""Cross attention: each way in which position enters equals a formula in float64, in values and
gradients; a kept source gives what the whole target gives.
"""

import functools

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alibi
from alibi.positions.t5 import causal_buckets
from tests.attention.calls import check_derivatives
from tests.refusals import assert_refused

HEADS, WIDTH, SOURCE_WIDTH, QUERIES, KEYS = 4, 8, 6, 5, 9
RATE = 1.5
PLACES = np.asarray([0, 2, 3, 5, 6])  # 1.5 i, halves rounded up
SLOPES = 2.0 ** (-2 * np.arange(1, HEADS + 1))  # of the paper, for 4 heads
TABLE = {"num_buckets": 4, "max_distance": 6}
WAYS = [
    *((sides, "alibi", {}) for sides in ("none", "symmetric", "two_sided", "half")),
    ("two_sided", "alibi", {"slopes_after": (0.5, 0.0, 0.25, 1.0)}),
    ("two_sided", "t5", TABLE),
    ("two_sided", "kerple_log", {}),
]


def layer_of(sides, position, options, **fields):
    position = None if sides == "none" else position
    named = {"sides": sides, "position": position, "options": options, "rate": RATE}
    return alibi.linen.CrossAttention(HEADS, **{"backend": "reference", **named, **fields})


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


TARGET = jnp.asarray(random(2, QUERIES, WIDTH))
SOURCE = jnp.asarray(random(2, KEYS, SOURCE_WIDTH, seed=1))
TARGET_MASK = np.asarray([[True] * 5, [True] * 3 + [False] * 2])
SOURCE_MASK = np.asarray([[True] * 7 + [False] * 2, [True] * 9])


def bias(sides, position, options, params, distance):
    """The bias `[heads, q, k]` and where a head may look, from the formulas of the papers."""
    far, after = np.abs(distance), distance < 0
    if position == "t5":  # two buckets for each side
        return params["table"].T[:, causal_buckets(2, 6)[np.minimum(far, 6)] + 2 * after]
    if position == "kerple_log":
        r1, r2 = (params[name][:, None, None] for name in ("r1", "r2"))
        one = -r1 * np.log(1 + r2 * far)
    else:
        one = -np.asarray([2.0**-4, 2.0**-8] if sides == "half" else SLOPES)[:, None, None] * far
    if "slopes_after" in options:
        return np.where(after, -np.asarray(options["slopes_after"])[:, None, None] * far, one)
    return np.where(after, one[::-1], one) if sides == "two_sided" else one


def formula(sides, position, options, params, target, source):
    """The layer in NumPy's float64."""
    query, key, value = (
        np.einsum("bld,dhf->bhlf", x, params[name]["kernel"]) + params[name]["bias"][:, None]
        for x, name in ((target, "query"), (source, "key"), (source, "value"))
    )
    logits = query @ key.swapaxes(2, 3) / np.sqrt(query.shape[-1])
    distance = PLACES[:, None] - np.arange(KEYS)
    seen = TARGET_MASK[:, None, :, None] & SOURCE_MASK[:, None, None, :]
    if sides != "none":
        added = bias(sides, position, options, params.get("position_params"), distance)
        logits = logits + (np.concatenate([added, added]) if sides == "half" else added)
    if sides == "half":
        seen = seen & np.repeat([distance >= 0, distance <= 0], HEADS // 2, axis=0)
    exponentials = np.where(seen, np.exp(logits), 0.0)
    total = exponentials.sum(-1, keepdims=True)
    weights = exponentials / np.where(total == 0, 1, total)
    out = np.einsum("bhlf,hfd->bld", weights @ value, params["out"]["kernel"])
    return out + params["out"]["bias"]


@pytest.mark.parametrize(("sides", "position", "options"), WAYS)
def test_values_and_gradients_are_those_of_the_formula(sides, position, options):
    """With padding on both sides, and two target tokens for three of the source. The gradient of
    each array is compared along a random direction with differences of the formula.
    """
    layer = layer_of(sides, position, options)
    masks = {"target_mask": TARGET_MASK, "source_mask": SOURCE_MASK}

    @jax.jit
    def computed(key):
        params = layer.init(key, TARGET, SOURCE)["params"]

        def scalar(params, target, source):
            out = layer.apply({"params": params}, target, source, **masks)
            return (out * random(*out.shape, seed=2)).sum(), out

        grads, out = jax.grad(scalar, argnums=(0, 1, 2), has_aux=True)(params, TARGET, SOURCE)
        return (params, TARGET, SOURCE), grads, out

    arrays, grads, out = computed(jax.random.key(0))
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: np.asarray(x, np.float64), arrays))
    want = formula(sides, position, options, *tree.unflatten(leaves))
    np.testing.assert_allclose(out, want, atol=2e-6)
    incoming = random(*want.shape, seed=2)

    def product(given):
        return (formula(sides, position, options, *tree.unflatten(given.values())) * incoming).sum()

    check_derivatives(product, dict(enumerate(leaves)), dict(enumerate(jax.tree.leaves(grads))))


@pytest.mark.parametrize(("sides", "position"), [("two_sided", "t5"), ("half", "alibi")])
def test_the_nnx_module_is_the_linen_module(sides, position):
    options = TABLE if position == "t5" else {}
    layer = alibi.nnx.CrossAttention(
        HEADS,
        WIDTH,
        in_kv_features=SOURCE_WIDTH,
        sides=sides,
        position=position,
        options=options,
        rate=RATE,
        rngs=nnx.Rngs(0),
    )
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    masks = {"target_mask": TARGET_MASK, "source_mask": SOURCE_MASK}
    got = nnx.jit(lambda layer: layer(TARGET, SOURCE, **masks))(layer)
    np.testing.assert_allclose(
        got, formula(sides, position, options, params, TARGET, SOURCE), atol=2e-6
    )


def test_a_kept_source_gives_what_the_whole_target_gives():
    """Token by token, and two at once, with the source and its padding in the first call alone."""
    layer = layer_of("two_sided", "alibi", {}, backend="auto")
    params = jax.jit(layer.init)(jax.random.key(0), TARGET, SOURCE)
    whole = jax.jit(layer.apply)(params, TARGET, SOURCE, source_mask=SOURCE_MASK)
    decoding = layer.clone(decode=True)
    begun = jax.jit(functools.partial(decoding.apply, mutable="cache"))
    got, cache = begun(params, TARGET[:, :1], SOURCE, source_mask=SOURCE_MASK)
    parts = [got]
    step = jax.jit(lambda cache, x: decoding.apply({**params, **cache}, x, mutable="cache"))
    for start, stop in ((1, 2), (2, 4), (4, 5)):
        got, cache = step(cache, TARGET[:, start:stop])
        parts.append(got)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-6)

    own = alibi.nnx.CrossAttention(
        HEADS, WIDTH, in_kv_features=SOURCE_WIDTH, sides="two_sided", rate=RATE, rngs=nnx.Rngs(0)
    )
    every = nnx.jit(lambda layer, *x, **masks: layer(*x, **masks))
    whole = every(own, TARGET, SOURCE, source_mask=SOURCE_MASK)
    step = nnx.jit(lambda layer, *x, **masks: layer(*x, **masks, decode=True))
    parts = [step(own, TARGET[:, :1], SOURCE, source_mask=SOURCE_MASK)]
    parts += [step(own, TARGET[:, at : at + 1]) for at in range(1, QUERIES)]
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-6)
    # Its tokens would stand at 0 again, and not where they are in the target.
    assert_refused("cache holds one", own, TARGET[:, :1], SOURCE, decode=True)
    own.source = nnx.data(None)
    step(own, TARGET[:, :1], SOURCE)
    np.testing.assert_allclose(
        step(own, TARGET[:, 1:2]), every(own, TARGET, SOURCE)[:, 1:2], atol=2e-6
    )


def test_positions_of_queries_may_be_given():
    """A part of the target at its own positions is that part of the whole, for each sequence."""
    layer = layer_of("two_sided", "alibi", {})
    params = jax.jit(layer.init)(jax.random.key(0), TARGET, SOURCE)
    apply = jax.jit(layer.apply)
    whole = apply(params, TARGET, SOURCE)
    positions = np.asarray([[1, 2], [3, 0]])
    part = np.take_along_axis(TARGET, positions[..., None], axis=1)
    got = apply(params, part, SOURCE, query_positions=positions)
    np.testing.assert_allclose(
        got, np.take_along_axis(np.asarray(whole), positions[..., None], axis=1), atol=2e-6
    )


def test_masks_and_weights_are_those_of_each_head():
    """Flax's mask of all pairs hides as padding does; half of the heads each way sow all weights."""
    layer = layer_of("half", "alibi", {})
    params = jax.jit(layer.init)(jax.random.key(0), TARGET, SOURCE)
    apply = jax.jit(layer.apply)
    padded = apply(params, TARGET, SOURCE, target_mask=TARGET_MASK, source_mask=SOURCE_MASK)
    mask = nn.make_attention_mask(TARGET_MASK, SOURCE_MASK)
    sowing = functools.partial(layer.apply, sow_weights=True, mutable="intermediates")
    got, sown = jax.jit(sowing)(params, TARGET, SOURCE, mask=mask)
    np.testing.assert_allclose(got, padded, atol=1e-6)
    (weights,) = sown["intermediates"]["attention_weights"]
    assert weights.shape == (2, HEADS, QUERIES, KEYS)
    ahead = np.arange(KEYS) > PLACES[:, None]
    assert not np.asarray(weights)[:, :2, ahead].any()
    assert not np.asarray(weights)[:, 2:, np.arange(KEYS) < PLACES[:, None]].any()
    by_head = np.broadcast_to(mask, (2, HEADS, QUERIES, KEYS))
    np.testing.assert_allclose(apply(params, TARGET, SOURCE, mask=by_head), padded, atol=1e-6)


def test_a_source_beyond_a_tile_skips_keys_out_of_reach():
    """`blocked` gives what the formula in one piece gives, each half of the heads too."""
    target, source = random(1, 600, WIDTH), random(1, 1100, SOURCE_WIDTH, seed=1)
    for sides in ("two_sided", "half"):
        layers = [
            layer_of(sides, "alibi", {}).clone(backend=backend)
            for backend in ("blocked", "reference")
        ]
        params = jax.jit(layers[0].init)(jax.random.key(0), target[:, :2], source[:, :2])
        got, want = (jax.jit(layer.apply)(params, target, source) for layer in layers)
        np.testing.assert_allclose(got, want, atol=1e-5)


def outputs(sides, position, options):
    """The outputs for a source and its mirror image: random models with an encoder of two layers."""
    encoders = [
        alibi.linen.SelfAttention(HEADS, causal=False, position=position, options=options)
        for _ in range(2)
    ]
    cross = alibi.linen.CrossAttention(HEADS, sides=sides)
    source, target = (jnp.asarray(random(1, n, WIDTH, seed=n)) for n in (12, 4))

    @jax.jit
    def read(source, target):
        for number, encoder in enumerate(encoders):
            source = source + encoder.init_with_output(jax.random.key(number), source)[0]
        return cross.init_with_output(jax.random.key(9), target, source)[0]

    return read(source, target), read(source[:, ::-1], target)


@pytest.mark.parametrize(
    ("sides", "position", "options", "tells"),
    [
        ("none", "alibi", {}, False),
        ("none", "alibi", {"slopes_after": tuple(SLOPES[::-1])}, True),
        ("none", "t5", {}, True),
        ("half", "alibi", {}, True),
    ],
)
def test_what_tells_a_source_from_its_mirror_image(sides, position, options, tells):
    """Symmetric ALiBi and unbiased cross attention do not: features are the same, in another order."""
    one, mirrored = outputs(sides, position, options)
    change = float(jnp.abs(one - mirrored).max())
    assert change > 0.01 if tells else change < 5e-6


def use(sides="symmetric", source=SOURCE, masks=(), **fields):
    fields = {"num_heads": HEADS, "sides": sides} | fields
    layer = functools.partial(alibi.linen.CrossAttention, **fields)
    return lambda: layer().init(jax.random.key(0), TARGET, source, **dict(masks))


def use_nnx(**arguments):
    return lambda: alibi.nnx.CrossAttention(HEADS, WIDTH, rngs=nnx.Rngs(0), **arguments)(TARGET)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (use("both"), "sides='both' is unknown; use none, symmetric, two_sided, half"),
        (use("half", num_heads=1), "num_heads=1 is odd; use an even number, or sides='two_sided'"),
        *(
            (use(position=name), "no distance bias alone.* use alibi, t5")
            for name in ("rotary", "fox", "fire", "learned")
        ),
        *(
            (use(rate=rate), f"rate={rate!r} must be from 0.001 to 1,000: the source tokens")
            for rate in (0, -1.0, 6e-4, "2")
        ),
        (
            use("none", position="t5"),
            "position='t5', options=None need sides, such as sides='two_sid",
        ),
        (
            use("half", options={"slopes_after": (1.0, 1.0)}),
            "slopes_after is for sides='two_sided'",
        ),
        (use(masks={"source_mask": np.ones((3, 9), bool)}), r"source_mask has shape \(3, 9\)"),
        (use(num_heads=3), "num_heads=3 does not divide the 8 features"),
        (
            use(attention_fn=alibi.alibi_attention_fn(4)),
            "CrossAttention makes its attention_fn by sides=",
        ),
        (use(source=None), "got no source; give it, or set decode=True to keep that of the first"),
        (use(source=None, decode=True), "its cache holds none; give the source in the first call"),
        (use_nnx(), "got no source; give it, or set decode=True"),
        (use_nnx(decode=True), "its cache holds none; give the source in the first call"),
        (use_nnx(sides="both"), "sides='both' is unknown"),
        (
            use(masks={"source_mask": TARGET_MASK}),
            r"source_mask has shape \(2, 5\); it must be \[2, 9\], True for tok",
        ),
        (
            use(masks={"target_mask": SOURCE_MASK}),
            r"target_mask has shape \(2, 9\); it must be \[2, 5\], True for tok",
        ),
    ],
)
def test_a_mistake_is_a_line(call, message):
    assert_refused(message, call)
