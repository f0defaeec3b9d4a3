"""Passkey retrieval: accuracy by the key's distance and by the window's length.

Perplexity does not show whether a model uses a longer context or only survives it. Here a window
holds book text and a key, stated at a known distance from the question at the end of the window
(after Mohtashami & Jaggi 2023, arXiv 2305.16300, whose passkey lies between repeated sentences).
"""

import dataclasses
import hashlib
import os
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from alibi.data.books import (
    DIGITS,
    LEAST_DISTANCE,
    Books,
    PassKeys,
    distances,
    make_prompts,
    why_too_short,
)
from alibi.evaluation.extrapolation import RunOptions, evaluate_each
from alibi.evaluation.output import Output, print_once, row_of
from alibi.evaluation.perplexity import Scorer, run_objective, unrounded
from alibi.evaluation.windows import Windows
from alibi.model.decoder import DecoderLM
from alibi.parallel.hosts import check_alike
from alibi.reporting.rows import Passkey
from alibi.runs.trained import TrainedRun


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """The options of an evaluation of passkey retrieval."""

    multiples: tuple[int, ...] = (1, 2, 4, 8)
    prompts: int = 200  # at each length and distance

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts < 1:
            raise ValueError(f"prompts={self.prompts} must be at least 1")


def evaluate_passkeys(workdirs: Sequence[str | os.PathLike[str]], options: Options) -> list[str]:
    """Measures each run at all lengths and distances without a result, and writes the report;
    returns the failures.

    A run whose tokens aren't bytes is a failure. Lengths beyond the position method or the text
    become rows with `error`; they are a failure if no length can be measured. See also
    `alibi.evaluation.extrapolation.evaluate_each`.
    """
    text = b"".join(piece.utf8 for piece in Books({"valid": "valid"}).pieces("valid"))

    check_alike({"the text's sha256": hashlib.sha256(text).hexdigest()})

    def evaluate(workdir: str, output: Output) -> None:
        run = options.trained(workdir)
        if not run.config.objective.causal:
            raise ValueError(
                f"{run} was trained for objective={run.config.objective.name}; passkeys need objective=next_token"
            )
        if run.config.data.tokenizer != "bytes":
            raise ValueError(
                f"{run} has data.tokenizer={run.config.data.tokenizer}; passkeys need a model of bytes"
            )
        if (corpus := run.config.data.corpus) != PassKeys.name:
            print_once(
                f"{run.name}: was trained on data.corpus={corpus}, not {PassKeys.name}, and may find no key; "
                "configs/passkey.py trains a run that does"
            )
        scorer, lengths = _scorer(run), options.lengths_of(run.config.train_length)
        for length in lengths:
            if not distances(length):
                print_once(
                    f"{run.name}: windows of {length:,} tokens are too short for a key {LEAST_DISTANCE} back"
                )
            for distance in distances(length):
                _evaluate(run, scorer, text, length, Passkey(distance, options.prompts), output)
        defined = [length for length in lengths if distances(length) and not run.undefined(length)]
        if defined and (why := why_too_short(text, defined[0])):
            raise ValueError(f"no length can be measured: {why}")

    return evaluate_each(workdirs, options, evaluate)


def _evaluate(
    run: TrainedRun, scorer: Scorer, text: bytes, length: int, passkey: Passkey, output: Output
) -> None:
    """Measures a length and distance, unless its row is there."""
    distance, count, tokens = passkey.distance, passkey.prompts, length + 1
    too_short = why_too_short(text, length)
    scored = text if too_short else make_prompts(text, length, distance, count).tobytes()
    prompts, sha256 = np.frombuffer(scored, np.uint8), hashlib.sha256(scored).hexdigest()
    windows = Windows(tokens - DIGITS, count * tokens, length, DIGITS, "passkey", spacing=tokens)
    title = f"{run.title}, a key {distance:,} tokens back in {length:,}"
    measured = output.measure(
        run,
        row_of(
            run, windows, corpus=Books.name, split="valid", tokens_sha256=sha256, passkey=passkey
        ),
        title,
        lambda params: scorer.score_windows(params, prompts, windows),
        limit=run.undefined(length) or too_short,
        is_done=output.is_done,
    )
    if measured:
        row, score = measured
        accuracy = float((score.nll_nats.reshape(count, DIGITS) == 0).all(axis=1).mean())
        print_once(f"{title}: {accuracy:.0%} of {count} found")
        output.add(
            dataclasses.replace(row, passkey=dataclasses.replace(passkey, accuracy=accuracy))
        )


def _scorer(run: TrainedRun) -> Scorer:
    """Returns a scorer with 0.0 for a digit that is the likeliest token after the true ones before
    it, else 1.0.

    If all digits have 0.0, greedy decoding answers with the key.
    """
    model = run.model

    def wrong(
        params: PyTree,
        inputs: Int[Array, "rows length"],
        targets: Int[Array, "rows scored"],
        *_: None,
    ) -> Array:
        def last_logits(model: DecoderLM) -> Array:
            return model.vocabulary.logits(model.features(inputs, last=targets.shape[1]), True)

        with unrounded(model):
            logits = jnp.asarray(model.apply({"params": params}, method=last_logits))
        return jnp.asarray(jnp.argmax(logits, axis=-1) != targets, jnp.float32)

    objective = run_objective(run)
    return Scorer(
        wrong, objective=objective, batch_tokens=run.batch_tokens, sharding=model.sharding
    )
