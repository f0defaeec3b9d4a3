"""A plan against the compiled step, and against arithmetic by hand."""

import functools
import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from alibi.config import Config, DataConfig, as_file, load_config, make_config, replaced
from alibi.devices.kinds import GIB
from alibi.model.decoder import build_model
from alibi.model.flops import training_flops
from alibi.optimizers import make_optimizer
from alibi.parallel.sharding import batch_sharding, make_mesh
from alibi.planning.plan import TrainingPlan, Vocabulary, describe, make_plan
from alibi.training.step import abstract_state, make_train_step
from tests.programs import AS_USERS
from tests.refusals import assert_refused

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCABULARY = 512


def medium(**overrides: Any) -> Config:
    """Returns a two-layer config in which activations take most memory."""
    return make_config(
        "length=64,train.batch_tokens=8192,model.num_layers=2,model.num_heads=4", **overrides
    )


def planned(config: Config, devices: int = 8, kind: str = "L4") -> TrainingPlan:
    return make_plan(config, devices, kind, VOCABULARY)


def test_against_the_compiled_step() -> None:
    """Parameters and optimizer state to the byte; the whole step, without remat, as far as eight
    CPU devices tell.

    On CPUs XLA keeps elementwise results; accelerators compute them again.
    """
    config = medium(mesh__data=2, mesh__fsdp=2, mesh__tensor=2)
    real = make_mesh(config.mesh, jax.devices()[:8])
    model = build_model(config, VOCABULARY, sharding=batch_sharding(real))
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    state = abstract_state(model, optimizer, real)
    shape = 1, config.train.batch_tokens // config.train_length, config.train_length
    tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(real, leading=1))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = (
        make_train_step(model, optimizer, 0, state_shardings=shardings)
        .lower(state, tokens, tokens)
        .compile(compiler_options=AS_USERS)
    )
    memory, analysis = planned(config).memory, step.memory_analysis()
    # inputs and targets, int32
    batch = 2 * 4 * config.train.batch_tokens // 4
    assert memory.parameters + memory.optimizer + 4 + batch == analysis.argument_size_in_bytes, (
        "4: the update's number"
    )
    whole = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    assert memory.total == pytest.approx(whole, rel=0.35)
    # FLOPs are of each device; XLA also counts norms and the optimizer.
    flops = config.train.batch_tokens * training_flops(config, VOCABULARY) / 8
    assert step.cost_analysis()["flops"] == pytest.approx(flops, rel=0.15)


def test_activations_of_a_layer_by_hand() -> None:
    """4096 tokens a device, for blocked attention: float32, width 128, features 512, 4 heads."""
    tokens, width, features, heads = 4096, 128, 512, 4

    def activations(layers: int, **overrides: Any) -> int:
        sizes = {
            "model__num_layers": layers,
            "train__batch_tokens": 8 * tokens,
            "train_length": 1024,
        }
        # as a loop, which traces one layer in place of two or three
        return planned(medium(**sizes, model__scan_layers=True, **overrides)).memory.activations

    layer = 4 * (4 * width + 4 * width + width + heads + 2 * features)
    assert activations(3) - activations(2) == tokens * layer
    assert (
        activations(3, model__remat=True) - activations(2, model__remat=True) == tokens * 4 * width
    )
    keys = {"model__remat": True, "model__remat_keeps": "up"}
    assert activations(3, **keys) - activations(2, **keys) == tokens * 4 * (width + features)
    keys["model__remat_keeps"] = "attention"  # in float32, with a number for each head
    assert activations(3, **keys) - activations(2, **keys) == tokens * 4 * (2 * width + heads)
    # and each device has twice as many tokens
    halved = 4 * 4 * width + (layer - 4 * 4 * width) // 2
    assert activations(3, mesh__tensor=2) - activations(2, mesh__tensor=2) == 2 * tokens * halved
    dropped = {"model__dropout": 0.1, "model__activation_dropout": 0.1}
    assert activations(3, **dropped) - activations(2, **dropped) == tokens * (
        layer + 2 * width + features
    )


def test_gathered_parameters_by_hand() -> None:
    """Seven of eight parts of the matrices: those of two layers and the embedding, or of all four layers.
    Of the embedding, gathered once, rows are looked up in float32.
    """

    def gathered(**overrides: Any) -> int:
        sizes = {
            "model__num_layers": 4,
            "model__dtype": "bfloat16",
            "mesh__data": 1,
            "mesh__fsdp": 8,
        }
        return planned(medium(**sizes, **overrides)).memory.gathered

    layer, embedding = 4 * 128**2 + 2 * 128 * 512, VOCABULARY * 128
    assert gathered(model__remat=True) == 2 * (2 * layer + embedding) * 7 // 8
    assert gathered() == 2 * (4 * layer + embedding) * 7 // 8
    assert gathered(model__remat=True, mesh__gather="update") == gathered() + 4 * embedding * 7 // 8


def test_hours_and_checkpoints_by_hand() -> None:
    config = load_config(f"{ROOT}/configs/cc100_1b3.py:model.scan_layers=True")
    plan = make_plan(config, 256, "TPU v5 lite")
    # 25 layers of 4 x 2048^2 + 2 x 2048 x 8192 weights, 50,264 x 2048 of the softmax, half of 512
    # keys for each query.
    per_token = 6 * (25 * (4 * 2048**2 + 2 * 2048 * 8192) + 50_264 * 2048 + 25 * 2 * 2048 * 256.5)
    assert plan.flops_per_token == pytest.approx(per_token)
    assert plan.tokens == 50_000 * 2_097_152
    assert plan.hours(0.5) == pytest.approx(plan.tokens * per_token / (256 * 197e12 * 0.5) / 3600)
    assert plan.checkpoint_bytes == pytest.approx(3 * 4 * plan.parameters, rel=1e-6), (
        "Adam has two numbers for each"
    )
    assert "; 50 or more are written" in describe(plan)
    assert plan.micro_batches == 1
    # XLA's own figure of this step, compiled for such a slice by libtpu 0.0.42: no less is planned.
    assert 1 <= plan.memory.total / (3.205 * GIB) < 1.21
    assert "at 50% of the peak" in describe(plan)


def test_a_plan_of_values_that_change_over_updates() -> None:
    """Hours of each stretch by itself; the memory of the largest, which here is the middle one."""
    changes = {"train_length": "0:256;100:1024;400:512", "train.steps": 500}
    config = replaced(medium(model__attention="reference"), changes)
    plan, *parts = (
        make_plan(replaced(config, {"train_length": length} if length else {}), 1, "L4")
        for length in (0, 256, 1024, 512)
    )
    assert plan.memory == parts[1].memory
    assert plan.memory.total > max(parts[0].memory.total, parts[2].memory.total)
    hours = sum(n / 500 * part.hours(0.5) for n, part in zip((100, 300, 100), parts, strict=True))
    assert plan.hours(0.5) == pytest.approx(hours)
    tokens = config.train.batch_tokens
    assert f"1 x {tokens // 1024} sequences of 1,024, {tokens:,} tokens a device" in describe(plan)


def test_a_run_that_does_not_fit() -> None:
    """Four numbers of 4 bytes for each of 1.2e9 parameters are 18 GiB; two devices hold half of them each."""
    sizes = {"model__width": 10_000, "model__num_layers": 1, "model__feed_forward": 40_000}
    plan, split = (planned(medium(**sizes, mesh__fsdp=parts)) for parts in (1, 2))
    needed, usable = plan.memory.total / GIB, plan.kind.usable_memory / GIB
    assert f"does not fit: it needs {needed:.2f} GiB and has {usable:.2f} GiB" in describe(plan)
    assert needed > 18
    assert f"of {usable:.2f} GiB for programs: fits" in describe(split)
    deep = {"model__width": 2048, "model__num_layers": 100, "model__feed_forward": 8192}
    deep |= {"model__scan_layers": True, "model__remat": True, "mesh__data": 1, "mesh__fsdp": 8}
    by_layer, once = (planned(medium(**deep, mesh__gather=one)) for one in ("layer", "update"))
    assert by_layer.fits
    text = describe(once)
    assert "; use --config.mesh.gather=layer, more --devices, or a smaller" in text, (
        "all else is set"
    )


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        ({"mesh__tensor": 8}, "L4", r"mesh\.tensor=8 .* does not divide model\.num_heads=4"),
        ({}, "TPU v9", "device kind 'TPU v9' is unknown; use one of TPU v2"),
        ({"train__batch_tokens": 64}, "L4", r"train\.batch_tokens=64 must be a multiple of 512"),
    ],
)
def test_refusals(overrides: dict[str, Any], kind: str, message: str) -> None:
    assert_refused(message, lambda: planned(medium(**overrides), kind=kind))


def test_vocabularies_that_need_no_text() -> None:
    assert Vocabulary.of(DataConfig()) == Vocabulary(256)
    assert Vocabulary.of(DataConfig(tokenizer="bpe", bpe_vocab_size=1000)) == Vocabulary(1000)
    assert Vocabulary.of(DataConfig(tokenizer="words")).assumed
    assert not Vocabulary.of(load_config(str(ROOT / "configs/wikitext103.py")).data).assumed


def test_the_command_lines(
    run_script,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Neither needs a work directory or makes anything; --print_config prints a config file."""
    monkeypatch.chdir(tmp_path)
    run = functools.partial(
        run_script, ROOT / "train.py", f"--config={ROOT / 'configs/quickstart.py'}"
    )
    printed = run(
        "--print_config", "--config.train.steps=123", "--config.position_options.num_buckets=64"
    )
    mine = tmp_path_factory.mktemp("printed") / "mine.py"
    mine.write_text(printed.stdout)
    config = load_config(str(mine))
    assert (config.train.steps, config.position_options) == (123, {"num_buckets": 64})
    devices = ("--plan", "--devices=2", "--device_kind=NVIDIA H100 80GB HBM3")
    plan = run(*devices)
    assert plan.stdout.startswith("devices  2 x H100: 80 GiB, 3,350 GB/s, 494.7 TFLOP/s in float32")
    assert plan.stderr == ""
    here = run("--plan").stdout
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    assert here.startswith(f"devices  1 x CPUs of this machine: {memory:.4g} GiB, 0.")
    assert f"of {0.75 * memory:.2f} GiB for programs: fits" in here
    for ignored in (
        ["--device_kind=H100", "--workdir=x"],
        ["--plan", "--devices=2"],
        [*devices, "--print_config"],
    ):
        run(*ignored, code=1)
    assert run("--dry-run", code=1).stderr == (
        "error: there is no flag --dry-run; --plan prints memory and time, --print_config the whole config; "
        "--help shows all\n"
    )
    started = run(*devices, "--init_from=nowhere", code=1)
    assert "is no work directory of a run: config.json is missing" in started.stderr, (
        "as in training"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("[!_b]*.py")), ids=lambda path: path.stem
)
def test_configs_as_files(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = load_config(f"{path}:position=alibi,position_options.slopes=0.5:0.25,length=64")
    (tmp_path / "same.py").write_text(as_file(config))
    assert load_config(str(tmp_path / "same.py")) == config
    shorter = f"{tmp_path / 'same.py'}:train.steps=7"
    if config.changes:
        assert_refused(r"train\.steps=7", load_config, shorter)
    else:
        assert load_config(shorter).train.steps == 7
