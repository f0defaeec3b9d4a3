"""Evaluation with sliding windows: windows/s of the paper's small model or a work directory.

The measured pass is the evaluator's own, from tokens to each one's NLL on the host.
"""

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from alibi.evaluation.perplexity import Scorer, model_nll
from alibi.model import build_model
from alibi.trained import TrainedRun
from configs import wikitext103

VOCABULARY = 13_792
PEAK_SIZE, PEAK_ROUNDS = 2048, 3  # of the float32 matrix product that shares are of


def small_config() -> ConfigDict:
    """4 layers of width 64, 8 heads, adaptive cutoffs 2,000 and 6,000, L = 64."""
    config = wikitext103.get_config("length=64,model.cutoffs=2000:6000")
    config.model.update(num_layers=4, width=64, num_heads=8, feed_forward=256)
    return config


def compare_evaluation(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of each token budget: medians over the rounds."""
    length, stride = arguments.length, arguments.stride
    rows = []
    for budget in map(int, arguments.batch_tokens.split(",")):
        config, scorer, params, vocabulary = _prepare(arguments.workdir, budget)
        tokens = np.random.default_rng(0).integers(4, vocabulary, arguments.tokens).astype(np.int32)
        scorer.score(params, tokens, length, stride)  # compiles
        seconds, peaks = [], []
        for number in range(arguments.rounds):
            seconds.append(scorer.score(params, tokens, length, stride).seconds)
            peaks.append(_peak())
            print(f"\rround {number + 1} of {arguments.rounds}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        windows, peak = -(-tokens.size // stride), float(np.median(peaks))
        rate = windows / float(np.median(seconds))
        rows.append(
            {
                "benchmark": "evaluate",
                "length": length,
                "stride": stride,
                "tokens": tokens.size,
                "batch_tokens": budget,
                "rounds": arguments.rounds,
                "seconds": seconds,
                "windows_per_second": rate,
                "tokens_per_second": rate * stride,
                "inputs_per_second": rate * length,
                "matmul_gflops": peak / 1e9,
                "share_of_matmul_peak": rate * window_flops(config, length, stride) / peak,
            }
        )
    _print(rows)
    return rows


def window_flops(config: ConfigDict, length: int, stride: int) -> float:
    """Multiplications and additions of the products that a window needs: the last layer's queries are `stride`.

    Attention is counted for the causal half, the softmax for the head alone.
    """
    model = config.model
    width, hidden = model.width, model.feed_forward
    of_token = 2 * (4 * width**2 + 2 * width * hidden)  # queries, keys, values, out, and the feed-forward layer
    whole = length * of_token + 2 * width * length * (length + 1)
    last = length * 2 * 2 * width**2 + stride * (of_token - 2 * 2 * width**2) + 4 * width * stride * length
    head = model.cutoffs[0] + len(model.cutoffs) if model.embedding == "adaptive" else VOCABULARY
    return (model.num_layers - 1) * whole + last + 2 * stride * width * head


def _prepare(workdir: str, budget: int) -> tuple[ConfigDict, Scorer, Any, int]:
    """The run in `workdir`, or the small model with initial parameters, whose speed is the same."""
    if workdir:
        run = TrainedRun(workdir, batch_tokens=budget)
        return run.config, run.scorer, run.params, run.tokenizer.vocab_size
    config = small_config()
    model = build_model(config, VOCABULARY)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return config, Scorer(model_nll(model), boundary_id=2, batch_tokens=budget), params, VOCABULARY


def _peak() -> float:
    """FLOP/s of a large float32 product, in the same seconds as what is measured."""
    matrix = jnp.ones((PEAK_SIZE, PEAK_SIZE), jnp.float32)
    jax.block_until_ready(_product(matrix))
    start = time.perf_counter()
    for _ in range(PEAK_ROUNDS):
        jax.block_until_ready(_product(matrix))
    return PEAK_ROUNDS * 2 * PEAK_SIZE**3 / (time.perf_counter() - start)


_product = jax.jit(lambda matrix: matrix @ matrix)


def _print(rows: list[dict[str, Any]]) -> None:
    print(f"L = {rows[0]['length']:,}, stride {rows[0]['stride']:,}, medians of {rows[0]['rounds']} rounds\n")
    print("| batch tokens | windows/s | tokens/s | inputs/s | share of matmul peak |")
    print("|-------------:|----------:|---------:|---------:|---------------------:|")
    for row in rows:
        print(
            f"| {row['batch_tokens']:12,} | {row['windows_per_second']:9,.0f} | {row['tokens_per_second']:8,.0f} "
            f"| {row['inputs_per_second']:8,.0f} | {row['share_of_matmul_peak']:20.2f} |"
        )


def register(commands: Any) -> argparse.ArgumentParser:
    """The command `evaluate` of scripts/benchmark.py."""
    parser = commands.add_parser("evaluate", help="sliding windows of the paper's small model or of a run")
    parser.add_argument("--workdir", default="", help="a run to measure, in place of the small model")
    parser.add_argument("--length", type=int, default=64, help="inputs of a window")
    parser.add_argument("--stride", type=int, default=1, help="tokens that each window scores")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text")
    parser.add_argument("--batch_tokens", default="4096,16384", help="inputs of a batch, comma-separated")
    parser.set_defaults(command=compare_evaluation)
    return parser
