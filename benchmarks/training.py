"""`python -m benchmarks train`: training steps beside PyTorch, and at several lengths."""

import argparse

from alibi.config import Config, make_config, read_config
from alibi.model.flops import model_flops
from benchmarks.processes import Contender, require_torch
from benchmarks.rounds import (
    Column,
    Row,
    Runners,
    chosen_names,
    compare,
    fastest_peer,
    whole_numbers,
)
from benchmarks.training_contenders import (
    VOCABULARY,
    step_without_attention,
    torch_step,
    training_step,
)
from configs import quickstart

# Turns of a contender in a round are short: a shared machine's speed changes by half within seconds.
HOW = {"turn_seconds": 0.5, "title": "training steps"}

LENGTHS = "128,512,2048,8192"
WIDE = "model.num_layers=6,model.width=512,model.num_heads=8,model.feed_forward=2048,length=512"
SHAPES = {
    "quickstart": lambda arg: read_config(quickstart.get_config(arg)),
    "wide": lambda arg: make_config(",".join(filter(None, [WIDE, arg]))),
}
METHODS = ("alibi", "sinusoidal")
WITHOUT = "{}, no attention"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer", choices=("torch", "none"), default="none", help="whom to compare with"
    )
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help=f"some of {', '.join(SHAPES)}; or none"
    )
    parser.add_argument(
        "--lengths", help=f"tokens of a sequence; or none; default: {LENGTHS}, with a peer none"
    )
    parser.add_argument(
        "--batch_tokens", type=int, default=8192, help="tokens a step sees at each of the lengths"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="model.dtype; PyTorch's by autocast",
    )
    parser.set_defaults(command=compare_training)


def compare_training(arguments: argparse.Namespace) -> list[Row]:
    """Measures tokens/s at each shape, on request beside PyTorch's, and at each length."""
    lengths = arguments.lengths or (LENGTHS if arguments.peer == "none" else "none")
    shapes = chosen_names(arguments.shapes, SHAPES, "shape")
    numbers = (
        []
        if lengths == "none"
        else whole_numbers(lengths, "lengths", divisor_of=arguments.batch_tokens)
    )
    rows = [row for shape in shapes for row in _compare_shape(shape, arguments)]
    return rows + [row for length in numbers for row in _compare_length(length, arguments)]


def _compare_shape(shape: str, arguments: argparse.Namespace) -> list[Row]:
    """Measures this project's step, and PyTorch's, eager and compiled."""
    config = SHAPES[shape](f"model.dtype={arguments.dtype}")
    contenders = {"alibi (JAX)": Contender(training_step, (config, VOCABULARY))}
    if arguments.peer == "torch":
        require_torch()
        # With kept memory PyTorch's attention in bfloat16 takes a multiple of the time; in float32
        # its step is a little faster.
        keeps = arguments.dtype == "float32"
        for name, compiled in (("PyTorch eager", False), ("PyTorch compiled", True)):
            step = config, VOCABULARY, compiled
            contenders[name] = Contender(torch_step, step, keeps_memory=keeps)

    def row_of(name: str, runners: Runners, peak: float) -> Row:
        return {
            "shape": shape,
            "dtype": model.dtype,
            "of_best_peer": runners[name].times_as_fast(fastest_peer(runners)),
            **_rates(name, runners, peak, config),
        }

    model = config.model
    headline = (
        f"{shape}: {model.num_layers} layers, width {model.width}, {model.num_heads} heads, feed-forward "
        f"{model.feed_forward}, {VOCABULARY} tokens of vocabulary, L={config.train_length}, "
        f"{config.train.batch_tokens} tokens a step, {model.dtype}, {config.position}"
    )
    columns = _columns(Column("x best peer", "of_best_peer"))
    return compare(headline, columns, "train", contenders, arguments.rounds, row_of, **HOW)


def _compare_length(length: int, arguments: argparse.Namespace) -> list[Row]:
    """Measures the quickstart's model at a length, ALiBi beside sinusoidal, both also without
    attention.
    """
    keys = (
        f"length={length},train.batch_tokens={arguments.batch_tokens},model.dtype={arguments.dtype}"
    )
    configs = {method: SHAPES["quickstart"](f"position={method},{keys}") for method in METHODS}
    contenders = {
        method: Contender(training_step, (config, VOCABULARY)) for method, config in configs.items()
    }
    for method, config in configs.items():
        contenders[WITHOUT.format(method)] = Contender(step_without_attention, (config, VOCABULARY))

    def row_of(name: str, runners: Runners, peak: float) -> Row:
        row = {
            "shape": f"quickstart, L={length}",
            "length": length,
            "dtype": arguments.dtype,
            **_rates(name, runners, peak, configs["alibi"]),
        }
        row["of_sinusoidal"] = runners[name].times_as_fast(runners["sinusoidal"])
        if name in METHODS:
            kept = runners[name].times_as_fast(runners[WITHOUT.format(name)])
            return row | {"share_in_attention": None if kept is None else 1.0 - kept}
        return row | {"share_of_matmul_peak": None}  # its operations are not the counted ones

    headline = f"the quickstart's model at L={length}, {arguments.batch_tokens} tokens a step, {arguments.dtype}"
    columns = _columns(
        Column("x sinusoidal", "of_sinusoidal"), Column("in attention", "share_in_attention")
    )
    rows = compare(headline, columns, "train", contenders, arguments.rounds, row_of, **HOW)
    print(
        "in attention: the part of the step's time that is saved, in the same rounds, if queries, keys and values\n"
        "are only multiplied and added element by element in place of attention; projections are no part of it"
    )
    return rows


def _rates(name: str, runners: Runners, peak: float, config: Config) -> Row:
    runner, tokens = runners[name], config.train.batch_tokens
    rate = runner.rate(tokens)
    return {
        "tokens_per_second": rate,
        "step_seconds": runner.seconds.get("run"),
        # The measured peak of CPUs is float32's.
        "share_of_matmul_peak": rate * model_flops(config, VOCABULARY) / peak
        if rate and config.model.dtype == "float32"
        else None,
        "first_step_seconds": runner.facts.get("first_seconds"),
        "peak_memory_bytes": runner.facts.get("peak_memory_bytes"),
        "step_memory_bytes": runner.facts.get("step_memory_bytes"),
    }


def _columns(*ratios: Column) -> list[Column]:
    return [
        Column("tokens/s", "tokens_per_second", ",.0f"),
        *ratios,
        Column("share of peak", "share_of_matmul_peak"),
        Column("first step, s", "first_step_seconds", ".1f"),
        Column("process, MB", "peak_memory_bytes", ",.0f", 1e-6),
        Column("a step, MB", "step_memory_bytes", ",.0f", 1e-6),
    ]
