"""Masked tokens filled in, and vectors of texts, from models that see both sides."""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from alibi.config import Config
from alibi.config.fields import Section, choice, number
from alibi.model.decoder import DecoderLM, unrounded
from alibi.objectives import make_objective
from alibi.parallel.sharding import batch_parts
from alibi.progress import Progress
from alibi.runs.identity import config_hash
from alibi.runs.trained import TrainedRun
from alibi.storage.cache import content_key

SHORTEST = 16  # tokens of a padded text


@dataclasses.dataclass(frozen=True)
class Vectors(Section):
    """How a text becomes a vector.

    Attributes:
      pooling: the last layer's output, its "mean" over a text's tokens or at the "first" token.
      normalised: whether vectors have a norm of 1.
      max_tokens: the most tokens of a text. 0 is the training length, or the longest text that an
        import's config.json allows.
      cut: cuts longer texts, which otherwise are errors.

    Raises:
      ValueError: an option has another type or is out of its range.
    """

    pooling: str = choice("mean", ("mean", "first"))
    normalised: bool = True
    max_tokens: int = number(0, at_least=0)
    cut: bool = False


def check_masked(run: TrainedRun, purpose: str, *, head: bool) -> None:
    """Raises ValueError unless the run's model predicts masked tokens.

    Args:
      purpose: what needs that, for the message.
      head: whether the model's head is needed too.
    """
    if make_objective(run.config).causal:
        raise ValueError(
            f"{run} was trained for objective={run.config.objective.name}, and {purpose} needs objective=masked, such "
            "as an imported BERT or a run of configs/mlm.py; scripts/generate.py continues texts"
        )
    if head and not has_head(run.config):
        raise ValueError(
            f"{run} was imported without a head for masked tokens, and {purpose} needs one; import a model whose files "
            "have it, or train this one on"
        )


def has_head(config: Config) -> bool:
    """Returns whether a model of masked tokens was trained to predict them."""
    return config.model.masked_head or not config.imported_from


def mask_id(run: TrainedRun) -> int:
    """Returns the id of the run's mask token."""
    token = run.config.objective.mask_id
    return run.tokenizer.vocab_size if token < 0 else token


def mask_name(run: TrainedRun) -> str:
    """Returns the text that stands for a masked token: the tokenizer's, or [MASK]."""
    names = {token: name for name, token in run.tokenizer.special_ids.items()}
    return names.get(mask_id(run), "[MASK]")


def encode(run: TrainedRun, text: str) -> list[int]:
    """Returns a text's tokens, with the mask token for its name, between those that the tokenizer's
    template puts around a text, such as [CLS] and [SEP].
    """
    return run.tokenizer.encode_whole(text, mask_name(run), mask_id(run))


def fill_masks(
    run: TrainedRun, texts: Sequence[str], count: int = 5
) -> list[list[list[tuple[str, float]]]]:
    """Returns the likeliest tokens for each mask of each text, with their probabilities.

    Raises:
      ValueError: a model without a head for masked tokens, a text without a mask, or one that is
        longer than the position method is defined for.

    Example:
      >>> run = TrainedRun("workdirs/bert")  # doctest: +SKIP
      >>> fill_masks(run, ["The capital of France is [MASK]."])[0][0][0]  # doctest: +SKIP
      ('paris', 0.42)
    """
    check_masked(run, "filling masks", head=True)
    for text in texts:
        if mask_name(run) not in text:
            raise ValueError(
                f"the text {text[:60]!r} has no {mask_name(run)}; write {mask_name(run)} for each token to fill in"
            )
    ids = [np.array(encode(run, text)) for text in texts]
    masks = [np.flatnonzero(row == mask_id(run)) for row in ids]
    most = max(map(len, masks))

    def logits(model: DecoderLM, tokens: Array, sizes: Array, places: Array) -> Array:
        features = _features(model, tokens, sizes)
        picked = jnp.take_along_axis(features, places[..., None], axis=1)
        return model.vocabulary.logits(picked, True)

    def likeliest(params: PyTree, *batch: Array) -> tuple[Array, Array]:
        scores = jnp.asarray(run.model.apply({"params": params}, *batch, method=logits))
        # a new mask token and rows beyond the vocabulary are no text
        words = jax.nn.softmax(scores)[..., : run.tokenizer.vocab_size]
        best, ids_of_best = jax.lax.top_k(words, min(count, words.shape[-1]))
        return best, ids_of_best

    filled: dict[int, list[list[tuple[str, float]]]] = {}
    compiled = jax.jit(likeliest)
    for rows, (tokens, sizes) in batches(run, ids):
        places = np.zeros((len(tokens), most), np.int32)
        for index, row in enumerate(rows):
            places[index, : len(masks[row])] = masks[row]
        shares, best = _on_devices(run, compiled, tokens, sizes, places)
        for index, row in enumerate(rows):
            filled[row] = [
                [
                    (run.tokenizer.decode([token]), float(share))
                    for token, share in zip(best[index, mask], shares[index, mask], strict=True)
                ]
                for mask in range(len(masks[row]))
            ]
    return [filled[row] for row in range(len(ids))]


def _features(
    model: DecoderLM, tokens: Int[Array, "rows length"], sizes: Int[Array, " rows"]
) -> Float[Array, "rows length width"]:
    """Returns the last layer's output. Padding, from each size on, is a segment of its own."""
    padding = jnp.arange(tokens.shape[1])[None] >= sizes[:, None]
    return model.features(tokens, segment_ids=padding.astype(jnp.int32))


def batches(
    run: TrainedRun, ids: Sequence[Any], done: Sequence[bool] | None = None
) -> Iterator[tuple[list[int], tuple[np.ndarray, np.ndarray]]]:
    """Yields numbers of texts with like lengths, the longest first, and their tokens and sizes, padded
    to one of few shapes.

    Args:
      done: the texts that are left out.

    Raises:
      ValueError: the position method is not defined for the longest text.
    """
    longest, parts = max(map(len, ids)), batch_parts(run.model.sharding)
    run.model.check_length(longest)
    padded = {size: _padded(run, size, longest) for size in {*map(len, ids)}}
    left = [row for row in range(len(ids)) if done is None or not done[row]]
    left.sort(key=lambda row: -len(ids[row]))
    for length, group in itertools.groupby(left, key=lambda row: padded[len(ids[row])]):
        alike = list(group)
        most = parts * max(1, run.batch_tokens // length)
        size = min(most, -(-len(alike) // parts) * parts)
        for first in range(0, len(alike), size):
            rows = alike[first : first + size]
            tokens, sizes = np.zeros((size, length), np.int32), np.ones(size, np.int32)
            for index, row in enumerate(rows):
                tokens[index, : len(ids[row])] = ids[row]
                sizes[index] = len(ids[row])
            yield rows, (tokens, sizes)


def _padded(run: TrainedRun, length: int, longest: int) -> int:
    """Returns the least length of a shape that holds a text: 16, 24, 32, 48, ..., or `longest` where the
    position method is not defined for it.
    """
    power = max(SHORTEST, 2 ** math.ceil(math.log2(length)))
    padded = power * 3 // 4 if max(SHORTEST, length) <= power * 3 // 4 else power
    return longest if run.undefined(padded) else padded


def _on_devices(run: TrainedRun, function: Any, *batch: np.ndarray) -> Any:
    placed = [jax.device_put(side, run.model.sharding) for side in batch]
    with unrounded(run.model):
        return jax.device_get(function(run.params, *placed))


def write_vectors(
    run: TrainedRun,
    lines: Sequence[str],
    output: str | os.PathLike[str],
    how: Vectors,
    *,
    show: bool = False,
) -> Float[np.ndarray, "lines width"]:
    """Writes a vector for each line to a .npy file, float32, and returns it, mapped.

    What a stopped process has computed lies beside the file, and the same call goes on from there.

    Args:
      show: whether to show the progress.

    Raises:
      ValueError: a causal model, an existing file, no line, an empty line, or one that is too long.
    """
    check_masked(run, "a vector of a text", head=False)
    path = pathlib.Path(output)
    if path.exists():
        raise ValueError(f"--output={output} is there already; remove it, or name another file")
    if not lines:
        raise ValueError(
            "there is no line of text, so there is nothing to write; give another file"
        )
    ids = _within(run, [encode(run, line) for line in lines], how)
    made = [str(run.directory.path.resolve()), run.step, config_hash(run.config)]
    key = content_key({"run": made, "lines": [*lines], "how": dataclasses.asdict(how)})[:12]
    partial = path.with_name(f"{path.name}.{key}.partial")
    if not partial.exists():
        begin = partial.with_suffix(".begin")
        with begin.open("wb") as file:  # all of it, so that the disk holds it
            np.save(file, np.broadcast_to(np.float32(np.nan), (len(ids), run.config.model.width)))
        begin.replace(partial)
    vectors = np.load(partial, mmap_mode="r+")
    done = ~np.isnan(vectors.sum(axis=1))
    compiled = jax.jit(functools.partial(_pooled, run.model, how))
    title, there = f"{run.name}: vectors", int(done.sum())
    with Progress(title, len(ids), "line", done=there, show=show) as bar:
        for rows, batch in batches(run, ids, done.tolist()):
            of_batch = _on_devices(run, compiled, *batch)[: len(rows)]
            if np.isnan(of_batch).any():
                raise ValueError(f"{run} gives NaN for a text of {len(ids[rows[0]])} tokens")
            vectors[rows] = of_batch
            bar.update(len(rows))
    vectors.flush()
    partial.replace(path)
    return vectors


def _within(run: TrainedRun, ids: list[list[int]], how: Vectors) -> list[list[int]]:
    """Returns the lines' tokens, cut if asked for. Raises ValueError for empty or too long ones."""
    record, end = run.directory.provenance(), run.tokenizer.around[1]
    origin = record.get("imported_from") or record.get("parent") or {}
    lengths = origin.get("lengths", {}).values()
    most = how.max_tokens or max([run.config.train_length, *lengths])
    longest = max(range(len(ids)), key=lambda line: len(ids[line]))
    for line, row in enumerate(ids, 1):
        if not row:
            raise ValueError(f"line {line} has no tokens; leave out empty lines")
        if len(row) > most and not how.cut:
            raise ValueError(
                f"line {line} has {len(row):,} tokens and {most:,} are allowed; give --max_tokens={len(row)}, or "
                "--cut"
            )
    if reason := run.undefined(min(most, len(ids[longest]))):
        raise ValueError(f"line {longest + 1}: {reason}")
    return [row if len(row) <= most else [*row[: most - len(end)], *end] for row in ids]


def _pooled(
    model: DecoderLM, how: Vectors, params: PyTree, tokens: Array, sizes: Array
) -> Float[Array, "rows width"]:
    features = jnp.asarray(model.apply({"params": params}, tokens, sizes, method=_features))
    pooled = features[:, 0]
    if how.pooling == "mean":
        inside = (jnp.arange(tokens.shape[1])[None] < sizes[:, None])[..., None]
        pooled = (features * inside).sum(axis=1) / sizes[:, None]
    norms = jnp.linalg.norm(pooled, axis=-1, keepdims=True)
    return pooled / jnp.maximum(norms, 1e-12) if how.normalised else pooled
