"""Updates of the paper's recipe, one by one, as other implementations compute them."""

import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from alibi.fairseq.parameters import architecture, to_params
from alibi.model import build_model
from alibi.training.optimizer import make_optimizer
from alibi.training.schedules import make_schedule
from alibi.training.state import TrainState
from alibi.training.step import make_train_step
from configs import wikitext103

SMALL = pathlib.Path(__file__).parents[1] / "data" / "trajectory.npz"
PADDING = 1  # of fairseq, in targets
NO_DROPOUT = ("dropout", "attention_dropout", "activation_dropout", "softmax_dropout")


Found = tuple[dict[str, np.ndarray], dict]


def trainer(recording: Mapping[str, np.ndarray], warmup: int, period: int) -> Callable[[Mapping], Found]:
    """From initial tensors: lr, loss in nats and gradient norm of each update, and the parameters after the last."""
    sizes, updates = architecture(initial(recording)), len(recording["lr"])
    config = wikitext103.get_config("position=alibi")
    config.model.update(sizes.config | dict.fromkeys(NO_DROPOUT, 0.0))
    config.optimizer.update(warmup_steps=warmup, period_steps=period)
    model, optimizer = build_model(config, sizes.vocab_size), make_optimizer(config.optimizer, updates)
    step = make_train_step(model, optimizer, 0, schedule=make_schedule(config.optimizer, updates))

    def train(tensors: Mapping[str, np.ndarray]) -> Found:
        params = jax.tree.map(jnp.asarray, to_params(tensors, num_heads=8))
        state = TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=jax.jit(optimizer.init)(params))
        rows = []
        for update in range(updates):
            inputs, targets = (recording[f"{name}/{update}"].astype(np.int32)[None] for name in ("src", "tgt"))
            state, metrics = step(state, inputs, np.where(targets == PADDING, np.int32(-1), targets))
            rows.append((metrics["learning_rate"], metrics["nll_nats"] / metrics["tokens"], metrics["gradient_norm"]))
        assert step._cache_size() == 1
        lr, loss, norm = np.asarray(rows, np.float64).T
        return {"lr": lr, "loss_nats": loss, "gradient_norm": norm}, jax.device_get(state.params)

    return train


def initial(recording: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("init/"): tensor for name, tensor in recording.items() if name.startswith("init/")}


def neighbour(tensors: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Each value moved to the next or the previous float32, equal tensors alike (some are tied); with seed 0, none."""
    rng, moved = np.random.default_rng(seed), {}
    for tensor in tensors.values():
        if seed and tensor.dtype == np.float32 and tensor.tobytes() not in moved:
            side = np.where(rng.random(tensor.shape) < 0.5, np.float32(-np.inf), np.float32(np.inf))
            moved[tensor.tobytes()] = np.nextafter(tensor, side)
    return {name: moved.get(tensor.tobytes(), tensor) for name, tensor in tensors.items()}


def check_parameters(params: dict, recording: Mapping[str, np.ndarray]) -> None:
    """The first layer and the clusters, each to 1e-3 of its norm."""
    layer, attention = params["layers_0"], params["layers_0"]["attention"]
    width = layer["up"]["kernel"].shape[0]
    found = {"decoder.adaptive_softmax.head.class_proj.weight": params["adaptive"]["clusters"].T}
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
        prefix = f"decoder.layers.0.self_attn.{theirs}_proj"
        found[f"{prefix}.weight"] = attention[ours]["kernel"].reshape(width, width).T
        found[f"{prefix}.bias"] = attention[ours]["bias"].reshape(width)
    found["decoder.layers.0.self_attn.out_proj.weight"] = attention["out"]["kernel"].reshape(width, width).T
    found["decoder.layers.0.self_attn.out_proj.bias"] = attention["out"]["bias"]
    for theirs, ours in (("fc1", "up"), ("fc2", "down")):
        found[f"decoder.layers.0.{theirs}.weight"] = layer[ours]["kernel"].T
        found[f"decoder.layers.0.{theirs}.bias"] = layer[ours]["bias"]
    for theirs, ours in (("self_attn_layer_norm", "attention_norm"), ("final_layer_norm", "feed_forward_norm")):
        found[f"decoder.layers.0.{theirs}.weight"] = layer[ours]["scale"]
        found[f"decoder.layers.0.{theirs}.bias"] = layer[ours]["bias"]
    for name, ours in found.items():
        theirs = recording[f"final/{name}"]
        assert np.linalg.norm(ours - theirs) < 1e-3 * np.linalg.norm(theirs), name


def test_a_small_model_follows_an_independent_implementation() -> None:
    """tests/data/README.md says whose."""
    with np.load(SMALL) as file:
        recording = dict(file)
    found, params = trainer(recording, warmup=4, period=12)(initial(recording))
    np.testing.assert_allclose(found["lr"], recording["lr"], rtol=1e-6)
    np.testing.assert_allclose(found["loss_nats"], recording["loss_nats"], rtol=1e-3)
    np.testing.assert_allclose(found["gradient_norm"], recording["gradient_norm"], rtol=1e-2)
    check_parameters(params, recording)


def test_sixty_updates_of_the_papers_own_code(shared_dir: pathlib.Path) -> None:
    """In this recording two inputs of ReLU are within rounding of zero (about 1e-6), one at update 17 and one at 18.

    On which side they fall, and with it a step of the gradient, depends on the order of sums: of the machine, of
    PyTorch, of XLA. All runs from starts that are one rounding apart agree before, then follow one of three paths:
    the recorded one in a quarter of the starts, and two that are 0.9% apart from it at the end. So neighbours are
    tried until one follows the recording through all 60 updates; a mistake in the recipe leaves none that does.
    """
    with np.load(shared_dir / "oracle" / "trajectory.npz") as file:
        recording = dict(file)
    losses = recording["loss_base2"] * np.log(2)
    train, before = trainer(recording, warmup=16, period=40), slice(0, 17)
    for seed in range(64):
        found, params = train(neighbour(initial(recording), seed))
        np.testing.assert_allclose(found["lr"], recording["lr"], rtol=1e-6)
        np.testing.assert_allclose(found["loss_nats"][before], losses[before], rtol=5e-6)
        np.testing.assert_allclose(found["gradient_norm"][before], recording["gnorm"][before], rtol=1e-3)
        if np.abs(found["loss_nats"] / losses - 1).max() < 1e-3:
            break
    np.testing.assert_allclose(found["loss_nats"], losses, rtol=1e-3)
    np.testing.assert_allclose(found["gradient_norm"], recording["gnorm"], rtol=1e-2)
    check_parameters(params, recording)
