"""The decoder with each position method: causal, decodable, indifferent to padding, and precise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from alibi.attention import tiles
from alibi.attention.backends import compute
from alibi.attention.dispatch import watched
from alibi.config import MeshConfig
from alibi.errors import UserError
from alibi.model.decoder import DecoderLM, build_model
from alibi.model.layers import stacked
from alibi.model.positions import randomised_positions
from alibi.parallel.sharding import make_mesh
from tests.model.made import VOCABULARY, changed, make, tokens
from tests.programs import AS_USERS
from tests.refusals import assert_refused


def test_padding_does_not_move_positions(tiny_config) -> None:
    """Those of the embedding; `check_position_method` has those of attention."""
    model, variables = make(tiny_config, "sinusoidal")
    inputs = tokens(8)
    apply = jax.jit(model.apply)
    alone = apply(variables, inputs)
    padding = jnp.zeros((2, 4), jnp.int32)
    real, pad = jnp.ones((2, 8), jnp.int32), jnp.zeros((2, 4), jnp.int32)
    right = apply(
        variables,
        jnp.concatenate([inputs, padding], 1),
        segment_ids=jnp.concatenate([real, pad], 1),
    )
    left = apply(
        variables,
        jnp.concatenate([padding, inputs], 1),
        positions=jnp.maximum(jnp.arange(12) - 4, 0),
        segment_ids=jnp.concatenate([pad, real], 1),
    )
    np.testing.assert_allclose(right[:, :8], alone, atol=2e-5)
    np.testing.assert_allclose(left[:, 4:], alone, atol=2e-5)


def test_a_model_tells_its_method_how_long_the_sequences_are(tiny_config) -> None:
    """At 2.5 L a dynamic method equals the method with options for 2.5 L; a silent fallback is the
    plain method.
    """
    model, variables = make(tiny_config, "yarn")
    known = build_model(tiny_config(position="yarn", position_options__factor=2.5), VOCABULARY)
    plain = build_model(tiny_config(position="rotary"), VOCABULARY)
    logits, expected, silent = (
        jax.jit(one.apply)(variables, tokens(40)) for one in (model, known, plain)
    )
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    assert np.abs(logits - silent).max() > 1e-3


def test_explicit_axes_are_refused_with_the_call_that_works(tiny_config) -> None:
    """Whole arrays need no call of another kind."""
    model, variables = make(tiny_config, "t5")

    def gradient(apply, inputs):
        """Of the mean square of the logits."""
        return jax.jit(jax.grad(lambda variables: (apply(variables, inputs) ** 2).mean()))(
            variables
        )

    expected = jax.jit(model.apply)(variables, tokens(8))
    slopes = gradient(model.apply, tokens(8))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(model.apply)(variables, tokens(8)), expected, atol=1e-5)
        split = jax.reshard(tokens(8), P("data", None))
        halves = jax.tree.map(lambda x: jax.reshard(x, P("data")) if x.ndim == 1 else x, variables)
        for given in ((variables, split), (halves, tokens(8))):
            with pytest.raises(ValueError, match=r"axes of a mesh.* call jax\.sharding\.auto_axes"):
                jax.jit(model.apply)(*given)
        apply = jax.sharding.auto_axes(model.apply, out_sharding=P("data"))
        np.testing.assert_allclose(jax.jit(apply)(variables, split), expected, atol=1e-5)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
            gradient(apply, split),
            slopes,
        )
        assert_refused(
            "train it outside that context", lambda: make_mesh(MeshConfig()), raised=UserError
        )


def test_drawn_positions_take_the_fast_way_of_whole_sequences(tiny_config) -> None:
    """Drawn positions rise with the tokens and need no mask of their own; positions from a caller
    may need it.
    """
    inputs, rngs = tokens(12), {"dropout": jax.random.key(0)}
    plain, variables = make(tiny_config, "rotary")
    # In evaluation they are evenly spread: of N = 256, the i-th of n, from 1, is at i (N + 1) / (n
    # + 1).
    placed = (np.arange(12) + 1) * 257 // 13 - 1
    expected = jax.jit(plain.apply)(variables, inputs, positions=placed)
    found = []
    for attention in ("saved", "reference"):
        keys = {"model__max_position": 256, "model__attention": attention, "model__dropout": 0.1}
        model = build_model(tiny_config(position="rotary", **keys), VOCABULARY)
        np.testing.assert_allclose(jax.jit(model.apply)(variables, inputs), expected, atol=2e-5)
        drawing = jax.jit(functools.partial(model.apply, deterministic=False))
        found.append(drawing(variables, inputs, rngs=rngs))
        # dropout and draws do act
        assert np.abs(found[-1] - expected).max() > 0.1
    np.testing.assert_allclose(*found, atol=2e-5)
    assert_refused("max_position=256.* 257", lambda: model.apply(variables, tokens(257)))


def test_layers_draw_positions_of_their_own(tiny_config) -> None:
    """With a seed for tests and in training, one by one and in a loop."""
    keys = {"model__num_layers": 2, "model__max_position": 64}
    drawing = keys | {"model__layer_draws": True, "model__test_draws": 3}
    model, variables = make(tiny_config, "rotary", **drawing)
    inputs, seen = tokens(12), list[jax.Array]()

    def positions(variables: dict) -> jax.Array:
        with watched(lambda call: seen.append(call.key_positions)):
            model.apply(variables, inputs)
        return jnp.stack(seen)

    expected = [
        randomised_positions(12, model.config, 2, None, depth)(np.arange(12)) for depth in range(2)
    ]
    np.testing.assert_array_equal(jax.jit(positions)(variables), expected)
    scanned, shared = (
        changed(model, scan_layers=True, remat=True),
        changed(model, layer_draws=False),
    )
    in_loop = {"params": stacked(variables["params"])}
    for training in (False, True):
        options = {"rngs": {"dropout": jax.random.key(0)}, "deterministic": not training}
        logits, looped, other = (
            jax.jit(functools.partial(one.apply, **options))(given, inputs)
            for one, given in ((model, variables), (scanned, in_loop), (shared, variables))
        )
        np.testing.assert_allclose(looped, logits, atol=2e-5)
        assert np.abs(other - logits).max() > 1e-3


def test_one_model_at_many_lengths(tiny_config) -> None:
    """A table or bias kept from a shorter call would silently give wrong values at longer lengths."""
    small = {"model__num_layers": 1, "model__num_heads": 1}
    model, variables = make(tiny_config, "t5", **small)
    apply = jax.jit(model.apply)
    inputs = tokens(1025, batch=1)
    for length in (512, 1025):
        # Dense attention of a new model, which has seen no other length.
        fresh = build_model(
            tiny_config(position="t5", **small, model__attention="reference"), VOCABULARY
        )
        alone = jax.jit(lambda x, fresh=fresh: fresh.apply(variables, x))(inputs[:, :length])
        np.testing.assert_allclose(
            apply(variables, inputs[:, :length]), alone, atol=2e-5, err_msg=str(length)
        )


def test_bf16_logits_stay_near_float32_at_8k_tokens(tiny_config) -> None:
    """A bias or softmax in bf16 loses the order of far keys: the shift form of the bias is off by 0.04,
    the products alone by 0.02.
    """
    small = {"model__width": 32, "model__num_heads": 1, "model__attention": "blocked"}
    logits, inputs = {}, tokens(1024, batch=1)
    for dtype in ("float32", "bfloat16"):
        model, variables = make(tiny_config, "alibi", model__dtype=dtype, **small)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(variables))
        last = functools.partial(model.apply, positions=7168 + np.arange(1024))
        logits[dtype] = jax.jit(last)(variables, inputs)
    assert logits["bfloat16"].dtype == jnp.float32
    assert float(jnp.abs(logits["float32"]).max()) > 1.0, "the tolerance is relative to this"
    assert float(jnp.abs(logits["bfloat16"] - logits["float32"]).max()) < 0.03


def test_the_bias_stays_float32_when_all_parameters_are_cast_to_bf16(tiny_config) -> None:
    """Casting a whole model is common; in bf16, neighbours beyond 256 tokens would get the same
    bias.
    """
    model, variables = make(tiny_config, "alibi", model__dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables["params"])
    bias = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.pattern[0].position.bias({}))
    keys = np.arange(30_000, 40_001)
    block = bias(jnp.asarray([40_000]), jnp.asarray(keys))
    assert block.dtype == jnp.float32
    # Slopes 2^-4 and 2^-8 of 2 heads are exact in bf16, distances in float32.
    np.testing.assert_array_equal(
        block, -np.asarray([2.0**-4, 2.0**-8])[:, None, None] * (40_000 - keys)
    )
    assert jax.jit(model.apply)({"params": params}, tokens(12)).dtype == jnp.float32


@pytest.mark.slow
def test_a_training_step_of_16k_tokens_keeps_no_logits(tiny_config) -> None:
    """Those of a single one of its 4 heads are a GiB."""
    model = build_model(tiny_config(model__width=32, model__num_heads=4), 64)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens(4))["params"]
    inputs = jax.ShapeDtypeStruct((1, 16_384), jnp.int32)

    def loss(params: dict, inputs: jax.Array) -> jax.Array:
        return model.apply({"params": params}, inputs, inputs, method="token_nll").sum()

    step = jax.jit(jax.value_and_grad(loss)).lower(params, inputs)
    memory = step.compile(compiler_options=AS_USERS).memory_analysis()
    assert memory.temp_size_in_bytes < 256 * 2**20


def test_skip_epsilon_reaches_attention(tiny_config, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of 8 by 8, a single head at a time."""
    monkeypatch.setattr(tiles, "BLOCK", 8)
    monkeypatch.setattr(tiles, "TILE_WEIGHTS", 64)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    exact, variables = make(tiny_config, "alibi", model__attention="blocked")
    rough = changed(exact, skip_epsilon=0.5)
    inputs = tokens(256, batch=1)
    exact, rough = (jax.jit(model.apply)(variables, inputs) for model in (exact, rough))
    assert 0 < jnp.abs(exact - rough).max() < 0.1


def test_plain_products_are_the_same_and_differentiable_in_forward_mode(tiny_config) -> None:
    keys = {"model__embedding": "adaptive", "model__cutoffs": "10:20", "model__adaptive_factor": 2}
    model, variables = make(tiny_config, "alibi", **keys)
    inputs = tokens(12)

    def loss(params: dict, model: DecoderLM) -> jax.Array:
        return model.apply({"params": params}, inputs, inputs, method="token_nll").sum()

    params = variables["params"]
    direction = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), params
    )
    value, gradient = jax.jit(jax.value_and_grad(lambda params: loss(params, model)))(params)
    plain = changed(model, products="plain")
    tangent = jax.jit(
        lambda params, direction: jax.jvp(lambda p: loss(p, plain), (params,), (direction,))
    )
    got, along = tangent(params, direction)
    expected = sum(
        jnp.vdot(g, d)
        for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    )
    np.testing.assert_allclose(got, value, rtol=1e-6)
    np.testing.assert_allclose(along, expected, rtol=1e-4)


def test_a_layer_that_is_recomputed_knows_slopes_and_positions_too(
    tiny_config, monkeypatch
) -> None:
    """Without them attention takes the slow backends, and skips nothing."""
    known = []

    def spy(call, backend):
        known.append((call.known_slopes is not None, call.known_positions is not None, backend))
        return compute(call, backend)

    monkeypatch.setattr("alibi.attention.dispatch.compute", spy)
    for remat in (False, True):
        model, variables = make(tiny_config, "alibi", model__remat=remat)
        jax.eval_shape(
            lambda params, model=model: model.apply({"params": params}, tokens(12)),
            variables["params"],
        )
    assert set(known) == {(True, True, "saved")}


def test_each_dropout_acts(tiny_config) -> None:
    model, variables = make(tiny_config, "alibi")
    inputs = tokens(12)
    still = jax.jit(model.apply)(variables, inputs)
    for rate in ("dropout", "attention_dropout", "activation_dropout"):
        apply = jax.jit(functools.partial(changed(model, **{rate: 0.5}).apply, deterministic=False))
        dropped = apply(variables, inputs, rngs={"dropout": jax.random.key(1)})
        assert float(jnp.abs(dropped - still).max()) > 1e-3, rate


@pytest.mark.parametrize(
    ("position", "packed", "window"),
    [
        ("alibi", True, 0),
        ("rotary", False, 4),
    ],
)
def test_the_last_positions_alone_equal_those_of_all(
    tiny_config, position: str, packed: bool, window: int
) -> None:
    """Fewer queries than keys in the last layer: an offset wrong by 1 would show."""
    model, variables = make(tiny_config, position, model__window=window)
    inputs, targets = tokens(12), tokens(12) % 7
    segments = {"segment_ids": jnp.repeat(jnp.arange(2), 6)[None].repeat(2, 0)} if packed else {}

    @jax.jit
    def both(variables: dict) -> list[jax.Array]:
        some = (targets, targets[:, -5:])
        return [
            model.apply(variables, inputs, part, **segments, method="token_nll") for part in some
        ]

    every, last = both(variables)
    np.testing.assert_allclose(last, every[:, -5:], atol=1e-5)
