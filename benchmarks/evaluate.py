"""`python -m benchmarks evaluate`: sliding windows of the paper's small model.

A measured pass is the evaluator's own, from tokens to each token's NLL on the host. The
peer computes like the paper's code: whole windows, and all words' log-probabilities.
"""

import argparse

from alibi.config import Config, read_config
from alibi.model.flops import keys_seen
from benchmarks.processes import Contender, Step, repeated, require_torch
from benchmarks.rounds import Column, Row, Runners, compare, whole_numbers
from benchmarks.training_contenders import zipf_words
from configs import wikitext103

VOCABULARY = 13_792
TURN_SECONDS = 3.0  # of a contender in a round
PEER_ROWS = (1, 16, 64)  # windows a batch
PEER_WINDOWS = 256  # of a pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, default=64, help="inputs of a window")
    parser.add_argument("--stride", type=int, default=1, help="tokens that each window scores")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text")
    parser.add_argument(
        "--batch_tokens", default="4096,16384", help="inputs of a batch, comma-separated"
    )
    parser.add_argument(
        "--peer", choices=("torch", "none"), default="none", help="whom to compare with"
    )
    parser.set_defaults(command=compare_batches)


def compare_batches(arguments: argparse.Namespace) -> list[Row]:
    """Measures each token budget of a batch, on request beside PyTorch."""
    length, stride, tokens = arguments.length, arguments.stride, arguments.tokens
    contenders, inputs, peers = {}, {}, []
    for budget in whole_numbers(arguments.batch_tokens, "batch_tokens"):
        inputs[f"{budget:,} inputs a batch"] = budget
        contenders[f"{budget:,} inputs a batch"] = Contender(
            _pass_over_text, (budget, length, stride, tokens)
        )
    if arguments.peer == "torch":
        require_torch()
        for rows in PEER_ROWS:
            peers.append(f"PyTorch, {rows:,} windows a batch")
            contenders[peers[-1]] = Contender(_torch_pass, (length, stride, rows))
    flops = window_flops(small_config(), length, stride)

    def row_of(name: str, runners: Runners, peak: float) -> Row:
        windows = PEER_WINDOWS if name in peers else -(-tokens // stride)
        rate = runners[name].rate(windows)
        passes = {peer: runners[name].times_as_fast(runners[peer]) for peer in peers}
        return {
            "length": length,
            "stride": stride,
            "windows": windows,
            "batch_tokens": inputs.get(name),
            "seconds": runners[name].seconds.get("run"),
            "windows_per_second": rate,
            "tokens_per_second": rate and rate * stride,
            "of_peers": {
                peer: ratio and ratio * windows / PEER_WINDOWS for peer, ratio in passes.items()
            },
            # A peer computes more than a window needs.
            "share_of_matmul_peak": rate * flops / peak if rate and name in inputs else None,
        }

    columns = [
        Column("windows/s", "windows_per_second", ",.0f"),
        Column("tokens/s", "tokens_per_second", ",.0f"),
        Column("share of peak", "share_of_matmul_peak"),
        *(Column(f"x {peer}", ("of_peers", peer)) for peer in peers),
    ]
    return compare(
        f"L={length:,}, stride {stride:,}",
        columns,
        "evaluate",
        contenders,
        arguments.rounds,
        row_of,
        turn_seconds=TURN_SECONDS,
        title="evaluation",
    )


def small_config() -> Config:
    """Returns 4 layers with width 64, 8 heads, cutoffs 2,000 and 6,000, L = 64, without dropout, as in
    evaluations.
    """
    config = wikitext103.get_config("length=64,model.cutoffs=2000:6000")
    config.model.update(
        num_layers=4,
        width=64,
        num_heads=8,
        feed_forward=256,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        softmax_dropout=0.0,
    )
    return read_config(config)


def window_flops(config: Config, length: int, stride: int) -> float:
    """Returns the operations in a window's necessary products: the last layer has `stride` queries.

    Attention counts the visible keys, the softmax the head alone.
    """
    model = config.model
    width, hidden = model.width, model.feed_forward
    # queries, keys, values, out, and the feed-forward layer
    of_token = 2 * (4 * width**2 + 2 * width * hidden)
    whole = length * of_token + 4 * width * keys_seen(model.window, length)
    reach = min(model.window or length, length)
    last = (
        length * 2 * 2 * width**2
        + stride * (of_token - 2 * 2 * width**2)
        + 4 * width * stride * reach
    )
    head = model.cutoffs[0] + len(model.cutoffs) if model.embedding == "adaptive" else VOCABULARY
    return (model.num_layers - 1) * whole + last + 2 * stride * width * head


def _pass_over_text(budget: int, length: int, stride: int, num_tokens: int) -> Step:
    """Scores with the small model's initial parameters: the speed is the same."""
    import jax
    import jax.numpy as jnp

    from alibi.evaluation.scorer import Scorer, model_nll
    from alibi.model.decoder import build_model
    from alibi.objectives import NextToken

    model, objective = build_model(small_config(), VOCABULARY), NextToken(VOCABULARY, boundary_id=2)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    scorer = Scorer(model_nll(model), objective=objective, batch_tokens=budget)
    tokens = zipf_words(VOCABULARY, (num_tokens,))
    return Step({"run": repeated(lambda: scorer.score(params, tokens, length, stride))})


def _torch_pass(length: int, stride: int, rows: int) -> Step:
    """Scores with the small model in PyTorch, `PEER_WINDOWS` windows a pass, `rows` windows a batch."""
    from benchmarks.torch_peer import PaperDecoder, make_scorer

    tokens = zipf_words(VOCABULARY, (length + 1 + (PEER_WINDOWS - 1) * stride,))
    score = make_scorer(PaperDecoder(small_config(), VOCABULARY), tokens, length, stride, rows)
    return Step({"run": repeated(lambda: score().tolist())})
