"""Measures training and attention on this machine, against PyTorch and Flax, and between the position methods.

    python scripts/benchmark.py train --peer=torch    # tokens/s of a training step at two shapes
    python scripts/benchmark.py positions             # tokens/s and memory of each position method
    python scripts/benchmark.py attention --lengths=1024,4096,16384 --peer=torch,flax
    python scripts/benchmark.py evaluate              # windows/s of sliding windows
    python scripts/benchmark.py adaptive              # words/s of adaptive embeddings; --size=paper: a step of 247M

Each contender lives in a process of its own. In every round each is timed in turn while
the others sleep, and so is a float32 matrix product, because the speed of a shared
machine drifts: compare within one run only. Printed are medians over the rounds;
--json=FILE writes them as rows with the machine, the versions and the date.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Iterable
from typing import Any

# A clone works without being installed: python scripts/benchmark.py has only scripts/ on its path.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import benchmark_adaptive
import benchmark_attention
import benchmark_evaluate
from benchmark_attention_contenders import Shape
from benchmark_contenders import (
    VOCABULARY,
    Contender,
    matmul_contender,
    model_flops_per_token,
    project_contender,
    torch_contender,
)

from alibi.attention.backends import BACKENDS
from alibi.positions import METHODS
from configs import base, quickstart

ROUND_SECONDS = 1.5  # of one contender in one round

SHAPES = {
    "quickstart": quickstart.get_config,
    "wide": lambda arg: base.get_config(
        "model.num_layers=6,model.width=512,model.num_heads=8,model.feed_forward=2048,length=512," + arg
    ),
}


def main() -> int:
    arguments = _parser().parse_args()
    try:
        rows = arguments.command(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def compare_training(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """tokens/s of this project's step, and of PyTorch's eager and compiled, at each shape."""
    rows = []
    for shape in arguments.shapes.split(","):
        config = SHAPES[_known(shape, SHAPES, "shape")]("")
        contenders = {"alibi (JAX)": project_contender(config)}
        if arguments.peer == "torch":
            for mode in ("eager", "compiled"):
                contenders[f"PyTorch {mode}"] = torch_contender(config, compiled=mode == "compiled")
        model = config.model
        print(
            f"\n{shape}: {model.num_layers} layers, width {model.width}, {model.num_heads} heads, feed-forward "
            f"{model.feed_forward}, {VOCABULARY} tokens of vocabulary, L={config.train_length}, "
            f"{config.train.batch_tokens} tokens a step, float32, {config.position}"
        )
        measured = _measure(contenders, arguments.rounds, config.train.batch_tokens, model_flops_per_token(config))
        peers = [row["tokens_per_second"] for row in measured[1:]]
        for row in measured:
            row["of_best_peer"] = row["tokens_per_second"] / max(peers) if peers else None
        rows += [{"benchmark": "train", "shape": shape, **row} for row in measured]
        _print(measured, "of_best_peer", "x best peer")
    return rows


def compare_positions(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """tokens/s and memory of each position method in the quickstart's model."""
    contenders = {}
    config = quickstart.get_config(f"length={arguments.length}")
    for name in arguments.positions.split(","):
        position = _known(name, METHODS, "position method")
        contenders[name] = project_contender(quickstart.get_config(f"position={position},length={arguments.length}"))
    print(f"\nthe quickstart's model at L={arguments.length}, {config.train.batch_tokens} tokens a step")
    measured = _measure(contenders, arguments.rounds, config.train.batch_tokens, model_flops_per_token(config))
    reference = {row["contender"]: row["tokens_per_second"] for row in measured}.get("sinusoidal")
    for row in measured:
        row["of_sinusoidal"] = row["tokens_per_second"] / reference if reference else None
    _print(measured, "of_sinusoidal", "x sinusoidal")
    return [{"benchmark": "positions", "shape": f"quickstart, L={arguments.length}", **row} for row in measured]


def compare_attention(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time, memory and share of the peak of attention alone, at each length, and of the peers'.

    Queries, keys and values are normal; how much can be skipped depends on their norms.
    """
    if arguments.heads < 1 or arguments.heads & (arguments.heads - 1):
        raise ValueError(f"--heads={arguments.heads} must be a power of two: only then all contenders' slopes agree")
    backends = [_known(name, ["auto", *BACKENDS], "attention backend") for name in arguments.backends.split(",")]
    epsilons = [None if text.lower() == "none" else float(text) for text in arguments.skip_epsilon.split(",")]
    peers = [_known(name, benchmark_attention.PEERS, "peer") for name in arguments.peer.split(",") if name != "none"]
    rows = []
    for length in map(int, arguments.lengths.split(",")):
        shape = Shape(length, arguments.batch, arguments.heads, arguments.head_dim, arguments.dtype)
        rounds = arguments.rounds
        if length >= benchmark_attention.LONG:
            rounds = min(rounds, benchmark_attention.LONG_ROUNDS)
        entrants, theirs = benchmark_attention.contenders(shape, backends, epsilons, peers)
        measured = benchmark_attention.measure(shape, entrants, theirs, rounds)
        measured = [{"benchmark": "attention", **row, **_about(rounds)} for row in measured]
        benchmark_attention.print_rows(measured)
        rows += measured
    return rows


def _measure(
    contenders: dict[str, Contender], rounds: int, tokens: int, flops_per_token: float
) -> list[dict[str, Any]]:
    """Rows of the contenders: medians over `rounds` rounds in which each is timed in turn."""
    processes = {name: contender.start() for name, contender in {**contenders, "matmul": matmul_contender()}.items()}
    try:
        # One at a time: their compilations would slow each other down.
        ready = {name: process.prepare() for name, process in processes.items()}
        steps = {name: max(1, round(ROUND_SECONDS / ready[name]["step_seconds"])) for name in processes}
        seconds: dict[str, list[float]] = {name: [] for name in processes}
        for number in range(rounds):
            for name, process in processes.items():
                seconds[name].append(process.run(steps[name]) / steps[name])
            print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        memory = {name: process.peak_memory() for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.stop()
    peak = ready["matmul"]["flops"] / statistics.median(seconds.pop("matmul"))
    about = _about(rounds)
    return [
        {
            "contender": name,
            "tokens_per_second": tokens / statistics.median(times),
            "step_seconds": times,
            "share_of_matmul_peak": tokens * flops_per_token / statistics.median(times) / peak,
            "matmul_gflops": peak / 1e9,
            "first_step_seconds": ready[name]["first_seconds"],
            "peak_memory_bytes": memory[name],
            "step_memory_bytes": ready[name]["step_memory_bytes"],
            **about,
        }
        for name, times in seconds.items()
    ]


def _about(rounds: int) -> dict[str, Any]:
    """What a row must say for its figures to mean something."""
    versions = {}
    for package in ("jax", "jaxlib", "flax", "optax", "torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}
    return {"rounds": rounds, "machine": machine, "versions": versions, "date": date}


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _print(rows: list[dict[str, Any]], ratio: str, ratio_title: str) -> None:
    first = rows[0]
    print(
        f"{first['machine']['cpu']}, {first['machine']['cores']} cores, {first['date']}; float32 matmul peak "
        f"{first['matmul_gflops']:.0f} GFLOP/s; medians of {first['rounds']} rounds\n"
    )
    print(f"| {'':12} | tokens/s | {ratio_title} | share of peak | first step, s | process, MB | a step, MB |")
    print(
        f"|:{'-' * 12}-|---------:|{'-' * (len(ratio_title) + 1)}:"
        "|--------------:|--------------:|------------:|-----------:|"
    )
    for row in rows:
        step_memory = row["step_memory_bytes"]
        print(
            f"| {row['contender']:16} | {row['tokens_per_second']:8,.0f} "
            f"| {_text(row[ratio], '.2f'):>{len(ratio_title)}} | {row['share_of_matmul_peak']:13.2f} "
            f"| {row['first_step_seconds']:13.1f} | {row['peak_memory_bytes'] / 1e6:11,.0f} "
            f"| {_text(step_memory and step_memory / 1e6, ',.0f'):>10} |",
            flush=True,
        )


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _known(name: str, choices: Iterable[str], what: str) -> str:
    if name not in choices:
        raise ValueError(f"unknown {what} {name!r}; use {', '.join(choices)}")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="the training step, against PyTorch")
    train.add_argument("--peer", choices=("torch", "none"), default="none", help="whom to compare with")
    train.add_argument("--shapes", default=",".join(SHAPES), help=f"some of {', '.join(SHAPES)}")
    train.set_defaults(command=compare_training)
    positions = commands.add_parser("positions", help="the position methods, against each other")
    positions.add_argument("--positions", default=",".join(METHODS), help="methods, comma-separated")
    positions.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    positions.set_defaults(command=compare_positions)
    attention = commands.add_parser("attention", help="attention alone at several lengths, against PyTorch and Flax")
    attention.add_argument("--lengths", default="1024,4096,16384", help="tokens of a sequence, comma-separated")
    attention.add_argument("--peer", default="none", help=f"some of {', '.join(benchmark_attention.PEERS)}; or none")
    attention.add_argument("--backends", default="auto", help=f"some of auto, {', '.join(BACKENDS)}")
    attention.add_argument("--skip_epsilon", default="none,0,1e-6", help="shares of mass that may be lost; or none")
    for name, value in (("batch", 1), ("heads", 8), ("head_dim", 64)):
        attention.add_argument(f"--{name}", type=int, default=value)
    attention.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    attention.set_defaults(command=compare_attention)
    evaluate = benchmark_evaluate.register(commands)
    adaptive = commands.add_parser(
        "adaptive", help="adaptive embeddings: training, and the loss against a dense softmax"
    )
    benchmark_adaptive.add_arguments(adaptive)
    for command in (train, positions, attention, adaptive, evaluate):
        command.add_argument("--rounds", type=int, default=7, help="at least 5 for figures to be told")
        command.add_argument("--json", help="file to write the rows to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
