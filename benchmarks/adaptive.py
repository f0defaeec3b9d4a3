"""`python -m benchmarks adaptive`: training with adaptive embeddings, and their loss against a
dense softmax.
"""

import argparse
import time

from alibi.config import Config, read_config, replaced
from benchmarks.processes import Contender, Step, peak_memory, repeated, require_torch
from benchmarks.rounds import Column, Row, Runners, compare, conditions, show
from benchmarks.training_contenders import torch_step, training_step, zipf_words
from configs import wikitext2, wikitext103

TURN_SECONDS = 1.5  # of a contender in a round
VOCABULARY, CUTOFFS = 13_792, "2000:6000"  # of the small model
PAPER_VOCABULARY = 267_744
BATCH_TOKENS = 2_048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size",
        choices=("small", "paper"),
        default="small",
        help="paper: one step of 247M parameters",
    )
    parser.add_argument(
        "--peer", choices=("torch", "none"), default="none", help="whom to compare with"
    )
    parser.set_defaults(command=compare_losses)


def compare_losses(arguments: argparse.Namespace) -> list[Row]:
    """Measures a small model's training step, and its softmax alone beside a dense softmax of the
    same vocabulary.
    """
    if arguments.size == "paper":
        if arguments.peer != "none":
            raise ValueError(
                f"--peer={arguments.peer} has no step of --size=paper; leave one of the two out"
            )
        return [_paper_step()]
    config = read_config(
        wikitext2.get_config(
            f"model.cutoffs={CUTOFFS},train.batch_tokens={BATCH_TOKENS},mesh.data=1"
        )
    )
    ours, peer = "training step, adaptive", "training step, PyTorch"
    contenders = {
        ours: Contender(training_step, (config, VOCABULARY)),
        "loss alone, adaptive": Contender(_loss, (config, VOCABULARY)),
        "loss alone, dense": Contender(
            _loss, (replaced(config, {"model.embedding": "tied"}), VOCABULARY)
        ),
    }
    if arguments.peer == "torch":
        require_torch()
        contenders[peer] = Contender(torch_step, (config, VOCABULARY, False))

    def row_of(name: str, runners: Runners, peak: float) -> Row:
        runner = runners[name]
        of_peer = runner.times_as_fast(runners.get(peer)) if name == ours else None
        return {
            "step_seconds": runner.median(),
            "words_per_second": runner.rate(BATCH_TOKENS),
            "of_peer": of_peer,
        }

    headline = (
        f"{config.model.num_layers} layers, width {config.model.width}, {VOCABULARY:,} words, cutoffs {CUTOFFS}, "
        f"L={config.train_length}, {BATCH_TOKENS:,} words a step, float32, {config.position}"
    )
    columns = [
        Column("words/s", "words_per_second", ",.0f"),
        Column("ms a step", "step_seconds", ".1f", 1e3),
        Column("x PyTorch", "of_peer"),
    ]
    return compare(
        headline,
        columns,
        "adaptive",
        contenders,
        arguments.rounds,
        row_of,
        turn_seconds=TURN_SECONDS,
        title="adaptive",
    )


def _paper_step() -> Row:
    """Measures an update of the 247M model: 9,216 tokens in micro-batches of 1,024."""
    keys = "train.max_device_tokens=1024,train.batch_tokens=9216,mesh.data=1"
    start = time.perf_counter()
    step = training_step(read_config(wikitext103.get_config(keys)), PAPER_VOCABULARY)
    ready = time.perf_counter()
    step.parts["run"](1)
    row = {
        "benchmark": "adaptive",
        "contender": "one step of 247M parameters",
        "prepare_seconds": ready - start,
        "step_seconds": time.perf_counter() - ready,
        "peak_memory_bytes": peak_memory(),
        **step.facts,
        **conditions(1),
    }
    columns = [
        Column("s", "step_seconds", ".0f"),
        Column("prepared in, s", "prepare_seconds", ".0f"),
        Column("process, GiB", "peak_memory_bytes", ".1f", 2.0**-30),
        Column("compiler's, GiB", "step_memory_bytes", ".1f", 2.0**-30),
    ]
    show("the paper's model", [row], columns)
    return row


def _loss(config: Config, vocab_size: int) -> Step:
    """Returns value and gradient of the softmax layer alone."""
    import jax
    import jax.numpy as jnp

    from alibi.model.decoder import build_model

    model = build_model(config, vocab_size)
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    shape = (config.train.batch_tokens // config.train_length, config.train_length)
    features = jax.random.normal(jax.random.key(1), (*shape, config.model.width))
    targets = jnp.asarray(zipf_words(vocab_size, shape))

    def total(params: dict, features: jax.Array) -> jax.Array:
        bound = model.bind({"params": params})
        return bound.vocabulary.token_losses(features, targets, summed=True)[0]

    gradient = jax.jit(jax.value_and_grad(total, (0, 1)))
    return Step({"run": repeated(lambda: gradient(params, features))})
