"""`scripts/benchmark.py train`: training steps, against PyTorch, and by length."""

import argparse
import statistics
from typing import Any

from alibi.config import make_config, read_config
from alibi.model.flops import model_flops
from benchmarks.processes import Contender
from benchmarks.rounds import about, known, measured_on, print_failures, print_table, run_rounds, text, whole_numbers
from benchmarks.training_contenders import (
    VOCABULARY,
    contender_without_attention,
    project_contender,
    torch_contender,
)
from configs import quickstart

# Of one contender in one round: short, since a shared machine's speed changes by half within seconds.
TURN_SECONDS = 0.5

LENGTHS = "128,512,2048,8192"
SHAPES = {
    "quickstart": lambda arg: read_config(quickstart.get_config(arg)),
    "wide": lambda arg: make_config(
        "model.num_layers=6,model.width=512,model.num_heads=8,model.feed_forward=2048,length=512," + arg
    ),
}


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", choices=("torch", "none"), default="none", help="whom to compare with")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"some of {', '.join(SHAPES)}; or none")
    parser.add_argument("--lengths", help=f"tokens of a sequence; or none; default: {LENGTHS}, with a peer none")
    parser.add_argument("--batch_tokens", type=int, default=8192, help="tokens a step sees at each of the lengths")
    parser.set_defaults(command=compare_training)


def compare_training(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """tokens/s at each shape, where asked for beside PyTorch's, and at each length."""
    lengths = arguments.lengths or (LENGTHS if arguments.peer == "none" else "none")
    shapes = [known(name, SHAPES, "shape") for name in arguments.shapes.split(",") if name != "none"]
    numbers = [] if lengths == "none" else whole_numbers(lengths, "lengths")
    for length in numbers:
        if arguments.batch_tokens % length:
            raise ValueError(f"--batch_tokens={arguments.batch_tokens} must be a multiple of the length {length}")
    rows = []
    for shape in shapes:
        rows += _compare_shape(shape, arguments.peer, arguments.rounds)
    for length in numbers:
        rows += compare_length(length, arguments.batch_tokens, arguments.rounds)
    return rows


def _compare_shape(shape: str, peer: str, rounds: int) -> list[dict[str, Any]]:
    """tokens/s of this project's step, and of PyTorch's eager and compiled."""
    config = SHAPES[shape]("")
    contenders = {"alibi (JAX)": project_contender(config)}
    if peer == "torch":
        for mode in ("eager", "compiled"):
            contenders[f"PyTorch {mode}"] = torch_contender(config, compiled=mode == "compiled")
    model = config.model
    print(
        f"\n{shape}: {model.num_layers} layers, width {model.width}, {model.num_heads} heads, feed-forward "
        f"{model.feed_forward}, {VOCABULARY} tokens of vocabulary, L={config.train_length}, "
        f"{config.train.batch_tokens} tokens a step, float32, {config.position}"
    )
    measured = _measure(contenders, rounds, config.train.batch_tokens, model_flops(config, VOCABULARY))
    peers = [row for row in measured[1:] if not row["failed"]]
    best = max(peers, key=lambda row: row["tokens_per_second"], default=None)
    for row in measured:
        row["of_best_peer"] = best and _times_as_fast(row, best)
    _print_rows(measured, {"x best peer": "of_best_peer"})
    return [{"benchmark": "train", "shape": shape, **row} for row in measured]


def compare_length(length: int, batch_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """tokens/s, memory and attention's share of the quickstart's model at one length, ALiBi beside sinusoidal."""
    methods = ("alibi", "sinusoidal")
    arguments = f"length={length},train.batch_tokens={batch_tokens}"
    configs = {method: read_config(quickstart.get_config(f"position={method},{arguments}")) for method in methods}
    contenders = {method: project_contender(config) for method, config in configs.items()}
    contenders |= {_without(method): contender_without_attention(config) for method, config in configs.items()}
    print(f"\nthe quickstart's model at L={length}, {batch_tokens} tokens a step, float32")
    measured = _measure(contenders, rounds, batch_tokens, model_flops(configs["alibi"], VOCABULARY))
    by_name = {row["contender"]: row for row in measured}
    for row in measured:
        row["of_sinusoidal"] = _times_as_fast(row, by_name["sinusoidal"])
    for method in methods:
        kept = _times_as_fast(by_name[method], by_name[_without(method)])
        by_name[method]["share_in_attention"] = None if kept is None else 1.0 - kept
        by_name[_without(method)]["share_of_matmul_peak"] = None  # its operations are not those that are counted
    _print_rows(measured, {"x sinusoidal": "of_sinusoidal", "in attention": "share_in_attention"})
    print(
        "in attention: the part of the step's time that is saved, in the same rounds, where queries, keys and values\n"
        "are only multiplied and added element by element in place of attention; projections are no part of it"
    )
    return [{"benchmark": "train", "shape": f"quickstart, L={length}", "length": length, **row} for row in measured]


def _without(method: str) -> str:
    return f"{method}, no attention"


def _times_as_fast(row: dict[str, Any], other: dict[str, Any]) -> float | None:
    """The median of the rounds' ratios: the machine drifts less within a round than between them."""
    if row["failed"] or other["failed"]:
        return None
    return statistics.median(b / a for a, b in zip(row["step_seconds"], other["step_seconds"], strict=True))


def _measure(
    contenders: dict[str, Contender], rounds: int, tokens: int, flops_per_token: float
) -> list[dict[str, Any]]:
    """Rows of the contenders: medians over `rounds` rounds in which each is timed in turn."""
    runners, peak = run_rounds(contenders, rounds, turn_seconds=TURN_SECONDS, title="training steps")
    rows = []
    for name, runner in runners.items():
        seconds = runner.median("run")
        rows.append(
            {
                "contender": name,
                "failed": runner.failed,
                "tokens_per_second": seconds and tokens / seconds,
                "step_seconds": runner.seconds.get("run"),
                "share_of_matmul_peak": seconds and tokens * flops_per_token / seconds / peak,
                "matmul_gflops": peak / 1e9,
                "first_step_seconds": runner.answer.get("first_seconds"),
                "peak_memory_bytes": runner.peak_memory,
                "step_memory_bytes": runner.answer.get("step_memory_bytes"),
                **about(rounds),
            }
        )
    return rows


def _print_rows(rows: list[dict[str, Any]], ratios: dict[str, str]) -> None:
    """A table; `ratios` are the keys of two-digit columns, by their titles."""
    print(f"{measured_on(rows[0])}\n")
    print_table(
        ["", "tokens/s", *ratios, "share of peak", "first step, s", "process, MB", "a step, MB"],
        [
            [
                row["contender"],
                text(row["tokens_per_second"], ",.0f"),
                *(text(row.get(key), ".2f") for key in ratios.values()),
                text(row["share_of_matmul_peak"], ".2f"),
                text(row["first_step_seconds"], ".1f"),
                text(row["peak_memory_bytes"], ",.0f", 1e-6),
                text(row["step_memory_bytes"], ",.0f", 1e-6),
            ]
            for row in rows
        ],
    )
    print_failures(rows)
