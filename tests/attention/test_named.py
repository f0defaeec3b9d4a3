"""Any position method in Flax's layers by its name, and the modules that own its parameters."""

import functools

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alibi
from alibi.attention import AttentionOptions, method_attention_fn
from alibi.positions import PositionMethod
from tests.refusals import assert_refused

HEADS, WIDTH, LENGTH = 2, 8, 6
# One of each kind: a bias without and with parameters, turned queries and keys of other sizes, a bias
# by content, and data of tokens.
METHODS = ("alibi", "t5", "pope", "shaw", "selective_rope")
OWNING = ("t5", "pope", "shaw", "fox", "selective_rope")
READING = ("fox", "deberta", "selective_rope")  # the layer's input


def made(name: str, **changed: object) -> PositionMethod:
    sizes = {"num_heads": HEADS, "head_dim": WIDTH // HEADS, "width": WIDTH, "train_length": LENGTH}
    return alibi.make_position(name, **{**sizes, **changed})


def random_input(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def projected(params: dict, x: jax.Array) -> list[jax.Array]:
    return [
        jnp.einsum("bld,dhf->blhf", x, params[name]["kernel"]) for name in ("query", "key", "value")
    ]


def expected(params: dict, method: PositionMethod, x: jax.Array) -> jax.Array:
    """The layer by hand: projections, the method at positions 0, 1, ..., the output's projection."""
    positions = np.arange(x.shape[1])
    attention = method_attention_fn(
        method,
        params.get("position_params", {}),
        x,
        query_positions=positions,
        key_positions=positions,
        options=AttentionOptions(backend="reference"),
    )
    return jnp.einsum("blhf,hfd->bld", attention(*projected(params, x)), params["out"]["kernel"])


@pytest.mark.parametrize("name", METHODS)
def test_the_linen_module_and_the_closure(name: str) -> None:
    """The module equals the layer by hand; the closure equals it in Flax's own layer, with any
    number of batch dimensions.
    """
    module = alibi.linen.SelfAttention(num_heads=HEADS, position=name, train_length=LENGTH)
    x = random_input(1, 2, LENGTH, WIDTH)

    @jax.jit
    def results(x):
        params = module.init(jax.random.key(0), x)["params"]
        found = [module.apply({"params": params}, x)[0], expected(params, made(name), x[0])]
        found.append(module.apply({"params": params}, x[0, :1])[0])
        if name not in READING:
            how = {"params": params.get("position_params"), "train_length": LENGTH}
            attention = alibi.attention_fn(name, num_heads=HEADS, **how)
            layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention)
            own = {key: value for key, value in params.items() if key != "position_params"}
            found.append(layer.apply({"params": own}, x)[0])
        return params, found

    params, (got, want, alone, *closure) = results(x)
    assert params.keys() - {"position_params"} == {"query", "key", "value", "out"}, "Flax's names"
    assert ("position_params" in params) == (name in OWNING)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(alone, want[0], atol=1e-5)
    assert len(closure) == (name not in READING)
    np.testing.assert_allclose(closure, [want] * len(closure), atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "fox"])
def test_the_nnx_module_is_the_linen_module(name: str) -> None:
    layer = alibi.nnx.SelfAttention(
        HEADS, WIDTH, position=name, train_length=LENGTH, rngs=nnx.Rngs(0)
    )
    x = random_input(2, LENGTH, WIDTH)
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    linen = alibi.linen.SelfAttention(num_heads=HEADS, position=name, train_length=LENGTH)
    want = jax.jit(linen.apply)({"params": params}, x)

    def loss(layer: nnx.Module) -> tuple[jax.Array, jax.Array]:
        return (layer(x) ** 2).sum(), layer(x)

    slopes, got = nnx.jit(nnx.grad(loss, has_aux=True))(layer)
    np.testing.assert_allclose(got, want, atol=1e-6)
    slopes = nnx.to_pure_dict(slopes).get("position_params", {})
    assert slopes.keys() == params["position_params"].keys()
    assert all(np.abs(one).max() > 0 for one in jax.tree.leaves(slopes))


@pytest.mark.usefixtures("unchecked")
def test_the_same_from_bare_jax() -> None:
    """With lists in place of arrays too."""
    method = made("t5")
    params = alibi.position_params(method, jax.random.key(0))
    query, key, value = random_input(3, 1, LENGTH, HEADS, WIDTH // HEADS)

    def by(attention_of):
        """The result and the gradients of the parameters."""

        def scalar(params):
            attended = attention_of(params)(query, key, value)
            return (attended**2).sum(), attended

        return jax.jit(jax.grad(scalar, has_aux=True))(params)

    of_bias, by_bias = by(lambda params: functools.partial(alibi.attend, bias=method.bias(params)))
    of_closure, by_closure = by(lambda params: alibi.attention_fn(method, params=params))
    np.testing.assert_allclose(by_closure, by_bias, atol=1e-6)
    np.testing.assert_allclose(of_closure["table"], of_bias["table"], atol=1e-6)
    assert np.abs(of_bias["table"]).max() > 0
    given = {"table": params["table"].tolist()}
    named = alibi.attention_fn("t5", num_heads=HEADS, train_length=LENGTH, params=given)
    np.testing.assert_allclose(jax.jit(named)(query, key, value), by_bias, atol=1e-6)
    sides = [side.tolist() for side in (query, key, value)]
    listed = jax.jit(lambda: alibi.attend(*sides, bias=method.bias(params)))()
    np.testing.assert_allclose(listed, by_bias, atol=1e-6)


def test_a_cache_gives_what_the_whole_sequence_gives() -> None:
    x = random_input(2, LENGTH, WIDTH)
    whole = alibi.linen.SelfAttention(num_heads=HEADS, position="rotary", train_length=LENGTH)
    cached = whole.clone(decode=True)
    variables = jax.jit(cached.init)(jax.random.key(0), x)
    want = jax.jit(whole.apply)({"params": variables["params"]}, x)
    step = jax.jit(lambda variables, x: cached.apply(variables, x, mutable="cache"))
    for at in range(LENGTH):
        y, cache = step(variables, x[:, at : at + 1])
        variables = {**variables, **cache}
        np.testing.assert_allclose(y[:, 0], want[:, at], atol=1e-5)


def test_layers_take_flax_s_options() -> None:
    x = random_input(1, LENGTH, WIDTH)
    layer = alibi.linen.SelfAttention(
        HEADS, dropout_rate=0.5, dtype=jnp.bfloat16, position="rotary", options={"share": 0.5}
    )

    @jax.jit
    def dropped(seed):
        variables = layer.init(jax.random.key(0), x, deterministic=True)
        return layer.apply(
            variables, x, deterministic=False, rngs={"dropout": jax.random.key(seed)}
        )

    assert dropped(0).dtype == jnp.bfloat16
    assert (dropped(0) != dropped(1)).any()
    dropping = alibi.nnx.SelfAttention(HEADS, WIDTH, dropout_rate=0.5, rngs=nnx.Rngs(0))
    drop = nnx.jit(lambda layer: layer(x, deterministic=False))
    assert (drop(dropping) != drop(dropping)).any()


def test_masks_hide_keys_in_any_rank() -> None:
    x = random_input(2, 2, LENGTH, WIDTH)
    layer = alibi.linen.SelfAttention(num_heads=HEADS, position="t5", causal=False)
    variables, apply = jax.jit(layer.init)(jax.random.key(0), x), jax.jit(layer.apply)
    mask = np.ones((LENGTH, LENGTH), bool)
    mask[:, -1] = False
    want = apply(variables, x, mask=mask)
    changed = apply(variables, x.at[..., -1, :].add(1.0), mask=mask[None, None, None])
    np.testing.assert_allclose(changed[..., :-1, :], want[..., :-1, :], atol=1e-6)


@pytest.mark.parametrize("name", ["alibi", *READING])
def test_documents_of_a_packed_sequence_are_those_alone(name: str) -> None:
    """What a method keeps of tokens stops at the border too, which a mask can't tell it. In any number of
    batch dimensions.
    """
    x, segments = random_input(2, 1, LENGTH, WIDTH), jnp.asarray([0, 0, 0, 1, 1, 1])
    linen = alibi.linen.SelfAttention(num_heads=HEADS, position=name)
    variables, apply = jax.jit(linen.init)(jax.random.key(0), x), jax.jit(linen.apply)
    module = alibi.nnx.SelfAttention(HEADS, WIDTH, position=name, rngs=nnx.Rngs(0))
    for call in (functools.partial(apply, variables), nnx.jit(module)):
        packed = call(x, segment_ids=segments)
        for part in (slice(0, 3), slice(3, 6)):
            np.testing.assert_allclose(packed[:, :, part], call(x[:, :, part]), atol=1e-6)


def closure(position, **arguments):
    x = random_input(1, LENGTH, HEADS, WIDTH)
    return lambda: alibi.attention_fn(position, **arguments)(x, x, x)


def linen_layer(**fields):
    layer = alibi.linen.SelfAttention(**{"num_heads": HEADS} | fields)
    return lambda: layer.init(jax.random.key(0), random_input(1, LENGTH, WIDTH))


def nnx_layer(**arguments):
    make = functools.partial(alibi.nnx.SelfAttention, HEADS, WIDTH, **arguments)
    return lambda: make(rngs=nnx.Rngs(0))(random_input(1, LENGTH, WIDTH))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("use", "message"),
    [
        (closure("rotray", num_heads=2), "unknown position method 'rotray'; did you mean 'rotary'"),
        (closure("t5"), r"attention_fn\('t5'\) needs num_heads, the heads of the layer, such as 8"),
        (closure("t5", num_heads=2), r"'t5' has parameters \(table\); give params=, as alibi.pos"),
        (
            closure("learned", num_heads=2),
            "'learned' adds to the token embeddings, before the first",
        ),
        (
            closure("fox", num_heads=2),
            "'fox' reads the layer's input, which an attention_fn doesn't",
        ),
        (
            closure("t5", num_heads=2, params=[1]),
            r"'t5' needs params of shapes .* and got {'': \(1,",
        ),
        (
            closure("t5", num_heads=2, params={"tabel": jnp.zeros((2, 2))}),
            r"needs params of shapes {'table': \(32, 2\)}, .*{'tabel': \(2, 2",
        ),
        (closure("rotary", num_heads=2, options=["share"]), "must be a mapping of names to values"),
        (closure("rotary", num_heads=2, options={"shar": 1}), "no option 'shar'; did you mean 'sh"),
        (
            closure(made("t5"), params={}, options={"x": 1}),
            "options={'x': 1} are for a method by name; T5 is made",
        ),
        *(
            (
                closure(made("rotary"), **{key: value}),
                f"was made with {key}=.* got {key}={value}; give both",
            )
            for key, value in (("num_heads", 4), ("causal", False), ("train_length", 99))
        ),
        (closure(made("rotary")), "made for heads of 4 features, and the layer's have 8"),
        *(
            (
                linen_layer(position=name, decode=True),
                f"'{name}' keeps data of each token, which Flax's cache",
            )
            for name in READING
        ),
        *(
            (use, "num_heads=3 does not divide the 8 features of the layer")
            for use in (
                linen_layer(num_heads=3),
                lambda: alibi.nnx.SelfAttention(3, WIDTH, rngs=nnx.Rngs(0)),
            )
        ),
        (
            lambda: alibi.linen.SelfAttention(HEADS, decode=True).init(
                jax.random.key(0),
                random_input(1, LENGTH, WIDTH),
                segment_ids=jnp.zeros(LENGTH, int),
            ),
            "decode=True reads one document; leave segment_ids out",
        ),
        (
            lambda: alibi.linen.SelfAttention(HEADS).init(
                jax.random.key(0), random_input(1, LENGTH, WIDTH), segment_ids=[0, 1]
            ),
            r"segment_ids have shape \(2,\); the layer's input needs \(6,\) or \(1, 6\)",
        ),
        *(
            (
                layer(attention_fn=alibi.alibi_attention_fn(HEADS)),
                "SelfAttention makes its attention_fn by position=",
            )
            for layer in (linen_layer, nnx_layer)
        ),
        (nnx_layer(position="learned"), "adds to the token embeddings"),
        (
            nnx_layer(position="deberta", num_kv_heads=1),
            "needs keys of each head, and the layer has 1 heads of",
        ),
    ],
)
def test_wrong_uses_are_a_line(use, message: str) -> None:
    assert_refused(message, use)


@pytest.mark.parametrize("causal", [True, False])
def test_a_made_method_sees_as_much_as_the_argument_says(causal: bool) -> None:
    """And a call with is_causal=True sees no later key, whatever the closure says."""
    attention = alibi.attention_fn(made("rotary", causal=causal), causal=causal)
    x = random_input(1, LENGTH, HEADS, WIDTH // HEADS)
    changed = x.at[:, -1].add(1.0)
    for keywords, sees in (({}, not causal), ({"is_causal": True}, False)):
        change = attention(x, x, changed, **keywords) - attention(x, x, x, **keywords)
        assert bool(jnp.abs(change[:, 0]).max() > 1e-3) == sees


def test_a_layer_is_a_static_argument() -> None:
    """As Flax's own: it has a hash, also with options in lists."""
    one, same, other = (
        alibi.linen.SelfAttention(HEADS, options={"slopes": slopes})
        for slopes in ([0.5, 0.25], (0.5, 0.25), [0.5, 0.5])
    )
    assert (hash(one), one) == (hash(same), same)
    assert one != other


@pytest.mark.parametrize("position", ["rotary", "alibi"])
def test_each_sequence_of_two_batch_dimensions_has_its_offset(position: str) -> None:
    query, key, value = (random_input(2, 3, count, HEADS, 8) for count in (2, 7, 7))
    offsets = np.arange(6).reshape(2, 3) % 5
    attention = functools.partial(alibi.attention_fn, position, num_heads=HEADS)
    together = attention(query_offset=jnp.asarray(offsets))
    alone = {place: attention(query_offset=int(offsets[place])) for place in ((0, 1), (1, 2))}

    @jax.jit
    def results(*arrays: jax.Array) -> tuple[jax.Array, dict]:
        singles = {at: one(*(x[at][None] for x in arrays))[0] for at, one in alone.items()}
        return together(*arrays), singles

    found, expected = results(query, key, value)
    for place, one in expected.items():
        np.testing.assert_allclose(found[place], one, atol=1e-6)


def test_a_length_in_place_of_positions() -> None:
    want = alibi.alibi_bias(HEADS, jnp.arange(5), jnp.arange(5))
    np.testing.assert_array_equal(alibi.alibi_bias(HEADS, 5), want)
    np.testing.assert_array_equal(alibi.alibi_bias(HEADS, [3, 4], [0, 1, 2, 3, 4]), want[:, 3:])
    assert_refused("key positions.*length", alibi.alibi_bias, HEADS, 0)
    slopes = alibi.alibi_slopes(HEADS)
    np.testing.assert_array_equal(alibi.alibi_slopes(HEADS, slopes), slopes)
