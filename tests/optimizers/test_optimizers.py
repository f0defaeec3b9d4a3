"""Muon by its formula in float64, alike in both layouts of layers; which parameters decay; forks of a run;
optimizers and schedules from outside.
"""

import dataclasses
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alibi.config import make_config, replaced
from alibi.config.fields import number
from alibi.model.decoder import build_model, param_shapes
from alibi.model.layers import stacked, unstacked
from alibi.optimizers import Optimizer, Schedule, decayed, make_optimizer, make_schedule, matrices
from alibi.parallel.axes import leaf_of
from alibi.runs import RunDirectory, method_files
from alibi.training import loop
from tests.attention.calls import assert_near
from tests.refusals import assert_refused
from tests.training.runs import assert_same, final_state, rows

HERE = __name__
TINY = "length=16,model.num_layers=3,model.width=16,model.num_heads=2,model.feed_forward=32"
MODELS = (
    "",
    "model.embedding=untied,model.token_types=2,model.gated=true,model.attention_gate=true,model.norm=rms,model.qk_norm=true",
    "model.embedding=adaptive,model.cutoffs=20:60",
    "position=t5,model.num_kv_heads=1,model.normalizer=sink",
    "position=deberta,model.embedding_norm=true",
    "position=fox,model.scan_layers=true,model.logit_scale=ssmax",
)  # fmt: skip


@functools.cache
def shapes_of(keys):
    return param_shapes(build_model(make_config(f"{TINY},{keys}".rstrip(",")), 100))


def random_like(tree, seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: random.standard_normal(leaf.shape, np.float32), tree)


@pytest.mark.parametrize("keys", MODELS)
def test_what_decays_is_every_kernel_and_table_outside_of_positions(keys):
    """By the names of the leaves alone; an output matrix of its own decays as a tied one does."""
    tables = ("kernel", "embedding", "head", "token_types", "clusters")

    def by_name(path, _):
        names = [part.key for part in path]
        return names[-1] in tables and "position" not in names

    shapes = shapes_of(keys)
    assert decayed(shapes) == jax.tree.map_with_path(by_name, shapes)


@pytest.mark.parametrize("keys", MODELS)
def test_each_matrix_of_a_layer_has_its_inputs_and_outputs(keys):
    """Their sizes multiply to those of the product, found by the names of Flax's layers."""
    shapes = shapes_of(keys)
    found = dict(jax.tree.leaves_with_path(shapes))
    axes = dict(jax.tree.leaves_with_path(matrices(shapes), is_leaf=lambda x: isinstance(x, tuple)))
    kernels = [
        path
        for path in found
        if path[0].key.startswith("layers")
        and path[-1].key == "kernel"
        and "position" not in (part.key for part in path)
    ]
    assert {*axes} == {*kernels}
    for path in kernels:
        shape, (inputs, outputs) = found[path].shape, axes[path]
        own = shape[1:] if path[0].key == "layers" else shape
        sizes = [np.prod([shape[axis] for axis in side]) for side in (inputs, outputs)]
        first = own[:-1] if path[-2].key == "out" else own[:1]
        assert sizes == [np.prod(first), np.prod(own) // np.prod(first)]


def orthogonal(matrix):
    """Five steps of Newton and Schulz with Jordan's coefficients, in float64."""
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    x = x.T if (turned := x.shape[0] > x.shape[1]) else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if turned else x


def test_muon_is_its_formula_for_matrices_and_adamw_for_the_rest():
    config = make_config(f"{TINY},optimizer.name=muon,optimizer.clip_norm=0").optimizer
    params = random_like(shapes_of(""), 0)
    gradients = [random_like(params, seed) for seed in (1, 2)]
    optimizer, schedule = make_optimizer(config, 600)
    adamw, _ = make_optimizer(dataclasses.replace(config, name="adamw"), 600)
    state, other, update = optimizer.init(params), adamw.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        by_adamw, other = jax.jit(adamw.update)(gradient, other, params)
    layer, rest = updates.pop("layers_1"), by_adamw.pop("layers_1")
    for name in ("embedding", "final_norm"):
        assert_near(updates[name], by_adamw[name], 1e-9)
    assert_near(layer["up"]["bias"], rest["up"]["bias"], 1e-9)
    rate = float(schedule(1))
    for path, inputs in ((("attention", "query"), 16), (("attention", "out"), 16), (("down",), 32)):
        trees = params["layers_1"], *(each["layers_1"] for each in gradients), layer
        own, one, two, found = (
            np.asarray(functools.reduce(operator.getitem, (*path, "kernel"), tree), np.float64)
            .reshape(inputs, -1)
            for tree in trees
        )  # fmt: skip
        momentum = 0.95 * (0.05 * (0.95 * one + two)) / (1 - 0.95**3) + 0.05 * two / (1 - 0.95**2)
        expected = -rate * ((0.2 * np.sqrt(max(momentum.shape))) * orthogonal(momentum) + 0.1 * own)
        np.testing.assert_allclose(found, expected, atol=2e-5 * rate)


def test_updates_of_scanned_layers_are_those_of_single_ones():
    """With Muon, which takes AdamW for what is no matrix."""
    keys = MODELS[1]
    config = make_config(f"{TINY},optimizer.name=muon,optimizer.warmup_steps=0").optimizer
    optimizer, _ = make_optimizer(config, 600)
    params = random_like(shapes_of(keys), 0)
    gradients = [random_like(params, seed) for seed in (1, 2)]
    found = []
    for change in (lambda tree: tree, stacked):
        state, own = optimizer.init(change(params)), change(params)
        for gradient in gradients:
            updates, state = jax.jit(optimizer.update)(change(gradient), state, own)
        found.append(updates)
    alone, together = found[0], unstacked(found[1])
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        # rounding, which Newton and Schulz make larger; another matrix differs by a half
        assert jnp.linalg.norm(one - other) <= 5e-6 * jnp.linalg.norm(one)


def test_the_state_of_muon_is_found_again_in_the_other_layout():
    optimizer, _ = make_optimizer(make_config("optimizer.name=muon").optimizer, 600)
    params = random_like(shapes_of(""), 0)
    for change, own in ((stacked, params), (unstacked, stacked(params))):
        found = jax.eval_shape(lambda tree, to=change: to(optimizer.init(tree)), own)
        expected = jax.eval_shape(lambda tree, to=change: optimizer.init(to(tree)), own)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert jax.tree.leaves(found) == jax.tree.leaves(expected)


def test_a_kernel_without_axes_is_a_line():
    assert_refused("layers_0/mixer/kernel", leaf_of, "layers_0/mixer/kernel", 2)


def test_warm_up_stable_decay_is_its_formula():
    keys = (
        "optimizer.schedule=wsd,optimizer.warmup_steps=10,optimizer.schedule_options.decay_steps=40"
    )
    for shape, share in (("sqrt", 0.25**0.5), ("linear", 0.25)):
        config = make_config(f"{keys},optimizer.schedule_options.shape={shape}").optimizer
        schedule = make_schedule(config, 100)
        rates = [float(schedule(step)) / 3e-3 for step in (0, 5, 10, 60, 70, 100)]
        np.testing.assert_allclose(rates, [0, 0.5, 1, 1, 1 - 0.9 * share, 0.1], rtol=1e-6)
    assert_refused(r"decay_steps=40 .* train\.steps=45", make_schedule, config, 45)


@pytest.mark.slow
def test_a_fall_forks_from_a_checkpoint_of_the_stable_rate(tiny_config, tmp_path):
    """The fork is bit for bit the run that was as short from its start. So is one that is stopped."""
    keys = {"optimizer__schedule": "wsd", "optimizer__schedule_options": {"decay_steps": 2}}
    config = tiny_config(
        train__steps=10, checkpoint__keep=9, optimizer__name="muon", model__dropout=0.1, **keys
    )
    loop.train(config, str(tmp_path / "long"))
    short = replaced(config, {"train.steps": 6})
    loop.train(short, str(tmp_path / "short"))
    fork = replaced(short, {"init_from": str(tmp_path / "long"), "init_step": 4})
    loop.train(fork, str(tmp_path / "fork"))
    assert_same(*(final_state(short, tmp_path / name) for name in ("short", "fork")))
    assert [row["step"] for row in rows(tmp_path / "fork") if "train_nll" in row] == [5, 6]
    assert RunDirectory(tmp_path / "fork").provenance()["parent"]["step"] == 4
    for changes, words in (
        ({"init_step": 5}, "init_step=5 must be a checkpoint of init_from="),
        (
            {"train.steps": 5, "optimizer.schedule_options.decay_steps": 3},
            "init_step=4 is after update 3, from which the learning rates",
        ),
        (
            {"model.dropout": 0.2},
            "differs in more than train.steps and the schedule: model.dropout",
        ),
        ({"optimizer.b1": 0.5}, "differs in more than train.steps and the schedule: another optim"),
    ):
        assert_refused(re.escape(words), loop.train, replaced(fork, changes), str(tmp_path / "no"))
    text = tmp_path / "other.txt"
    text.write_text("another text " * 200)
    assert_refused(
        "changed: .* init_step",
        loop.train,
        replaced(fork, {"data.train": str(text)}),
        str(tmp_path / "no"),
    )


@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
    b1: float
    decay: float = number(0.1, at_least=0.0)

    def make(self, schedule):
        return optax.lion(schedule, self.b1, weight_decay=self.decay, mask=decayed)


@dataclasses.dataclass(frozen=True)
class Falling(Schedule):
    power: int = number(1, at_least=1)

    def rate(self, step):
        return self.learning_rate * (1 - step / self.steps) ** self.power


@dataclasses.dataclass(frozen=True)
class Halved(Schedule):
    def rate(self, step):
        return self.learning_rate / 2


@dataclasses.dataclass(frozen=True)
class Unfinished(Optimizer):
    pass


@dataclasses.dataclass(frozen=True)
class Nothing(Optimizer):
    def make(self, schedule):
        return None


@dataclasses.dataclass(frozen=True)
class Branching(Schedule):
    def rate(self, step):
        return self.learning_rate if step > 5 else 0.0


@dataclasses.dataclass(frozen=True)
class Several(Schedule):
    def rate(self, step):
        return jnp.full(3, self.learning_rate)


def test_an_optimizer_and_a_schedule_from_outside(tiny_config):
    """The updates are those of Lion's formula; test_extending.py trains with others."""
    keys = {"name": f"{HERE}:Lion", "options": {"decay": 0.2}, "schedule": f"{HERE}:Falling"}
    config = tiny_config(
        optimizer__schedule_options={"power": 2},
        **{f"optimizer__{key}": value for key, value in keys.items()},
    )
    assert f"own file {HERE}" in method_files(config)
    schedule = make_schedule(config.optimizer, 6)
    np.testing.assert_allclose([schedule(step) for step in (1, 4)], [1.5e-3, 3e-3 / 9], rtol=1e-6)
    params = {"layers_0": {"up": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}}
    made, _ = make_optimizer(replaced(config, {"optimizer.clip_norm": 0}).optimizer, 6)
    state = made.init(params)
    for _ in range(2):
        updates, state = made.update(params, state, params)
    np.testing.assert_allclose(updates["layers_0"]["up"]["kernel"], -1.5e-3 * 1.2, rtol=1e-6)
    np.testing.assert_allclose(updates["layers_0"]["up"]["bias"], -1.5e-3, rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"name": "adamv"}, "unknown optimizer 'adamv'; did you mean 'adamw'? there are: adamw"),
        ({"name": "absent:Lion"}, "optimizer.name=absent:Lion: No module named 'absent'; write"),
        ({"name": f"{HERE}:Falling"}, "is no subclass of alibi.optimizers.Optimizer, but"),
        ({"name": f"{HERE}:Unfinished"}, f"can't be made (Unfinished, {__file__}:"),
        ({"name": f"{HERE}:Nothing"}, f"(Nothing, {__file__}:"),
        (
            {"schedule": f"{HERE}:Branching"},
            "rate(step) fails under jax.jit: TracerBoolConversionE",
        ),
        ({"schedule": f"{HERE}:Several"}, "rate(step) is float32[3]; it must be a single float"),
        (
            {"options": {"nesterov": 1}},
            "optimizer 'adamw' has no option 'nesterov'; there are: b1,",
        ),
        ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'? there are"),
        ({"schedule_options": {"x": 1}}, "schedule 'cosine' has no option 'x'; there are: final_f"),
    ],
)
def test_a_wrong_one_is_a_line(keys, words):
    config = make_config(**{f"optimizer__{key}": value for key, value in keys.items()})
    assert_refused(re.escape(words), make_optimizer, config.optimizer, 600)
