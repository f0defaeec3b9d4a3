"""Whether a model finds a key again in its context: accuracy by the key's distance and by the window's length.

Perplexity can't tell a model that uses a longer context from one that only survives it. Here a
window holds one key, told at a known distance from the question that ends the window, and book
text for the rest (after Mohtashami & Jaggi 2023, whose passkey is between repeated sentences).
"""

import dataclasses
import hashlib
import os
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from alibi.data.books import DIGITS, LEAST_DISTANCE, Books, PassKeys, distances, make_prompts, why_too_short
from alibi.evaluation.extrapolation import RunOptions, evaluate_each
from alibi.evaluation.output import Output, row_of, say
from alibi.evaluation.perplexity import Scorer, unrounded
from alibi.evaluation.windows import Part
from alibi.model.decoder import DecoderLM
from alibi.parallel.hosts import broadcast
from alibi.reporting.rows import Passkey
from alibi.runs.trained import TrainedRun


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """What to measure of each run."""

    multiples: tuple[int, ...] = (1, 2, 4, 8)
    prompts: int = 200  # at each length and distance

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts < 1:
            raise ValueError(f"prompts={self.prompts} must be at least 1")


def evaluate_passkeys(workdirs: Sequence[str | os.PathLike[str]], options: Options) -> list[str]:
    """Measures each run at all lengths and distances, where that isn't done, and writes the report.

    Returns:
      What failed, such as a run whose tokens aren't bytes. A length that a position method isn't defined for, or that
      the text doesn't have, becomes rows with `error` and is no failure, unless the text is too short for all lengths;
      see also `alibi.evaluation.extrapolation.evaluate_each`.
    """
    text = b"".join(piece.utf8 for piece in Books({"valid": "valid"}).pieces("valid"))

    def evaluate(workdir: str, output: Output) -> None:
        run = _byte_run(workdir, options)
        if (corpus := run.config.data.corpus) != PassKeys.name:
            found = "so that it may find none; configs/passkey.py trains a run that does"
            say(f"{run.name}: was trained on data.corpus={corpus}, not {PassKeys.name}, {found}")
        scorer, lengths = _scorer(run), options.lengths_of(run.config.train_length)
        for length in lengths:
            if not (measured := distances(length)):
                say(f"{run.name}: windows of {length:,} tokens are too short for a key {LEAST_DISTANCE:,} tokens back")
            for distance in measured:
                passkey = Passkey(distance, options.prompts)
                _evaluate(run, scorer, text, length, passkey, output)
        defined = [length for length in lengths if distances(length) and not run.undefined(length)]
        if defined and (short := why_too_short(text, defined[0])):
            raise ValueError(f"no length can be measured: {short}")

    return evaluate_each(workdirs, options, evaluate)


def _byte_run(workdir: str, options: Options) -> TrainedRun:
    run = options.trained(workdir)
    if run.config.data.tokenizer != "bytes":
        raise ValueError(f"{run} has data.tokenizer={run.config.data.tokenizer}; passkeys are told to byte models")
    return run


def _evaluate(run: TrainedRun, scorer: Scorer, text: bytes, length: int, passkey: Passkey, output: Output) -> None:
    distance, count, tokens = passkey.distance, passkey.prompts, length + 1
    short = why_too_short(text, length)
    scored = text if short else make_prompts(text, length, distance, count).tobytes()
    windows = Part(tokens - DIGITS, count * tokens, length, DIGITS, spacing=tokens, mode="passkey")
    sha256 = hashlib.sha256(scored).hexdigest()
    row = row_of(run, windows=windows, corpus=Books.name, split="valid", tokens_sha256=sha256)
    row = dataclasses.replace(row, passkey=passkey)
    title = f"{run.title}, a key {distance:,} tokens back in {length:,}"
    if limit := run.undefined(length) or short:
        output.add_error(dataclasses.replace(row, limit=True), title, limit)
        return
    if broadcast(lambda: any(found.is_measured for found in output.find(row))):
        say(f"{title}: done before")
        return
    params = run.params
    if run.step != row.step:  # training has gone on since, or the checkpoint is damaged: this is another one
        return _evaluate(run, scorer, text, length, passkey, output)
    prompts = np.frombuffer(scored, np.uint8)
    score = output.unless_memory_ends(row, title, lambda: scorer.score_windows(params, prompts, windows))
    if score is None:
        return
    accuracy = float((score.nll_nats == 0).all(axis=1).mean())
    say(f"{title}: {accuracy:.0%} of {count} found")
    output.add(dataclasses.replace(row, passkey=dataclasses.replace(passkey, accuracy=accuracy)))


def _scorer(run: TrainedRun) -> Scorer:
    """A scorer that gives 0.0 for a digit that is the likeliest token after the true ones before it, and else 1.0.

    Where all digits give 0.0, greedy decoding answers the key.
    """
    model = run.model

    def wrong(params: PyTree, inputs: Int[Array, "rows length"], targets: Int[Array, "rows scored"]) -> Array:
        def last_logits(model: DecoderLM) -> Array:
            return model.vocabulary.logits(model.features(inputs, last=targets.shape[1]), True)

        with unrounded(model):
            logits = jnp.asarray(model.apply({"params": params}, method=last_logits))
        return jnp.asarray(jnp.argmax(logits, axis=-1) != targets, jnp.float32)

    return Scorer(wrong, boundary_id=0, batch_tokens=run.batch_tokens, sharding=model.sharding)
