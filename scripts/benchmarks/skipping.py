"""`scripts/benchmark.py skipping`: how much of attention's work the bias of a trained run lets it leave out.

Counted are the tiles of `blocked`, on the run's own validation text: how far a bias reaches
depends on the queries and keys that the model has learned.
"""

import argparse
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.rounds import about, print_table, text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdirs", required=True, help="work directories of train.py, separated by commas")
    parser.add_argument("--length", type=int, default=16_384, help="tokens of the sequence")
    parser.add_argument("--skip_epsilon", default="0,1e-6", help="shares of a row's mass that may be left out")
    parser.set_defaults(command=measure)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of each run and epsilon: tiles skipped by layer, and what that does to the NLL and to the time."""
    epsilons = [float(epsilon) for epsilon in arguments.skip_epsilon.split(",")]
    rows: list[dict[str, Any]] = []
    for workdir in arguments.workdirs.split(","):
        rows += _rows_of(workdir, arguments.length, epsilons, arguments.rounds)
    machine = rows[0]["machine"]
    print(
        f"one sequence of {arguments.length:,} tokens; {machine['cpu']}, {machine['cores']} cores, {rows[0]['date']}\n"
    )
    print_table(
        ["", "skip_epsilon", "tiles skipped", "by layer", "largest change of a token's NLL", "x time of skipping none"],
        [
            [
                row["contender"],
                f"{row['skip_epsilon']:g}",
                text(row["skipped"], ".0%"),
                " ".join(f"{share:.0%}" for share in row["skipped_by_layer"]),
                f"{row['nll_change']:.1e}",
                text(row["times_of_none"], ".2f"),
            ]
            for row in rows
        ],
    )
    return rows


def _rows_of(workdir: str, length: int, epsilons: list[float], rounds: int) -> list[dict[str, Any]]:
    import jax

    from alibi.data.tokens import prepare
    from alibi.runs.trained import TrainedRun

    run = TrainedRun(workdir)
    run.model.check_length(length)
    if run.config.model.scan_layers:
        raise ValueError(f"{run} has model.scan_layers=True, where layers can't be told apart; name other runs")
    stream = np.asarray(prepare(run.config.data, "valid", run.tokenizer).tokens[: length + 1], np.int32)
    if stream.size <= length:
        raise ValueError(f"{run}: its validation text has {stream.size:,} tokens, one more than --length is needed")
    params, inputs, targets = {"params": run.params}, stream[None, :-1], stream[None, 1:]
    seconds: dict[float | None, list[float]] = {}
    nll, layers, score = {}, {}, {}
    for epsilon in (None, *epsilons):
        config = dataclasses.replace(run.model.config, attention="blocked", skip_epsilon=epsilon or 0.0)
        model = run.model.clone(config=config)
        with _blocked(skips=epsilon is not None) as layers[epsilon]:
            model.apply(params, inputs, method="features")
            score[epsilon] = jax.jit(functools.partial(model.apply, method="token_nll")).lower(params, inputs, targets)
        score[epsilon] = score[epsilon].compile()
        nll[epsilon], seconds[epsilon] = np.asarray(score[epsilon](params, inputs, targets)), []
    for _ in range(rounds):
        for epsilon, compiled in score.items():
            start = time.perf_counter()
            compiled(params, inputs, targets).block_until_ready()
            seconds[epsilon].append(time.perf_counter() - start)
    return [
        {
            "benchmark": "skipping",
            "contender": run.name,
            "position": run.config.position,
            "length": length,
            "skip_epsilon": epsilon,
            "skipped": statistics.fmean(layers[epsilon]),
            "skipped_by_layer": layers[epsilon],
            "nll_change": float(np.abs(nll[epsilon] - nll[None]).max()),
            "seconds": seconds[epsilon],
            "times_of_none": statistics.median(a / b for a, b in zip(seconds[epsilon], seconds[None], strict=True)),
            **about(rounds),
        }
        for epsilon in epsilons
    ]


@contextlib.contextmanager
def _blocked(skips: bool) -> Iterator[list[float]]:
    """While it lasts, the share of tiles that each call of `blocked` skips is noted, or it skips none."""
    from jax.core import Tracer

    from alibi.attention.backends import BACKENDS
    from alibi.attention.skipping import skipped_share

    shares, blocked = [], BACKENDS["blocked"]

    def noted(call: Any) -> Any:
        if not skips:
            call = dataclasses.replace(call, options=dataclasses.replace(call.options, skip_epsilon=None))
        elif not isinstance(call.query, Tracer):
            shares.append(skipped_share(call))
        return blocked.run(call)

    BACKENDS["blocked"] = dataclasses.replace(blocked, run=noted)
    try:
        yield shares
    finally:
        BACKENDS["blocked"] = blocked
