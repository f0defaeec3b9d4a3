"""`scripts/benchmark.py generate`: a prompt is read and tokens are decoded, beside a forward pass
over all.
"""

import argparse

import numpy as np

from alibi.config import read_config
from benchmarks.processes import Contender, Step, repeated
from benchmarks.rounds import Column, Row, Runners, compare
from benchmarks.training_contenders import VOCABULARY
from configs import quickstart

TURN_SECONDS = 0.5  # of a part of a contender in a round
TOLERANCE = 1e-4  # of logits, by which the two ways may differ


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--positions", default="alibi,rotary", help="position methods, comma-separated"
    )
    for name, value, text in (
        ("prompt", 1024, "tokens of it"),
        ("tokens", 256, "decoded"),
        ("batch", 1, "sequences"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=text)
    parser.set_defaults(command=compare_methods)


def compare_methods(arguments: argparse.Namespace) -> list[Row]:
    """Measures the tokens/s of each part, with each position method."""
    batch, prompt, tokens = arguments.batch, arguments.prompt, arguments.tokens
    names = arguments.positions.split(",")
    contenders = {name: Contender(generation_step, (name, batch, prompt, tokens)) for name in names}
    counts = {
        "prefill": batch * prompt,
        "decode": batch * tokens,
        "forward": batch * (prompt + tokens),
    }

    def row_of(name: str, runners: Runners, peak: float) -> Row:
        runner = runners[name]
        return {
            "batch": batch,
            "prompt": prompt,
            "tokens": tokens,
            "logits_error": runner.facts.get("logits_error"),
            **{f"{part}_seconds": runner.seconds.get(part) for part in counts},
            **{f"{part}_tokens_per_second": runner.rate(n, part) for part, n in counts.items()},
        }

    headline = f"the quickstart's model, batch {batch}: a prompt of {prompt:,} tokens, then {tokens:,} are decoded"
    columns = [Column(f"{part}, tokens/s", f"{part}_tokens_per_second", ",.0f") for part in counts]
    return compare(
        headline,
        [*columns, Column("logits off by", "logits_error", ".0e")],
        "generate",
        contenders,
        arguments.rounds,
        row_of,
        turn_seconds=TURN_SECONDS,
        title="generation",
    )


def generation_step(position: str, batch: int, prompt: int, new_tokens: int) -> Step:
    """Returns the quickstart's model, with initial parameters, at its parts.

    Raises:
      RuntimeError: its logits with a cache are not those of a forward pass over all tokens.
    """
    import jax
    import jax.numpy as jnp

    from alibi.generation import GREEDY, decode, new_cache, read
    from alibi.model.decoder import build_model

    model = build_model(read_config(quickstart.get_config(f"position={position}")), VOCABULARY)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    tokens = jnp.asarray(
        np.random.default_rng(0).integers(0, VOCABULARY, (batch, prompt + new_tokens)), jnp.int32
    )
    forward = jax.jit(lambda tokens: model.apply({"params": params}, tokens))

    def prefill(last: int | None = 1) -> tuple[jax.Array, dict]:
        return read(
            model, params, new_cache(model, batch, tokens.shape[1]), tokens[:, :prompt], last=last
        )

    logits, cache = prefill(last=None)
    parts = [np.asarray(logits)]
    for number in range(prompt, prompt + new_tokens):
        logits, cache = read(model, params, cache, tokens[:, number : number + 1])
        parts.append(np.asarray(logits))
    error = float(np.abs(np.concatenate(parts, axis=1) - np.asarray(forward(tokens))).max())
    if not error < TOLERANCE:
        raise RuntimeError(f"logits with a cache are off by {error:.2g}")
    prefilled, keys = prefill(), jax.random.split(jax.random.key(0), batch)

    def decoded() -> jax.Array:
        logits, cache = jax.tree.map(lambda x: x.copy(), prefilled)  # as decoding writes into it
        return decode(model, params, cache, logits, keys, 0, sample=GREEDY, count=new_tokens)[0]

    calls = {"prefill": lambda: prefill()[0], "decode": decoded, "forward": lambda: forward(tokens)}
    runs = {part: repeated(call, one_by_one=part != "prefill") for part, call in calls.items()}
    return Step(runs, {"logits_error": error})
