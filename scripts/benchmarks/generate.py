"""`scripts/benchmark.py generate`: a prompt is read and tokens are decoded, beside a forward pass over all."""

import argparse
from typing import Any

import numpy as np

from alibi.config import read_config
from benchmarks.processes import Contender, Step, seconds_of
from benchmarks.rounds import about, measured_on, print_failures, print_table, run_rounds, text
from benchmarks.training_contenders import VOCABULARY
from configs import quickstart

TURN_SECONDS = 0.5  # of one part of a contender in one round
PARTS = ("prefill", "decode", "forward")
TOLERANCE = 1e-4  # of logits, by which the two ways may differ


class GenerationContender(Contender):
    """Has timed each part once it is prepared."""

    def prepare(self) -> tuple[Step, dict[str, Any]]:
        step = self.build(*self.arguments)
        seconds = {part: [seconds_of(getattr(step, part), 1) for _ in range(3)][-1] for part in PARTS}
        return step, {"part_seconds": seconds, "error": step.error}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--positions", default="alibi,rotary", help="position methods, comma-separated")
    for name, value, what in (("prompt", 1024, "tokens of it"), ("tokens", 256, "decoded ones"), ("batch", 1, "")):
        parser.add_argument(f"--{name}", type=int, default=value, help=what or "sequences")
    parser.set_defaults(command=compare)


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens/s of each part, medians over the rounds."""
    sizes = arguments.batch, arguments.prompt, arguments.tokens
    names = arguments.positions.split(",")
    contenders = {name: GenerationContender(Generation, (name, *sizes)) for name in names}
    runners, peak = run_rounds(contenders, arguments.rounds, turn_seconds=TURN_SECONDS, title="generation")
    batch, prompt, tokens = sizes
    counts = {"prefill": batch * prompt, "decode": batch * tokens, "forward": batch * (prompt + tokens)}
    rows: list[dict[str, Any]] = []
    for name, runner in runners.items():
        row = {"benchmark": "generate", "contender": name, "failed": runner.failed}
        row |= {"batch": batch, "prompt": prompt, "tokens": tokens, "logits_error": runner.answer.get("error")}
        for part, count in counts.items():
            seconds = runner.median(part)
            row |= {
                f"{part}_seconds": runner.seconds.get(part),
                f"{part}_tokens_per_second": seconds and count / seconds,
            }
        rows.append(row | {"matmul_gflops": peak / 1e9, **about(arguments.rounds)})
    _print_rows(rows)
    return rows


class Generation(Step):
    """The quickstart's model, with initial parameters, and what of it is timed.

    Raises:
      RuntimeError: its logits with a cache are not those of a forward pass over all tokens.
    """

    def __init__(self, position: str, batch: int, prompt: int, new_tokens: int):
        super().__init__(self.forward)
        import jax
        import jax.numpy as jnp

        from alibi.generation import decode, new_cache, read
        from alibi.model.decoder import build_model

        self.model = model = build_model(read_config(quickstart.get_config(f"position={position}")), VOCABULARY)
        self.params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        rng = np.random.default_rng(0)
        self.tokens = jnp.asarray(rng.integers(0, VOCABULARY, (batch, prompt + new_tokens)), jnp.int32)
        self.prompt, self.new_tokens = prompt, new_tokens
        self.whole = jax.jit(lambda tokens: model.apply({"params": self.params}, tokens))
        self.new_cache, self.read, self.decode_all = new_cache, read, decode
        self.error = self._error()
        self.prefilled = self._prefill()

    def _prefill(self, **options: Any) -> tuple[Any, Any]:
        """Logits, and a cache with the prompt."""
        cache = self.new_cache(self.model, *self.tokens.shape)
        return self.read(self.model, self.params, cache, self.tokens[:, : self.prompt], **options)

    def _error(self) -> float:
        logits, cache = self._prefill()
        parts = [np.asarray(logits)]
        for number in range(self.prompt, self.tokens.shape[1]):
            token = self.tokens[:, number : number + 1]
            logits, cache = self.read(self.model, self.params, cache, token)
            parts.append(np.asarray(logits))
        error = float(np.abs(np.concatenate(parts, axis=1) - np.asarray(self.whole(self.tokens))).max())
        if not error < TOLERANCE:
            raise RuntimeError(f"logits with a cache are off by {error:.2g}")
        return error

    def prefill(self, times: int) -> None:
        for _ in range(times):
            self.prefilled = self._prefill(last=1)
        self.prefilled[0].block_until_ready()

    def decode(self, times: int) -> None:
        import jax

        for _ in range(times):
            logits, cache = jax.tree.map(lambda x: x.copy(), self.prefilled)  # as decoding writes into it
            tokens, _ = self.decode_all(self.model, self.new_tokens, self.params, cache, logits[:, -1:], 0.0, None)
            tokens.block_until_ready()

    def forward(self, times: int) -> None:
        for _ in range(times):
            self.whole(self.tokens).block_until_ready()


def _print_rows(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(
        f"the quickstart's model, batch {first['batch']}: a prompt of {first['prompt']:,} tokens, then "
        f"{first['tokens']:,} are decoded; {measured_on(first)}\n"
    )
    titles = ["", *(f"{part}, tokens/s" for part in PARTS), "logits off by"]
    cells = [
        [
            row["contender"],
            *(text(row[f"{part}_tokens_per_second"], ",.0f") for part in PARTS),
            text(row["logits_error"], ".0e"),
        ]
        for row in rows
    ]
    print_table(titles, cells)
    print_failures(rows)
