"""The benchmark of adaptive embeddings: training, the loss against a dense one, and a step at the paper's size."""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from alibi.config import Config, read_config, replaced
from benchmarks.processes import Contender, Step, peak_memory, require_torch
from benchmarks.rounds import about, measured_on, print_failures, print_table, run_rounds, text
from benchmarks.training_contenders import torch_training_step, training_step
from benchmarks.words import zipf_words
from configs import wikitext2, wikitext103

TURN_SECONDS = 1.5  # of one contender in one round
VOCABULARY, CUTOFFS = 13_792, "2000:6000"  # of the small model
PAPER_VOCABULARY = 267_744
PAPER_MICRO_TOKENS = 1_024
BATCH_TOKENS = 2_048


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Words/s of a small model's training step, and of its softmax alone beside a dense one of the same vocabulary."""
    if arguments.size == "paper":
        if arguments.peer != "none":
            raise ValueError(f"--peer={arguments.peer} has no step of --size=paper; leave one of the two out")
        return [_paper_step()]
    config = read_config(wikitext2.get_config(f"model.cutoffs={CUTOFFS},train.batch_tokens={BATCH_TOKENS},mesh.data=1"))
    ours, peer = "training step, adaptive", "training step, PyTorch"
    contenders = {
        ours: Contender(_train_step, (config, VOCABULARY)),
        "loss alone, adaptive": Contender(_loss, (config, VOCABULARY)),
        "loss alone, dense": Contender(_loss, (_tied(config), VOCABULARY)),
    }
    if arguments.peer == "torch":
        require_torch()
        contenders[peer] = Contender(_torch_step, (config, VOCABULARY))
    runners, peak = run_rounds(contenders, arguments.rounds, turn_seconds=TURN_SECONDS, title="adaptive")
    seconds = {name: runner.median("run") for name, runner in runners.items()}
    of_peer = seconds[peer] / seconds[ours] if seconds.get(peer) and seconds[ours] else None
    rows = [
        {
            "benchmark": "adaptive",
            "contender": name,
            "failed": runner.failed,
            "step_seconds": seconds[name],
            "words_per_second": seconds[name] and BATCH_TOKENS / seconds[name],
            "of_peer": of_peer if name == ours else None,
            "matmul_gflops": peak / 1e9,
            **about(arguments.rounds),
        }
        for name, runner in runners.items()
    ]
    model = config.model
    print(
        f"{model.num_layers} layers, width {model.width}, {VOCABULARY:,} words, cutoffs {CUTOFFS}, "
        f"L={config.train_length}, {BATCH_TOKENS:,} words a step, float32, {config.position}; "
        f"{measured_on(rows[0])}\n"
    )
    print_table(
        ["", "words/s", "ms a step", "x PyTorch"],
        [
            [
                row["contender"],
                text(row["words_per_second"], ",.0f"),
                text(row["step_seconds"], ".1f", 1e3),
                text(row["of_peer"], ".2f"),
            ]
            for row in rows
        ],
    )
    print_failures(rows)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", choices=("small", "paper"), default="small", help="paper: one step of 247M parameters"
    )
    parser.add_argument("--peer", choices=("torch", "none"), default="none", help="whom to compare with")
    parser.set_defaults(command=compare)


def _paper_step() -> dict[str, Any]:
    """Seconds and peak memory of one update of the 247M model: 9,216 tokens in micro-batches of 1,024."""
    config = read_config(
        wikitext103.get_config(f"train.max_device_tokens={PAPER_MICRO_TOKENS},train.batch_tokens=9216,mesh.data=1")
    )
    start = time.perf_counter()
    step = _train_step(config, PAPER_VOCABULARY)
    ready = time.perf_counter()
    step.run(1)
    row = {
        "benchmark": "adaptive",
        "contender": "one step of 247M parameters",
        "prepare_seconds": ready - start,
        "step_seconds": time.perf_counter() - ready,
        "peak_memory_bytes": peak_memory(),
        "step_memory_bytes": step.memory_bytes,
        **about(1),
    }
    print(
        f"{row['contender']}: {row['step_seconds']:.0f} s, peak of the process {row['peak_memory_bytes'] / 2**30:.1f} "
        f"GiB (by the compiler {(step.memory_bytes or 0) / 2**30:.1f}); prepared in {row['prepare_seconds']:.0f} s"
    )
    return row


def _tied(config: Config) -> Config:
    return replaced(config, {"model.embedding": "tied"})


def _train_step(config: Config, vocab_size: int) -> Step:
    return training_step(config, vocab_size, _batch(config, vocab_size))


def _torch_step(config: Config, vocab_size: int) -> Step:
    """The same in PyTorch, laid out as the paper's code is."""
    from benchmarks.torch_paper import make_train_step

    return torch_training_step(make_train_step(config, vocab_size, _batch(config, vocab_size)))


def _batch(config: Config, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets `[batch, length]`."""
    inputs, targets = zipf_words(vocab_size, (2, config.train.batch_tokens // config.train_length, config.train_length))
    return inputs, targets


def _loss(config: Config, vocab_size: int) -> Step:
    """Value and gradient of the softmax layer alone."""
    import jax
    import jax.numpy as jnp

    from alibi.model.decoder import DecoderLM, build_model

    model = build_model(config, vocab_size)
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    shape = (config.train.batch_tokens // config.train_length, config.train_length)
    features = jax.random.normal(jax.random.key(1), (*shape, config.model.width))
    targets = jnp.asarray(zipf_words(vocab_size, shape))

    def nll(model: DecoderLM, features: jax.Array) -> jax.Array:
        return model.vocabulary.token_nll(features, targets)

    def total(params: dict, features: jax.Array) -> jax.Array:
        return model.apply({"params": params}, features, method=nll).sum()

    return Step(functools.partial(_repeat, jax.jit(jax.value_and_grad(total, (0, 1))), params, features))


def _repeat(function: Callable[..., Any], params: Any, features: Any, steps: int) -> None:
    import jax

    for _ in range(steps):
        result = function(params, features)
    jax.block_until_ready(result)
