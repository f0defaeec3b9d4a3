"""`python -m benchmarks skipping`: how much of attention's work a trained run's bias leaves out.

Counts the tiles that `blocked` computes on the run's own validation text: how far a bias reaches
depends on the learned queries and keys.
"""

import argparse
import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.processes import repeated, seconds_of
from benchmarks.rounds import Column, Row, conditions, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workdirs", required=True, help="work directories of train.py, separated by commas"
    )
    parser.add_argument("--length", type=int, default=16_384, help="tokens of the sequence")
    parser.add_argument(
        "--skip_epsilon", default="0,1e-6", help="shares of a row's mass that may be left out"
    )
    parser.set_defaults(command=measure_runs)


def measure_runs(arguments: argparse.Namespace) -> list[Row]:
    """Measures, for each run and epsilon, the tiles skipped in each layer, and the change in NLL and
    time.
    """
    epsilons = [float(epsilon) for epsilon in arguments.skip_epsilon.split(",")]
    rows = [
        row
        for workdir in arguments.workdirs.split(",")
        for row in _measure_run(workdir, arguments.length, epsilons, arguments.rounds)
    ]
    columns = [
        Column("skip_epsilon", "skip_epsilon", "g"),
        Column("tiles skipped", "skipped", ".0%"),
        Column(
            "by layer", lambda row: " ".join(f"{share:.0%}" for share in row["skipped_by_layer"])
        ),
        Column("largest change of a token's NLL", "nll_change", ".1e"),
        Column("x time of skipping none", "times_of_none"),
    ]
    show(f"one sequence of {arguments.length:,} tokens", rows, columns)
    return rows


def _measure_run(workdir: str, length: int, epsilons: list[float], rounds: int) -> list[Row]:
    import jax

    from alibi.data.tokens import prepare
    from alibi.runs.trained import TrainedRun

    run = TrainedRun(workdir)
    run.model.check_length(length)
    if run.config.model.scan_layers:
        raise ValueError(
            f"{run} has model.scan_layers=True, where layers can't be told apart; name other runs"
        )
    stream = np.asarray(
        prepare(run.config.data, "valid", run.tokenizer).tokens[: length + 1], np.int32
    )
    if stream.size <= length:
        raise ValueError(
            f"{run}: its validation text has {stream.size:,} tokens, one more than --length is needed"
        )
    arguments = {"params": run.params}, stream[None, :-1], stream[None, 1:]
    ways: tuple[float | None, ...] = (None, *epsilons)
    nll, layers, score = {}, {}, {}
    for epsilon in ways:
        config = dataclasses.replace(
            run.model.config, attention="blocked", skip_epsilon=epsilon or 0.0
        )
        model = run.model.clone(config=config)
        with _blocked(skips=epsilon is not None) as layers[epsilon]:
            model.apply(*arguments[:2], method="features")
            compiled = (
                jax.jit(functools.partial(model.apply, method="token_nll"))
                .lower(*arguments)
                .compile()
            )
        nll[epsilon], score[epsilon] = (
            np.asarray(compiled(*arguments)),
            functools.partial(compiled, *arguments),
        )
    turns = [
        {epsilon: seconds_of(repeated(score[epsilon]), 1) for epsilon in ways}
        for _ in range(rounds)
    ]
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
            "seconds": [turn[epsilon] for turn in turns],
            "times_of_none": statistics.median(turn[epsilon] / turn[None] for turn in turns),
            **conditions(rounds),
        }
        for epsilon in epsilons
    ]


@contextlib.contextmanager
def _blocked(skips: bool) -> Iterator[list[float]]:
    """Notes the share of tiles that each call to `blocked` skips, or makes it skip none."""
    from jax.core import Tracer

    from alibi.attention.backends import BACKENDS
    from alibi.attention.skipping import skipped_share

    shares, blocked = [], BACKENDS["blocked"]

    def noted(call: Any) -> Any:
        if not skips:
            call = dataclasses.replace(
                call, options=dataclasses.replace(call.options, skip_epsilon=None)
            )
        elif not isinstance(call.query, Tracer):
            shares.append(skipped_share(call))
        return blocked.run(call)

    BACKENDS["blocked"] = dataclasses.replace(blocked, run=noted)
    try:
        yield shares
    finally:
        BACKENDS["blocked"] = blocked
