"""How the work of attention grows with the length: exponents of the computed tiles, per group of heads, and of time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.rounds import print_table, text

GROUPS = 4  # of heads, from the steepest slopes to the flattest


def computed_weights(
    query: Any, key: Any, value: Any, slopes: Any, backend: str, skip_epsilon: float | None
) -> list[int] | None:
    """Of each head, how many weights are in the tiles that `blocked` computes; None: another backend does the call.

    All tiles of a shape cost the same, so this is the work of the forward and of the
    backward pass but for a factor. Time would need contenders of each group of heads alone,
    and drifts by more than a skipped tile.
    """
    from alibi.attention.backends import choose
    from alibi.attention.call import AttentionCall, AttentionOptions
    from alibi.attention.skipping import computed_tiles
    from alibi.attention.tiles import make_plan
    from alibi.positions import AlibiBias

    positions, bias = np.arange(query.shape[1]), AlibiBias(slopes)
    call = AttentionCall(
        query, key, value, bias, True, positions, positions, options=AttentionOptions(skip_epsilon=skip_epsilon)
    )
    if (choose(call) if backend == "auto" else backend) != "blocked":
        return None
    plan = make_plan(call)
    tiles = computed_tiles(call, plan).reshape(plan.batch_groups, plan.head_groups).sum(axis=0)
    of_head = tiles * plan.batch_group * plan.q_block * plan.k_block
    return [int(weights) for weights in np.repeat(of_head, plan.head_group)]


def growth(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each contender measured at two lengths or more, e of work ~ length^e; from rows of `attention`."""
    found = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        measured = [row for row in rows if row["contender"] == name and not row["failed"]]
        lengths = [row["length"] for row in measured]
        if len(set(lengths)) < 2:
            continue
        # Short lengths may take another backend, which computes no tiles.
        counted = [row for row in measured if row["computed_weights"]]
        counted_lengths = [row["length"] for row in counted]
        by_head = np.asarray([row["computed_weights"] for row in counted])
        enough = len(set(counted_lengths)) >= 2
        seconds = [row["both_seconds"] for row in measured]
        found.append(
            {
                "benchmark": "attention growth",
                "contender": name,
                "lengths": lengths,
                "counted_lengths": counted_lengths,
                "exponents_of_head_groups": _of_groups(counted_lengths, by_head) if enough else None,
                "exponent_of_weights": exponent(counted_lengths, by_head.sum(axis=1)) if enough else None,
                "exponent_of_seconds": exponent(lengths, seconds) if all(seconds) else None,
            }
        )
    return found


def _of_groups(lengths: list[int], by_head: np.ndarray) -> list[float]:
    """Of `[lengths, heads]`, one exponent for each group of neighbouring heads."""
    groups = np.array_split(by_head, min(GROUPS, by_head.shape[1]), axis=1)
    return [exponent(lengths, group.sum(axis=1)) for group in groups]


def exponent(lengths: Sequence[int], work: Sequence[float]) -> float:
    """e of the power law length^e that fits `work` best, in logarithms."""
    return float(np.polyfit(np.log(lengths), np.log(work), 1)[0])


def print_growth(rows: list[dict[str, Any]]) -> None:
    """A table of the exponents."""
    if not rows:
        return
    print("\nhow the work grows: e of length^e, fitted to the weights in computed tiles, by quarters of the heads\n")
    groups = max((len(row["exponents_of_head_groups"] or ()) for row in rows), default=0)
    names = [f"quarter {number + 1}" if groups == GROUPS else f"part {number + 1}" for number in range(groups)]
    if groups:
        names[0], names[-1] = f"{names[0]} (steepest)", f"{names[-1]} (flattest)"
    print_table(
        ["", "tiles counted at", *names, "all heads", "time, with backward"],
        [
            [
                row["contender"],
                " ".join(f"{length:,}" for length in row["counted_lengths"]) or "-",
                *(text(value, ".2f") for value in row["exponents_of_head_groups"] or [None] * groups),
                text(row["exponent_of_weights"], ".2f"),
                text(row["exponent_of_seconds"], ".2f"),
            ]
            for row in rows
        ],
    )
