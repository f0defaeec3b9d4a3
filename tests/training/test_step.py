"""An update: the gradient of the mean token NLL, however it is split over devices and
micro-batches.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alibi.attention import AttentionOptions
from alibi.config import Config
from alibi.model.decoder import build_model, param_shapes
from alibi.parallel.sharding import batch_sharding, laid_out, make_mesh, tree_shardings
from alibi.positions import METHODS, PositionMethod, make_position
from alibi.runs.checkpoint import TrainState
from alibi.testing.samples import attend, inputs_of, params_of
from alibi.training.step import abstract_state, initial_state, make_train_step
from tests.programs import AS_USERS

VOCABULARY = 48


def updated(config: Config, devices: int, micro_batches: int) -> tuple[TrainState, dict]:
    """Returns the state after an SGD update on 16 sequences, the last of them short."""
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    model = build_model(config, VOCABULARY, sharding=batch_sharding(mesh))
    # SGD, since Adam turns the rounding errors of gradients that are zero into whole steps.
    optimizer = optax.sgd(0.5)
    state = initial_state(model, optimizer, mesh, seed=0)
    tokens = np.random.default_rng(0).integers(
        0, VOCABULARY, (16, config.train_length + 1), dtype=np.int32
    )
    inputs, targets = tokens[:, :-1], tokens[:, 1:].copy()
    # one word of the last band of adaptive embeddings, and padding
    targets[0], targets[-1, 5:] = 40, -1
    shape = (micro_batches, 16 // micro_batches, config.train_length)
    batch = [
        jax.device_put(x.reshape(shape), batch_sharding(mesh, leading=1)) for x in (inputs, targets)
    ]
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = make_train_step(
        model, optimizer, seed=0, state_shardings=shardings, gather=config.mesh.gather
    )
    return step(state, *batch)


ADAPTIVE = {"model__embedding": "adaptive", "model__cutoffs": (16, 32), "model__adaptive_factor": 2}
DRAWING = {"position": "learned", "model__max_position": 24, "model__layer_draws": True}
DROPPING = ADAPTIVE | DRAWING | {"model__softmax_dropout": 0.5, "model__logits_chunk": 16}


@pytest.mark.parametrize(
    ("keys", "micro_batches"),
    [({"model__logits_chunk": 16}, 4), (DROPPING, 1), ({"mesh__gather": "update"}, 2)],
)
def test_one_device_against_four(
    tiny_config, keys: dict, micro_batches: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A lost head offset or chunk of the loss, or a mean of means of devices or micro-batches instead
    of tokens, would show here. XLA warns where it has to gather a split array whole on every device.
    Its estimates of costs, whose parameters are fake, warn too; JAX 0.12 and 0.10 compile the same
    collectives.
    """
    alone, metrics = updated(
        tiny_config(mesh__data=1, model__num_layers=1, **keys), devices=1, micro_batches=1
    )
    assert float(metrics["tokens"]) == 15 * 16 + 5
    config = tiny_config(mesh__data=1, mesh__fsdp=2, mesh__tensor=2, model__num_layers=1, **keys)
    split, split_metrics = updated(config, devices=4, micro_batches=micro_batches)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), split.params, alone.params
    )
    for name, value in metrics.items():
        np.testing.assert_allclose(split_metrics[name], value, rtol=1e-5)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "rematerialization" in line]
    assert not [line for line in warnings if "%fake_parameter" not in line]


def test_the_update_is_that_of_the_mean_token_nll(tiny_config) -> None:
    """In four micro-batches; the last has fewer tokens."""
    config = tiny_config(mesh__data=1, model__num_layers=1)
    state, metrics = updated(config, devices=1, micro_batches=4)
    model = build_model(config, VOCABULARY)
    params = initial_state(
        model, optax.sgd(0.5), make_mesh(config.mesh, jax.devices()[:1]), seed=0
    ).params
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (16, 17), dtype=np.int32))

    def mean_nll(params: dict) -> jax.Array:
        log_probs = jax.nn.log_softmax(model.apply({"params": params}, tokens[:, :-1]))
        nll = -jnp.take_along_axis(log_probs, tokens[:, 1:, None].at[0].set(40), axis=-1)[..., 0]
        scored = jnp.ones_like(nll).at[-1, 5:].set(0.0)
        return (nll * scored).sum() / scored.sum()

    params = jax.device_get(params)
    value, gradient = jax.device_get(jax.jit(jax.value_and_grad(mean_nll))(params))
    np.testing.assert_allclose(metrics["nll_nats"] / metrics["tokens"], value, rtol=1e-5)
    norm = np.linalg.norm(np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient)]))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, expected)


def made(name: str) -> PositionMethod:
    return make_position(name, num_heads=4, head_dim=8, width=32, train_length=16)


def learns(name: str) -> bool:
    # shapes alone: at this time all workers would compile the same programs
    methods = made(name).init, made(name).init_layer
    return any(jax.eval_shape(lambda: [make(jax.random.key(0)) for make in methods]))


@pytest.mark.parametrize("position", [name for name in METHODS if learns(name)])
def test_learned_positions_learn(position: str) -> None:
    """A bias that is no parameter, or that starts at zero times zero, never moves (NeMo's KERPLE)."""
    method = made(position)

    @jax.jit
    def gradients() -> dict:
        def loss(params: dict) -> jax.Array:
            inputs = inputs_of(method, 16)
            x = method.embed(params, inputs["x"], np.arange(16))
            # embedded positions reach attention through the projections
            inputs |= {"x": x, "query": inputs["query"] + x.reshape(2, 16, 4, 8)}
            return jnp.sin(3.0 * attend(method, AttentionOptions(), params, inputs, 16, 0)).sum()

        return jax.grad(loss)(params_of(method, moved=0.0))

    leaves = jax.tree.leaves(gradients())
    assert leaves
    assert all(np.abs(leaf).max() > 1e-3 for leaf in leaves)


def test_an_update_ends_within_the_limits_of_the_method(tiny_config) -> None:
    """KERPLE's numbers are put back, as in its code, and the optimizer knows nothing of it; other
    leaves are free.
    """
    config = tiny_config(mesh__data=1, position="kerple_power", model__num_layers=1)
    mesh, model = make_mesh(config.mesh, jax.devices()[:1]), build_model(config, VOCABULARY)
    optimizer = optax.stateless(
        lambda updates, _: jax.tree.map(lambda leaf: jnp.full_like(leaf, -9.0), updates)
    )
    state, metrics = make_train_step(model, optimizer, 0)(
        initial_state(model, optimizer, mesh, seed=0), *[jnp.zeros((1, 8, 16), jnp.int32)] * 2
    )
    np.testing.assert_array_equal(state.params["position"]["r1"], np.float32(0.01))
    np.testing.assert_array_equal(state.params["position"]["r2"], np.float32(0.01))
    assert all(
        (np.asarray(leaf) < 0).any()
        for name, leaf in state.params.items()
        if name != "position"
        for leaf in jax.tree.leaves(leaf)
    )
    assert metrics["update_norm"] == pytest.approx(
        9 * sum(leaf.size for leaf in jax.tree.leaves(state.params)) ** 0.5
    )

    def upwards(params: dict) -> dict:
        return model.within_limits(jax.tree.map(lambda leaf: leaf + 5.0, params))["position"]

    np.testing.assert_array_equal(upwards(state.params)["r2"], 2.0)
    np.testing.assert_allclose(upwards(state.params)["r1"], 5.01)


def test_parameters_are_split_by_the_rules(tiny_config) -> None:
    config = tiny_config(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, model__num_layers=1)
    mesh = make_mesh(config.mesh)
    model = build_model(config, VOCABULARY)
    params = initial_state(model, optax.sgd(0.5), mesh, seed=0).params
    layer = params["layers_0"]
    assert layer["attention"]["query"]["kernel"].sharding.spec == jax.P("fsdp", "tensor", None)
    assert layer["attention"]["out"]["kernel"].addressable_shards[0].data.shape == (1, 8, 8)
    assert layer["down"]["kernel"].addressable_shards[0].data.shape == (16, 8)
    assert params["embedding"].addressable_shards[0].data.shape == (24, 8)
    bands = laid_out(param_shapes(build_model(tiny_config(**ADAPTIVE), VOCABULARY)), mesh)[
        "adaptive"
    ]
    assert bands["band_1"]["embedding"].sharding.shard_shape((16, 8)) == (8, 4)
    planned = laid_out(param_shapes(model), mesh)

    def facts(leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple:
        return (
            leaf.shape,
            leaf.dtype,
            leaf.sharding.is_fully_replicated,
            leaf.sharding.shard_shape(leaf.shape),
        )

    assert jax.tree.map(facts, planned) == jax.tree.map(facts, params)
    odd = jax.eval_shape(lambda: {"embedding": jnp.zeros((47, 16))})
    assert tree_shardings(odd, mesh)["embedding"].spec == jax.P(None, "fsdp"), (
        "47 rows can't be split in two"
    )
    of_deberta = laid_out(
        param_shapes(build_model(tiny_config(position="deberta"), VOCABULARY)), mesh
    )["layers_0"]
    # as large as those of the layer's own keys and queries
    for kernel in ("key_kernel", "query_kernel"):
        assert of_deberta["position"][kernel].sharding.spec == jax.P("fsdp", "tensor", None)


def test_the_state_keeps_its_shardings_and_the_step_its_program(tiny_config, caplog) -> None:
    """Otherwise the second update is another program than the first, and so is the first after a
    resume.
    """
    config = tiny_config(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, model__num_layers=1)
    mesh = make_mesh(config.mesh)
    model = build_model(config, VOCABULARY, sharding=batch_sharding(mesh))
    optimizer = optax.adamw(1e-3)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, mesh))
    step = make_train_step(model, optimizer, 0, state_shardings=shardings)
    state = initial_state(model, optimizer, mesh, seed=0)
    batch = jax.device_put(jnp.zeros((1, 8, 16), jnp.int32), batch_sharding(mesh, leading=1))
    with jax.log_compiles():
        for _ in range(3):
            state, _ = step(state, batch, batch)
            assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    assert caplog.text.count("Compiling jit(update) ") == 1


@pytest.mark.parametrize("gather", ["layer", "update"])
def test_what_loops_gather(tiny_config, gather: str) -> None:
    """With two micro-batches. The loop over chunks of the loss would gather the softmax's matrix once a
    chunk.
    """
    config = tiny_config(
        mesh__data=1,
        mesh__fsdp=4,
        mesh__gather=gather,
        model__num_layers=4,
        model__scan_layers=True,
        model__logits_chunk=8,
    )
    mesh = make_mesh(config.mesh)
    model = build_model(config, VOCABULARY, sharding=batch_sharding(mesh))
    state = abstract_state(model, optax.sgd(0.5), mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    batch = jax.ShapeDtypeStruct((2, 4, 16), jnp.int32, sharding=batch_sharding(mesh, leading=1))
    program = (
        make_train_step(model, optax.sgd(0.5), 0, state_shardings=shardings, gather=gather)
        .lower(state, batch, batch)
        .compile(compiler_options=AS_USERS)
        .as_text()
    )
    bodies = dict(re.findall(r"^%(\S+) [^\n]*\{\n(.*?)^\}$", program, re.M | re.S))
    loops = [bodies[name] for name in set(re.findall(r" while\(.*body=%([\w.\-]+)", program))]
    inner = [loop for loop in loops if " while(" not in loop]
    (outer,) = (loop for loop in loops if loop not in inner)
    assert len(inner) == 3, "forward and backward over layers, and chunks"

    def gathers(loop: str) -> list[str]:
        return re.findall(r" = (f32\[[\d,]+\])\S* all-gather\(", loop)

    assert gathers(program)
    assert not [shape for loop in inner for shape in gathers(loop) if str(VOCABULARY) in shape]
    if gather == "layer":
        assert sum(bool(gathers(loop)) for loop in inner) == 2
    else:
        assert not [shape for loop in loops for shape in gathers(loop)]
        (state,) = re.findall(r"^  %\S+ = (\(.*\)) parameter\(0\)", outer, re.M)
        assert f"f32[{VOCABULARY},4]" in state, "the sum over micro-batches is split"


@pytest.mark.parametrize(
    ("keys", "own", "others"),
    [
        ({"mesh__fsdp": 8}, "5,16,48", ["40,16,48", "40,2,16,16"]),
        ({"mesh__data": 4, "mesh__tensor": 2}, "10,16,24", ["10,16,48"]),
    ],
)
def test_no_device_has_the_logits_of_others(
    tiny_config, keys: dict, own: str, others: list[str]
) -> None:
    """Without a constraint the embedding's sharding wins, and a device has the whole batch, or all
    words.
    """
    config = tiny_config(model__num_layers=1, **{"mesh__data": 1} | keys)
    mesh = make_mesh(config.mesh)
    model = build_model(config, VOCABULARY, sharding=batch_sharding(mesh))
    state = abstract_state(model, optax.sgd(0.5), mesh)
    batch = jax.ShapeDtypeStruct((1, 40, 16), jnp.int32, sharding=batch_sharding(mesh, leading=1))
    program = (
        make_train_step(model, optax.sgd(0.5), 0)
        .lower(state, batch, batch)
        .compile(compiler_options=AS_USERS)
        .as_text()
    )
    assert f"f32[{own}]" in program
    assert not [shape for shape in others if f"f32[{shape}]" in program]


def test_an_update_that_is_no_number_is_not_applied(tiny_config) -> None:
    config = tiny_config(mesh__data=1, model__num_layers=1)
    mesh, model = make_mesh(config.mesh, jax.devices()[:1]), build_model(config, VOCABULARY)
    optimizer = optax.sgd(float("inf"))
    state = initial_state(model, optimizer, mesh, seed=0)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = make_train_step(model, optimizer, 0)(
        state, *[jnp.zeros((1, 8, 16), jnp.int32)] * 2
    )
    assert np.isfinite(metrics["gradient_norm"])
    assert not np.isfinite(metrics["update_norm"]), "which stops the run"
    jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_no_parameter_is_copied_before_a_step(tiny_config) -> None:
    """The norm of an update reads the old parameters, and must do so before they are overwritten."""
    config = tiny_config(mesh__data=1, model__num_layers=1)
    mesh, model = make_mesh(config.mesh, jax.devices()[:1]), build_model(config, VOCABULARY)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = initial_state(model, optimizer, mesh, seed=0)
    batch = jnp.zeros((1, 8, 16), jnp.int32)
    program = (
        make_train_step(model, optimizer, 0)
        .lower(state, batch, batch)
        .compile(compiler_options=AS_USERS)
        .as_text()
    )
    assert "state_params" in program
    assert not re.search(r"copy\(%state_params", program)
