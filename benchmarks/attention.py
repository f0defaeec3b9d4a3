"""`python -m benchmarks attention` and `decode`: attention alone at several lengths, beside Flax
and PyTorch.
"""

import argparse
import dataclasses
import itertools
from typing import Any

from alibi.attention.backends import OF_SEQUENCES
from benchmarks.attention_contenders import Shape, Way, contender, token_step
from benchmarks.processes import Contender, require_torch
from benchmarks.rounds import (
    Column,
    Row,
    Runners,
    chosen_names,
    compare,
    whole_numbers,
)

BIASES = ("none", "alibi", "alibi_learned", "t5", "kerple_log", "kerple_power", "sandwich", "fox")
TURN_SECONDS = 0.5
TOKEN_TURN_SECONDS = 0.3
LONG, LONG_ROUNDS = 16384, 3  # from this length on, at most so many rounds
BACKWARD_FLOPS = 3.5  # forward and backward pass, relative to the forward pass
PARTS = {"forward": "forward", "run": "both"}
FACTS = (
    "first_call_seconds",
    "memory_bytes",
    "compiler_bytes",
    "no_backward",
)
PEERS = {  # with ALiBi
    "torch": {"PyTorch sdpa, dense bias": Way("sdpa"), "PyTorch FlexAttention": Way("flex")},
    "flex": {},  # FlexAttention with the score of each bias
    "flax": {"Flax, dense bias": Way("flax")},
    "cudnn": {"cuDNN, no bias": Way("cudnn")},
    "augmented": {"cuDNN, ALiBi by columns": Way("augmented")},
}

TOKEN_WAYS = {
    "dense": Way("single", None),
    "dense, slots first": Way("single", None, slots_last=False),
    "dense, copied": Way("reference", None, slots_last=False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", default="1024,4096,16384", help="tokens of a sequence, comma-separated"
    )
    parser.add_argument("--peer", default="none", help=f"some of {', '.join(PEERS)}; or none")
    parser.add_argument(
        "--backends", default="auto", help=f"some of auto, {', '.join(OF_SEQUENCES)}"
    )
    parser.add_argument("--positions", default="alibi", help=f"biases, some of {', '.join(BIASES)}")
    parser.add_argument(
        "--skip_epsilon", default="none,0,1e-6", help="shares of mass that may be lost; or none"
    )
    parser.add_argument(
        "--turn_seconds",
        type=float,
        default=TURN_SECONDS,
        help="seconds of a pass in a round, at least one call",
    )
    parser.add_argument(
        "--preparing",
        type=int,
        default=1,
        help="contenders prepared together, on a GPU with many cores",
    )
    _add_shape(parser)
    parser.set_defaults(command=compare_lengths)


def add_decode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", default="1024,4096,16384,65536", help="keys of a cache, comma-separated"
    )
    _add_shape(parser)
    parser.set_defaults(command=compare_tokens)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    for name, value in (("batch", 1), ("heads", 8), ("head_dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")


def _shapes(arguments: argparse.Namespace) -> list[Shape]:
    sizes = arguments.batch, arguments.heads, arguments.head_dim, arguments.dtype
    return [Shape(length, *sizes) for length in whole_numbers(arguments.lengths, "lengths")]


def compare_lengths(arguments: argparse.Namespace) -> list[Row]:
    """Measures time, memory and share of the peak at each length, on request beside peers.

    Queries, keys and values are normal. Their norms decide how much can be skipped.
    """
    if arguments.heads < 1:
        raise ValueError(f"--heads={arguments.heads} must be at least 1")
    backends = chosen_names(arguments.backends, ["auto", *OF_SEQUENCES], "attention backend")
    positions = chosen_names(arguments.positions, BIASES, "bias")
    ways = {}
    for position, backend in itertools.product(positions, backends):
        for word in arguments.skip_epsilon.lower().split(","):
            epsilon = None if word == "none" else float(word)
            if position == "none" and epsilon is not None:
                continue  # nothing to skip by
            skip = "none" if epsilon is None else format(epsilon, "g")
            ways[f"{position} {backend}, skip {skip}"] = Way(backend, epsilon, position=position)
    peers: dict[str, Way] = {}
    for peer in chosen_names(arguments.peer, PEERS, "peer"):
        if peer in ("torch", "flex"):
            require_torch()
        peers |= PEERS[peer]
        if peer == "flex":
            ways |= {f"FlexAttention {name}": Way("flex", position=name) for name in positions}
    rows = []
    for shape in _shapes(arguments):
        contenders = {name: contender(shape, way) for name, way in (ways | peers).items()}
        rounds = arguments.rounds if shape.length < LONG else min(arguments.rounds, LONG_ROUNDS)
        how = {"turn_seconds": arguments.turn_seconds, "preparing": arguments.preparing}
        rows += compare_contenders(shape, contenders, list(peers), rounds, **how)
    return rows


def compare_contenders(
    shape: Shape, contenders: dict[str, Contender], peers: list[str], rounds: int, **how: Any
) -> list[Row]:
    """Measures the contenders at a shape, and prints them."""

    def row_of(name: str, runners: Runners, peak: float) -> Row:
        runner = runners[name]
        row = dataclasses.asdict(shape) | {fact: runner.facts.get(fact) for fact in FACTS}
        for part, title in PARTS.items():
            flops = shape.forward_flops * (BACKWARD_FLOPS if part == "run" else 1.0)
            rate = runner.rate(flops, part)
            row |= {
                f"{title}_seconds": runner.median(part),
                f"{title}_seconds_of_rounds": runner.seconds.get(part),
                f"{title}_share_of_matmul_peak": rate and rate / peak,
                f"{title}_of_peers": {
                    peer: runner.times_as_fast(runners[peer], part) for peer in peers
                },
            }
        return row

    columns = [
        Column("forward, ms", "forward_seconds", ",.2f", 1e3),
        Column("both, ms", "both_seconds", ",.2f", 1e3),
        Column("of peak", "forward_share_of_matmul_peak"),
        Column("of peak, both", "both_share_of_matmul_peak"),
        Column("first call, s", "first_call_seconds", ".1f"),
        Column("memory, MB", "memory_bytes", ",.0f", 1e-6),
        Column("XLA's, MB", "compiler_bytes", ",.0f", 1e-6),
        *(
            Column(f"x {peer}, {part}", (f"{part}_of_peers", peer))
            for peer in peers
            for part in PARTS.values()
        ),
    ]
    rows = compare(
        f"L={shape.length}: {shape}; both: forward and backward; XLA's: as its compiler planned",
        columns,
        "attention",
        contenders,
        rounds,
        row_of,
        title=f"L={shape.length}",
        **how,
    )
    for row in rows:
        if row["no_backward"]:
            print(
                f"{row['contender']} has no backward pass here, its memory is the forward's: {row['no_backward']}"
            )
    return rows


def compare_tokens(arguments: argparse.Namespace) -> list[Row]:
    """Measures a token's attention against a full cache of each length, beside the dense formula.

    Queries, keys and values are normal: norms and slopes decide how much is read. A mask hides the
    slots not yet written, as in Flax's cache.
    """
    columns = [Column("us a token", "seconds", ",.0f", 1e6), Column("x dense", "of_dense", ".1f")]
    rows = []
    for shape in _shapes(arguments):
        contenders = {name: Contender(token_step, (shape, way)) for name, way in TOKEN_WAYS.items()}

        def row_of(name: str, runners: Runners, peak: float, shape: Shape = shape) -> Row:
            runner = runners[name]
            return {
                **dataclasses.asdict(shape),
                "seconds": runner.median(),
                "seconds_of_rounds": runner.seconds.get("run"),
                "of_dense": runner.times_as_fast(runners["dense"]),
            }

        rows += compare(
            f"a cache of {shape.length:,} keys: {shape}",
            columns,
            "decode",
            contenders,
            arguments.rounds,
            row_of,
            turn_seconds=TOKEN_TURN_SECONDS,
            title=f"a cache of {shape.length:,}",
        )
    return rows
