"""`python -m benchmarks generate`: a prompt is read and tokens are decoded after it, beside PyTorch."""

import argparse
import concurrent.futures
import math
from typing import Any

import numpy as np

from alibi.config import Config
from alibi.runs.provenance import usable_cores
from benchmarks.processes import Contender, RunSteps, Step, repeated, require_torch
from benchmarks.rounds import (
    Column,
    Row,
    Runners,
    chosen_names,
    compare,
    fastest_peer,
    whole_numbers,
)
from benchmarks.training import FOR_CPUS, SHAPES
from benchmarks.training_contenders import VOCABULARY

TURN_SECONDS = 0.5  # of a part of a contender in a round
TOLERANCE = 1e-4  # of logits, by which the two ways may differ
CHUNK = 512  # tokens of the prompt read at a time, the default of `alibi.generation.generate`
PARTS = ("prefill", "decode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--positions", default="alibi", help="position methods, comma-separated; a peer has ALiBi"
    )
    parser.add_argument(
        "--peer", choices=("torch", "none"), default="none", help="whom to compare with"
    )
    parser.add_argument("--shapes", default=FOR_CPUS, help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--batches", default="1,8", help="sequences, comma-separated")
    parser.add_argument("--prompts", default="128,2048", help="tokens of it, comma-separated")
    parser.add_argument("--tokens", type=int, default=128, help="decoded")
    parser.set_defaults(command=compare_generation)


def compare_generation(arguments: argparse.Namespace) -> list[Row]:
    """Measures tokens/s of both parts at each shape, batch and prompt."""
    prompts, batches = (
        whole_numbers(getattr(arguments, flag), flag) for flag in ("prompts", "batches")
    )
    shapes = chosen_names(arguments.shapes, SHAPES, "shape")
    if arguments.peer == "torch":
        require_torch()
    return [
        row
        for shape in shapes
        for prompt in prompts
        for batch in batches
        for row in _compare(shape, batch, prompt, arguments)
    ]


def _compare(shape: str, batch: int, prompt: int, arguments: argparse.Namespace) -> list[Row]:
    names, tokens = arguments.positions.split(","), arguments.tokens
    configs = {name: SHAPES[shape](f"position={name}") for name in names}
    how = VOCABULARY, batch, prompt, tokens
    contenders = {
        f"{name} (JAX)": Contender(generation_step, (config, *how))
        for name, config in configs.items()
    }
    if arguments.peer == "torch":
        for name, compiled in (("eager", False), ("compiled", True)):
            contenders[f"PyTorch {name}"] = Contender(
                torch_step, (SHAPES[shape](""), *how, compiled)
            )

    def row_of(name: str, runners: Runners, peak: float) -> Row:
        runner = runners[name]
        row: Row = {"shape": shape, "batch": batch, "prompt": prompt, "tokens": tokens}
        for part, count in zip(PARTS, (batch * prompt, batch * tokens), strict=True):
            row[part] = {
                "seconds": runner.seconds.get(part),
                "tokens_per_second": runner.rate(count, part),
                "of_best_peer": runner.times_as_fast(fastest_peer(runners, part), part),
            }
        ours = next(iter(runners.values()))
        decode, memory = runner.median("decode"), ours.median("memory")
        return row | {
            "share_of_memory": memory / decode if decode and memory else None,
            "logits_error": runner.facts.get("logits_error"),
            "first_seconds": runner.facts.get("first_seconds"),
        }

    model = configs[names[0]].model
    headline = (
        f"{shape}: {model.num_layers} layers, width {model.width}, float32, batch {batch}: a prompt of {prompt:,} "
        f"tokens, then {tokens:,} are decoded"
    )
    columns = [
        column
        for part in PARTS
        for column in (
            Column(f"{part}, tokens/s", (part, "tokens_per_second"), ",.0f"),
            Column("x best peer", (part, "of_best_peer")),
        )
    ]
    return compare(
        headline,
        [
            *columns,
            Column("share of memory", "share_of_memory"),
            Column("first, s", "first_seconds", ".1f"),
            Column("logits off by", "logits_error", ".0e"),
        ],
        "generate",
        contenders,
        arguments.rounds,
        row_of,
        turn_seconds=TURN_SECONDS,
        title=f"generation, {shape}",
    )


def generation_step(
    config: Config, vocabulary: int, batch: int, prompt: int, new_tokens: int
) -> Step:
    """Returns the model, with initial parameters, at reading a prompt, at decoding after it, and at
    reading as many bytes from memory as decoding must.

    Raises:
      RuntimeError: its logits with a cache are not those of a forward pass over all tokens.
    """
    import jax
    import jax.numpy as jnp

    from alibi.generation import GREEDY, decode, read
    from alibi.generation.decoding import prefill
    from alibi.model.decoder import build_model

    model = build_model(config, vocabulary)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    slots = prompt + new_tokens
    tokens = jnp.asarray(
        np.random.default_rng(0).integers(0, vocabulary, (batch, slots)), jnp.int32
    )
    prompts = tokens[:, :prompt]

    def prefilled() -> tuple[Any, jax.Array]:
        return prefill(model, params, prompts, None, new_tokens, CHUNK, None)[2:]

    cache, logits = prefilled()
    held = sum(x.nbytes for x in jax.tree.leaves((params, cache)))
    parts = [np.asarray(logits)]
    for slot in range(prompt, slots):
        logits, cache = read(model, params, cache, tokens[:, slot : slot + 1])
        parts.append(np.asarray(logits))
    whole = np.asarray(jax.jit(model.apply)({"params": params}, tokens))[:, prompt - 1 :]
    error = float(np.abs(np.concatenate(parts, axis=1) - whole).max())
    if not error < TOLERANCE:
        raise RuntimeError(f"logits with a cache are off by {error:.2g}")
    before, keys = prefilled(), jax.random.split(jax.random.key(0), batch)

    def decoded() -> jax.Array:
        cache, logits = jax.tree.map(lambda x: x.copy(), before)  # as decoding writes into it
        return decode(model, params, cache, logits, keys, 0, sample=GREEDY, count=new_tokens)[0]

    runs = {
        "prefill": repeated(lambda: prefilled()[1]),
        "decode": repeated(decoded, one_by_one=True),
        "memory": memory_reads(held, new_tokens),
    }
    return Step(runs, {"logits_error": error})


def torch_step(*arguments: Any) -> Step:
    """Returns an equal model in PyTorch at the same parts."""
    from benchmarks.torch_generation import generation_step

    return generation_step(*arguments)


def memory_reads(size: int, times: int) -> RunSteps:
    """Returns a function that reads `size` bytes `times` times a step, as fast as the device can."""
    import jax
    import jax.numpy as jnp

    if jax.default_backend() != "cpu":
        array = jnp.ones(size // 4, jnp.float32)
        sums = jax.jit(
            lambda array: jax.lax.fori_loop(
                0, times, lambda _, total: (array + total).sum(), jnp.zeros(())
            )
        )
        return repeated(lambda: sums(array))
    cores = usable_cores()
    parts = np.array_split(np.ones(math.ceil(size / 4), np.float32), cores)
    pool = concurrent.futures.ThreadPoolExecutor(cores)

    def read(part: np.ndarray) -> None:
        for _ in range(times):
            np.dot(part, part)

    def run(steps: int) -> None:
        for _ in range(steps):
            list(pool.map(read, parts))

    return run
