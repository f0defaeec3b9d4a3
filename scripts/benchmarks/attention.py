"""`scripts/benchmark.py attention`: times attention alone, at several lengths, against Flax and PyTorch."""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

from alibi.attention.backends import OF_SEQUENCES
from benchmarks.attention_contenders import (
    AttentionContender,
    Shape,
    add_shape_arguments,
    flax_attention,
    project_attention,
    shape_of,
    torch_attention,
)
from benchmarks.attention_growth import growth, print_growth
from benchmarks.rounds import (
    Runner,
    about,
    known,
    measured_on,
    print_failures,
    print_table,
    run_rounds,
    text,
    whole_numbers,
)

TURN_SECONDS = 0.5  # of one pass of one contender in one round, but at least one call
LONG, LONG_ROUNDS = 16384, 3  # from this length on, at most so many rounds
BACKWARD_FLOPS = 3.5  # forward and backward pass, relative to the forward pass
PARTS = {"forward": "forward_seconds", "run": "both_seconds"}

# By the name of the peer; "no backward pass" is found out, not written here.
PEERS = {
    "torch": {
        "PyTorch sdpa, dense bias": lambda shape: torch_attention(shape, "dense"),
        "PyTorch FlexAttention": lambda shape: torch_attention(shape, "flex"),
    },
    "flax": {"Flax, dense bias": flax_attention},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", default="1024,4096,16384", help="tokens of a sequence, comma-separated")
    parser.add_argument("--peer", default="none", help=f"some of {', '.join(PEERS)}; or none")
    parser.add_argument("--backends", default="auto", help=f"some of auto, {', '.join(OF_SEQUENCES)}")
    parser.add_argument("--skip_epsilon", default="none,0,1e-6", help="shares of mass that may be lost; or none")
    add_shape_arguments(parser)
    parser.set_defaults(command=compare)


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time, memory and share of the peak of attention alone, at each length, and of the peers'; how the work grows.

    Queries, keys and values are normal; how much can be skipped depends on their norms.
    """
    if arguments.heads < 1 or arguments.heads & (arguments.heads - 1):
        raise ValueError(f"--heads={arguments.heads} must be a power of two: only then all contenders' slopes agree")
    backends = [known(name, ["auto", *OF_SEQUENCES], "attention backend") for name in arguments.backends.split(",")]
    epsilons = [None if epsilon.lower() == "none" else float(epsilon) for epsilon in arguments.skip_epsilon.split(",")]
    peers = [known(name, PEERS, "peer") for name in arguments.peer.split(",") if name != "none"]
    rows = []
    for length in whole_numbers(arguments.lengths, "lengths"):
        shape = shape_of(length, arguments)
        rounds = arguments.rounds
        if length >= LONG:
            rounds = min(rounds, LONG_ROUNDS)
        entrants, theirs = contenders(shape, backends, epsilons, peers)
        measured = measure(shape, entrants, theirs, rounds)
        measured = [{"benchmark": "attention", **row, **about(rounds)} for row in measured]
        print_rows(measured)
        rows += measured
    of_all = {key: getattr(arguments, key) for key in ("batch", "heads", "head_dim", "dtype")}
    exponents = [{**row, **of_all, **about(arguments.rounds)} for row in growth(rows)]
    print_growth(exponents)
    return rows + exponents


def contenders(
    shape: Shape, backends: list[str], skip_epsilons: list[float | None], peers: list[str]
) -> tuple[dict[str, AttentionContender], list[str]]:
    """Each contender by its name, and the names of the peers among them."""
    ours = {
        f"alibi {backend}, skip {'none' if epsilon is None else format(epsilon, 'g')}": project_attention(
            shape, backend, epsilon
        )
        for backend in backends
        for epsilon in skip_epsilons
    }
    theirs = {name: make(shape) for peer in peers for name, make in PEERS[peer].items()}
    return {**ours, **theirs}, list(theirs)


def measure(shape: Shape, entrants: dict[str, AttentionContender], peers: list[str], rounds: int) -> list[dict]:
    """Rows of the contenders: medians over `rounds` rounds in which each is timed in turn."""
    runners, peak = run_rounds(entrants, rounds, turn_seconds=TURN_SECONDS, title=f"L={shape.length}")
    return [
        {**_row(name, runner, shape, peak), **_ratios(runner, {peer: runners[peer] for peer in peers})}
        for name, runner in runners.items()
    ]


def _row(name: str, runner: Runner, shape: Shape, peak: float) -> dict[str, Any]:
    useful = {"forward": shape.forward_flops, "run": BACKWARD_FLOPS * shape.forward_flops}
    row = {"contender": name, **dataclasses.asdict(shape), "failed": runner.failed, "matmul_gflops": peak / 1e9}
    for part, title in PARTS.items():
        seconds = runner.median(part)
        row[title] = seconds
        row[f"{title}_of_rounds"] = runner.seconds.get(part)
        row[title.replace("seconds", "share_of_matmul_peak")] = seconds and useful[part] / seconds / peak
    for key in ("first_call_seconds", "memory_bytes", "compiler_bytes", "computed_weights", "no_backward"):
        row[key] = runner.answer.get(key)
    return row


def _ratios(runner: Runner, peers: dict[str, Runner]) -> dict[str, Any]:
    """How many times as fast as each peer it is."""
    return {
        title.replace("seconds", "of_peers"): {
            name: peer.median(part) / runner.median(part) if peer.median(part) and runner.median(part) else None
            for name, peer in peers.items()
        }
        for part, title in PARTS.items()
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The measured contenders of one length as a table, then those that could not run, with the reasons."""
    first = rows[0]
    print(
        f"\nL={first['length']}: batch {first['batch']}, {first['heads']} heads of {first['head_dim']}, "
        f"{first['dtype']}; {measured_on(first)}; a/b: forward/forward and backward\n"
    )
    peers = list(first["forward_of_peers"])
    print_table(
        ["", "forward, ms", "with backward, ms", "of peak", "first call, s", "memory, MB", "compiler's, MB"]
        + [f"x {name}" for name in peers],
        [list(_cells(row, peers)) for row in rows],
    )
    print_failures(rows)
    for row in rows:
        if row["no_backward"]:
            print(f"{row['contender']} has no backward pass here, its memory is the forward's: {row['no_backward']}")


def _cells(row: dict[str, Any], peers: list[str]) -> Iterator[str]:
    yield row["contender"]
    if row["failed"]:
        yield "could not run"
        yield from ["-"] * (5 + len(peers))
        return
    yield text(row["forward_seconds"], ",.2f", 1e3)
    yield "no backward" if row["no_backward"] else text(row["both_seconds"], ",.2f", 1e3)
    yield _pair(row["forward_share_of_matmul_peak"], row["both_share_of_matmul_peak"])
    yield text(row["first_call_seconds"], ".1f")
    yield text(row["memory_bytes"], ",.0f", 1e-6)
    yield text(row["compiler_bytes"], ",.0f", 1e-6)
    for peer in peers:
        yield _pair(row["forward_of_peers"][peer], row["both_of_peers"][peer])


def _pair(forward: float | None, both: float | None) -> str:
    return "-" if forward is None and both is None else f"{text(forward, '.2f')}/{text(both, '.2f')}"
