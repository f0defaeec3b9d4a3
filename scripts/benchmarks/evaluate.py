"""`scripts/benchmark.py evaluate`: sliding windows of the paper's small model or of a work directory.

A measured pass is the evaluator's own, from tokens to each one's NLL on the host. The
peer computes what the paper's code does: whole windows, and all words' log-probabilities.
"""

import argparse
from typing import Any

from alibi.config import Config, read_config
from alibi.model.flops import keys_seen
from alibi.runs import RunDirectory
from benchmarks.processes import Contender, Step, require_torch
from benchmarks.rounds import about, measured_on, print_failures, print_table, run_rounds, text, whole_numbers
from benchmarks.words import zipf_words
from configs import wikitext103

VOCABULARY = 13_792
TURN_SECONDS = 3.0  # of one contender in one round
PEER_ROWS = (1, 16, 64)  # windows a batch
PEER_WINDOWS = 256  # of a pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", default="", help="a run to measure, in place of the small model")
    parser.add_argument("--length", type=int, default=64, help="inputs of a window")
    parser.add_argument("--stride", type=int, default=1, help="tokens that each window scores")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text")
    parser.add_argument("--batch_tokens", default="4096,16384", help="inputs of a batch, comma-separated")
    parser.add_argument("--peer", choices=("torch", "none"), default="none", help="whom to compare with")
    parser.set_defaults(command=compare)


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of each token budget: medians over the rounds."""
    length, stride, tokens = arguments.length, arguments.stride, arguments.tokens
    budgets = whole_numbers(arguments.batch_tokens, "batch_tokens")
    contenders = {
        f"{budget:,} inputs a batch": Contender(_pass_over_text, (arguments.workdir, budget, length, stride, tokens))
        for budget in budgets
    }
    inputs = dict(zip(contenders, budgets, strict=True))  # of a batch; a peer computes more than a window needs
    peers = _peers(arguments)
    windows = dict.fromkeys(contenders, -(-tokens // stride)) | dict.fromkeys(peers, PEER_WINDOWS)
    runners, peak = run_rounds(contenders | peers, arguments.rounds, turn_seconds=TURN_SECONDS, title="evaluation")
    config = RunDirectory(arguments.workdir).config() if arguments.workdir else small_config()
    flops = window_flops(config, length, stride)
    rates = {name: runner.median("run") and windows[name] / runner.median("run") for name, runner in runners.items()}
    rows = []
    for name, runner in runners.items():
        rate = rates[name]
        rows.append(
            {
                "benchmark": "evaluate",
                "contender": name,
                "failed": runner.failed,
                "length": length,
                "stride": stride,
                "windows": windows[name],
                "batch_tokens": inputs.get(name),
                "seconds": runner.seconds.get("run"),
                "windows_per_second": rate,
                "tokens_per_second": rate and rate * stride,
                "of_peers": {peer: rate / rates[peer] if rate and rates[peer] else None for peer in peers},
                "matmul_gflops": peak / 1e9,
                "share_of_matmul_peak": rate * flops / peak if rate and name in inputs else None,
                **about(arguments.rounds),
            }
        )
    _print_rows(rows)
    return rows


def small_config() -> Config:
    """4 layers of width 64, 8 heads, adaptive cutoffs 2,000 and 6,000, L = 64; without dropout, as evaluations are."""
    config = wikitext103.get_config("length=64,model.cutoffs=2000:6000")
    config.model.update(num_layers=4, width=64, num_heads=8, feed_forward=256)
    config.model.update(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, softmax_dropout=0.0)
    return read_config(config)


def window_flops(config: Config, length: int, stride: int) -> float:
    """Multiplications and additions of the products that a window needs: the last layer's queries are `stride`.

    Attention is counted for the keys that are seen, the softmax for the head alone.
    """
    model = config.model
    width, hidden = model.width, model.feed_forward
    of_token = 2 * (4 * width**2 + 2 * width * hidden)  # queries, keys, values, out, and the feed-forward layer
    whole = length * of_token + 4 * width * keys_seen(model.window, length)
    reach = min(model.window or length, length)
    last = length * 2 * 2 * width**2 + stride * (of_token - 2 * 2 * width**2) + 4 * width * stride * reach
    head = model.cutoffs[0] + len(model.cutoffs) if model.embedding == "adaptive" else VOCABULARY
    return (model.num_layers - 1) * whole + last + 2 * stride * width * head


def _pass_over_text(workdir: str, budget: int, length: int, stride: int, num_tokens: int) -> Step:
    """The run in `workdir`, or the small model with initial parameters, whose speed is the same."""
    import jax
    import jax.numpy as jnp

    from alibi.evaluation.perplexity import Scorer, model_nll, run_scorer
    from alibi.model.decoder import build_model
    from alibi.runs.trained import TrainedRun

    if workdir:
        run = TrainedRun(workdir, batch_tokens=budget)
        scorer, params, vocab_size = run_scorer(run), run.params, run.tokenizer.vocab_size
    else:
        model, vocab_size = build_model(small_config(), VOCABULARY), VOCABULARY
        params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        scorer = Scorer(model_nll(model), boundary_id=2, batch_tokens=budget)
    tokens = zipf_words(vocab_size, (num_tokens,))

    def score(passes: int) -> None:
        for _ in range(passes):
            scorer.score(params, tokens, length, stride)

    return Step(score)


def _peers(arguments: argparse.Namespace) -> dict[str, Contender]:
    """PyTorch's contenders, if they are asked for."""
    if arguments.peer == "none":
        return {}
    if arguments.workdir:
        raise ValueError("--peer=torch is a peer of the small model; leave out --workdir")
    require_torch()
    shape = arguments.length, arguments.stride
    return {f"PyTorch, {rows:,} windows a batch": Contender(_torch_pass, (*shape, rows)) for rows in PEER_ROWS}


def _torch_pass(length: int, stride: int, rows: int) -> Step:
    """The small model in PyTorch, `PEER_WINDOWS` windows a pass, so many of them a batch."""
    from benchmarks.torch_paper import make_decoder, make_scorer

    tokens = zipf_words(VOCABULARY, (length + 1 + (PEER_WINDOWS - 1) * stride,))
    score = make_scorer(make_decoder(small_config(), VOCABULARY), tokens, length, stride, rows)

    def run(passes: int) -> None:
        for _ in range(passes):
            score().tolist()

    return Step(run)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    first, peers = rows[0], list(rows[0]["of_peers"])
    about_text = f"L={first['length']:,}, stride {first['stride']:,}"
    print(f"{about_text}; {measured_on(first)}\n")
    print_table(
        ["", "windows/s", "tokens/s", "share of peak"] + [f"x {peer}" for peer in peers],
        [
            [
                row["contender"],
                text(row["windows_per_second"], ",.0f"),
                text(row["tokens_per_second"], ",.0f"),
                text(row["share_of_matmul_peak"], ".2f"),
                *(text(row["of_peers"][peer], ".2f") for peer in peers),
            ]
            for row in rows
        ],
    )
    print_failures(rows)
