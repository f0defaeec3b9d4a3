"""`scripts/benchmark.py positions`: training and scoring with each position method, at several lengths."""

import argparse
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import jax

from alibi.config import Config, read_config
from alibi.positions import METHODS
from benchmarks.processes import Contender, Step, seconds_of, warm_up
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
from benchmarks.training_contenders import VOCABULARY, random_batch, training_step
from configs import quickstart

TURN_SECONDS = 0.5  # of each part of one contender in one round
LENGTHS = "128,512,2048,8192"
REFERENCES = ("none", "alibi")
AT_ONCE = 5  # methods measured in turn with the references: each process holds one or two GB
# ALiBi and rotary are measured for those that only have other slopes or angles.
LEFT_OUT = ("alibi_interpolated", "alibi_ntk", "rotary_interpolated", "rotary_ntk")


@dataclasses.dataclass
class PositionStep(Step):
    """A training step, and the NLL of the same tokens."""

    score: Callable[[int], None] = lambda steps: None


class PositionContender(Contender):
    """Has timed both parts once it is prepared."""

    def prepare(self) -> tuple[Step, dict[str, Any]]:
        step = self.build(*self.arguments)
        step.run(1)
        step.score(1)
        return step, {
            "part_seconds": {"run": warm_up(step.run), "score": seconds_of(step.score, 2) / 2},
            "step_memory_bytes": step.memory_bytes,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = ",".join(name for name in METHODS if name not in LEFT_OUT)
    parser.add_argument("--positions", default=default, help="methods, comma-separated")
    parser.add_argument("--lengths", default=LENGTHS, help=f"tokens of a sequence; default: {LENGTHS}")
    parser.add_argument("--batch_tokens", type=int, default=8192, help="tokens a step sees at each of the lengths")
    parser.set_defaults(command=compare)


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens/s of training and of scoring, and the memory of a step, of each method in the quickstart's model."""
    names = [known(name, METHODS, "position method") for name in arguments.positions.split(",")]
    lengths = whole_numbers(arguments.lengths, "lengths")
    for length in lengths:
        if arguments.batch_tokens % length:
            raise ValueError(f"--batch_tokens={arguments.batch_tokens} must be a multiple of the length {length}")
    references = [name for name in REFERENCES if name in names]
    others = [name for name in names if name not in references]
    groups = [others[start : start + AT_ONCE] for start in range(0, len(others), AT_ONCE)] or [[]]
    rows = []
    for length in lengths:
        of_length: list[dict[str, Any]] = []
        for group in groups:
            found = _compare_length([*references, *group], length, arguments)
            of_length += found[len(references) :] if of_length else found
        _show(of_length, length, arguments.batch_tokens)
        rows += of_length
    return rows


def _compare_length(names: list[str], length: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of each, all measured in turn."""
    tokens = arguments.batch_tokens
    keys = f"length={length},train.batch_tokens={tokens}"
    contenders: dict[str, Contender] = {
        name: PositionContender(_position_step, (read_config(quickstart.get_config(f"position={name},{keys}")),))
        for name in names
    }
    runners, peak = run_rounds(
        contenders, arguments.rounds, turn_seconds=TURN_SECONDS, title=f"L={length}", preparing=2
    )
    return [_row(name, length, tokens, runners, peak, arguments.rounds) for name in names]


def _show(rows: list[dict[str, Any]], length: int, tokens: int) -> None:
    print(f"\nthe quickstart's model at L={length}, {tokens} tokens a step, float32\n{measured_on(rows[0])}\n")
    print_table(
        ["", "training, tokens/s", "x none", "x alibi", "scoring, tokens/s", "x none", "x alibi", "a step, MB"],
        [
            [
                row["contender"],
                *(
                    cell
                    for part in ("run", "score")
                    for cell in (
                        text(row[part]["tokens_per_second"], ",.0f"),
                        *(text(row[part][f"of_{other}"], ".2f") for other in REFERENCES),
                    )
                ),
                text(row["step_memory_bytes"], ",.0f", 1e-6),
            ]
            for row in rows
        ],
    )
    print_failures(rows)


def _row(name: str, length: int, tokens: int, runners: dict[str, Runner], peak: float, rounds: int) -> dict[str, Any]:
    runner = runners[name]
    parts: dict[str, Any] = {}
    for part in ("run", "score"):
        seconds = runner.median(part)
        parts[part] = {"tokens_per_second": seconds and tokens / seconds, "seconds": runner.seconds.get(part)}
        for other in REFERENCES:
            parts[part][f"of_{other}"] = _times_as_fast(runner, runners.get(other), part)
    return {
        "benchmark": "positions",
        "contender": name,
        "length": length,
        "failed": runner.failed,
        **parts,
        "matmul_gflops": peak / 1e9,
        "step_memory_bytes": runner.answer.get("step_memory_bytes"),
        **about(rounds),
    }


def _times_as_fast(runner: Runner, other: Runner | None, part: str) -> float | None:
    """The median of the rounds' ratios: the machine drifts less within a round than between them."""
    if other is None or runner.failed or other.failed:
        return None
    return statistics.median(b / a for a, b in zip(runner.seconds[part], other.seconds[part], strict=True))


def _position_step(config: Config) -> PositionStep:
    from alibi.evaluation.perplexity import model_nll
    from alibi.model.decoder import build_model

    inputs, targets = batch = random_batch(config)
    step = training_step(config, VOCABULARY, batch)
    model = build_model(config, VOCABULARY)
    params = jax.jit(model.init)(jax.random.key(0), inputs[:1])["params"]
    nll = jax.jit(model_nll(model))

    def score(times: int) -> None:
        for _ in range(times):
            found = nll(params, inputs, targets)
        jax.block_until_ready(found)

    return PositionStep(step.run, step.memory_bytes, score=score)
