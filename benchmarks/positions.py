"""`python -m benchmarks positions`: training and scoring with each position method, at several
lengths.
"""

import argparse

from alibi.config import Config, read_config
from alibi.positions import METHODS
from benchmarks.processes import Contender, Step, repeated
from benchmarks.rounds import Column, Row, Runners, chosen_names, measure, show, whole_numbers
from benchmarks.training_contenders import VOCABULARY, make_batch, training_step
from configs import quickstart

TURN_SECONDS = 0.5  # of each part of a contender in a round
LENGTHS = "128,512,2048,8192"
REFERENCES = ("none", "alibi")
AT_ONCE = 5  # methods measured in turn with the references: each process holds one or two GB
# Methods that only have other slopes or angles than ALiBi and rotary, which are measured.
LEFT_OUT = ("alibi_interpolated", "alibi_ntk", "rotary_interpolated", "rotary_ntk")
PARTS = {"run": "training", "score": "scoring"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = ",".join(name for name in METHODS if name not in LEFT_OUT)
    parser.add_argument("--positions", default=default, help="methods, comma-separated")
    parser.add_argument(
        "--lengths", default=LENGTHS, help=f"tokens of a sequence; defaults to {LENGTHS}"
    )
    parser.add_argument(
        "--batch_tokens", type=int, default=8192, help="tokens a step sees at each of the lengths"
    )
    parser.set_defaults(command=compare_methods)


def compare_methods(arguments: argparse.Namespace) -> list[Row]:
    """Measures training, scoring and step memory for each method in the quickstart's model."""
    names = chosen_names(arguments.positions, METHODS, "position method")
    lengths = whole_numbers(arguments.lengths, "lengths", divisor_of=arguments.batch_tokens)
    references = [name for name in REFERENCES if name in names]
    others = [name for name in names if name not in references]
    groups = [others[start : start + AT_ONCE] for start in range(0, len(others), AT_ONCE)] or [[]]
    columns = [
        Column(title, (part, key), form)
        for part, of in PARTS.items()
        for title, key, form in (
            (f"{of}, tokens/s", "tokens_per_second", ",.0f"),
            *((f"x {other}", f"of_{other}", ".2f") for other in REFERENCES),
        )
    ]
    rows: list[Row] = []
    for length in lengths:
        of_length: list[Row] = []
        for group in groups:
            measured = _compare_length([*references, *group], length, arguments)
            of_length += measured[len(references) :] if of_length else measured
        headline = (
            f"the quickstart's model at L={length}, {arguments.batch_tokens} tokens a step, float32"
        )
        show(
            headline, of_length, [*columns, Column("a step, MB", "step_memory_bytes", ",.0f", 1e-6)]
        )
        rows += of_length
    return rows


def _compare_length(names: list[str], length: int, arguments: argparse.Namespace) -> list[Row]:
    """Returns a row of each method, all measured in turn."""
    tokens = arguments.batch_tokens
    contenders = {}
    for name in names:
        config = quickstart.get_config(
            f"position={name},length={length},train.batch_tokens={tokens}"
        )
        contenders[name] = Contender(position_step, (read_config(config),))

    def row_of(name: str, runners: Runners, peak: float) -> Row:
        runner = runners[name]
        row: Row = {"length": length, "step_memory_bytes": runner.facts.get("step_memory_bytes")}
        for part in PARTS:
            row[part] = {
                "tokens_per_second": runner.rate(tokens, part),
                "seconds": runner.seconds.get(part),
                **{
                    f"of_{other}": runner.times_as_fast(runners.get(other), part)
                    for other in REFERENCES
                },
            }
        return row

    return measure(
        "positions",
        contenders,
        arguments.rounds,
        row_of,
        turn_seconds=TURN_SECONDS,
        title=f"L={length}",
        preparing=2,
    )


def position_step(config: Config) -> Step:
    """Returns a training step, and the NLL of the same tokens."""
    import jax

    from alibi.evaluation.scorer import model_nll
    from alibi.model.decoder import build_model

    inputs, targets = make_batch(config, VOCABULARY)
    step = training_step(config, VOCABULARY)
    model = build_model(config, VOCABULARY)
    params = jax.jit(model.init)(jax.random.key(0), inputs[:1])["params"]
    nll = jax.jit(model_nll(model))
    step.parts["score"] = repeated(lambda: nll(params, inputs, targets))
    return step
