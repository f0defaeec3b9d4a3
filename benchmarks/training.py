"""`python -m benchmarks train`: training steps beside PyTorch and Flax, and at several lengths."""

import argparse
from collections.abc import Callable

from alibi.config import Config, make_config, read_config
from alibi.devices.kinds import find_device_kind
from alibi.model.flops import model_flops
from alibi.positions import METHODS
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
    flax_step,
    step_without_attention,
    torch_step,
    training_step,
)
from configs import quickstart

# Turns of a contender in a round are short: a shared machine's speed changes by half within seconds.
HOW = {"turn_seconds": 0.5, "title": "training steps"}

LENGTHS = "128,512,2048,8192"


def _shape(*sizes: int) -> Callable[[str], Config]:
    keys = (
        "model.num_layers={},model.width={},model.num_heads={},model.feed_forward={},length={},"
        "train.batch_tokens={}"
    ).format(*sizes)
    return lambda arg: make_config(",".join(filter(None, [keys, arg])))


SHAPES: dict[str, Callable[[str], Config]] = {
    "quickstart": lambda arg: read_config(quickstart.get_config(arg)),
    "wide": _shape(6, 512, 8, 2048, 512, 2048),
    "25M": _shape(8, 512, 8, 2048, 1024, 65_536),
    "124M": _shape(12, 768, 12, 3072, 1024, 16_384),
}
FOR_CPUS = "quickstart,wide"
VOCABULARIES = {"124M": 50_304}  # GPT-2's, up to a multiple of 64
PEERS = {  # builders, with their arguments after the config and the vocabulary
    "torch": {"PyTorch eager": (torch_step, False), "PyTorch compiled": (torch_step, True)},
    "torch_rotary": {"PyTorch compiled, SDPA, rotary": (torch_step, True, "rotary")},
    "torch_flex": {"PyTorch compiled, FlexAttention, ALiBi": (torch_step, True, "flex")},
    "flax": {"Flax, no positions": (flax_step,)},
}
AT_LENGTHS = ("alibi", "sinusoidal")
WITHOUT = "{}, no attention"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", default="none", help=f"some of {', '.join(PEERS)}; or none")
    parser.add_argument("--shapes", default=FOR_CPUS, help=f"some of {', '.join(SHAPES)}; or none")
    parser.add_argument("--positions", default="alibi", help="position methods, at the shapes")
    parser.add_argument(
        "--config", default="", help="further config keys of the shapes, such as length=2048"
    )
    parser.add_argument(
        "--preparing",
        type=int,
        default=1,
        help="contenders prepared together, on a GPU with many cores",
    )
    parser.add_argument(
        "--lengths",
        help=f"tokens of a sequence; or none; defaults to {LENGTHS}, with a peer to none",
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
    """Measures tokens/s at each shape, on request beside peers, and at each length."""
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
    """Measures this project's step with each position method, and the peers' steps."""
    vocabulary = VOCABULARIES.get(shape, VOCABULARY)

    def config_of(position: str) -> Config:
        keys = f"model.dtype={arguments.dtype},position={position}", arguments.config
        return SHAPES[shape](",".join(filter(None, keys)))

    contenders = {
        f"{position} (JAX)": Contender(training_step, (config_of(position), vocabulary))
        for position in chosen_names(arguments.positions, METHODS, "position method")
    }
    config = config_of("alibi")
    for peer in chosen_names(arguments.peer, PEERS, "peer"):
        if peer != "flax":
            require_torch()
        for name, (build, *others) in PEERS[peer].items():
            # With kept memory PyTorch's attention in bfloat16 takes a multiple of the time; in
            # float32 its step is a little faster.
            keeps = build is not torch_step or arguments.dtype == "float32"
            arguments_of = config, vocabulary, *others
            contenders[name] = Contender(build, arguments_of, keeps_memory=keeps)

    def row_of(name: str, runners: Runners, peak: float) -> Row:
        return {
            "shape": shape,
            "length": config.train_length,
            "batch_tokens": config.train.batch_tokens,
            "dtype": model.dtype,
            "prepared_together": arguments.preparing,
            "of_best_peer": runners[name].times_as_fast(fastest_peer(runners)),
            **_rates(name, runners, peak, config, vocabulary),
        }

    model = config.model
    headline = (
        f"{shape}: {model.num_layers} layers, width {model.width}, {model.num_heads} heads, feed-forward "
        f"{model.feed_forward}, {vocabulary:,} tokens of vocabulary, L={config.train_length}, "
        f"{config.train.batch_tokens:,} tokens a step, {model.dtype}"
    )
    columns = _columns(Column("x best peer", "of_best_peer"))
    how = HOW | {"preparing": arguments.preparing}
    return compare(headline, columns, "train", contenders, arguments.rounds, row_of, **how)


def _compare_length(length: int, arguments: argparse.Namespace) -> list[Row]:
    """Measures the quickstart's model at a length, ALiBi beside sinusoidal, both also without
    attention.
    """
    keys = (
        f"length={length},train.batch_tokens={arguments.batch_tokens},model.dtype={arguments.dtype}"
    )
    configs = {method: SHAPES["quickstart"](f"position={method},{keys}") for method in AT_LENGTHS}
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
            **_rates(name, runners, peak, configs["alibi"], VOCABULARY),
        }
        row["of_sinusoidal"] = runners[name].times_as_fast(runners["sinusoidal"])
        if name in AT_LENGTHS:
            kept = runners[name].times_as_fast(runners[WITHOUT.format(name)])
            return row | {"share_in_attention": None if kept is None else 1.0 - kept}
        # its operations are not the counted ones
        return row | {"share_of_matmul_peak": None, "share_of_device_peak": None}

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


def _rates(name: str, runners: Runners, peak: float, config: Config, vocabulary: int) -> Row:
    runner, dtype = runners[name], config.model.dtype
    rate, accelerator = runner.rate(config.train.batch_tokens), runner.facts.get("accelerator")
    flops = rate and rate * model_flops(config, vocabulary)
    kind = find_device_kind(accelerator or "")
    # The measured peak is CPUs' in float32 and accelerators' in bfloat16.
    measured = dtype == ("bfloat16" if accelerator else "float32")
    return {
        "tokens_per_second": rate,
        "step_seconds": runner.seconds.get("run"),
        "share_of_matmul_peak": flops / peak if flops and measured else None,
        "share_of_device_peak": flops / kind.peak(dtype) if flops and kind else None,
        "first_step_seconds": runner.facts.get("first_seconds"),
        "peak_memory_bytes": runner.facts.get("peak_memory_bytes"),
        "step_memory_bytes": runner.facts.get("step_memory_bytes"),
        "parameters": runner.facts.get("parameters"),
    }


def _columns(*ratios: Column) -> list[Column]:
    return [
        Column("tokens/s", "tokens_per_second", ",.0f"),
        *ratios,
        Column("of matmul's peak", "share_of_matmul_peak"),
        Column("of the maker's", "share_of_device_peak"),
        Column("first step, s", "first_step_seconds", ".1f"),
        Column("process, MB", "peak_memory_bytes", ",.0f", 1e-6),
        Column("a step, MB", "step_memory_bytes", ",.0f", 1e-6),
        Column("parameters, M", "parameters", ",.2f", 1e-6),
    ]
