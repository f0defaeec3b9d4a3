"""Generation: a prompt is read in chunks, then token by token, through a key-value cache."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from alibi.data.tokenizers.base import Tokenizer
from alibi.devices.memory import check_memory
from alibi.generation.sampling import GREEDY, Sampler
from alibi.model.decoder import DecoderLM
from alibi.model.layers import unstacked
from alibi.positions.distance import as_array

JOINED = 16  # tokens of a prompt that are decoded with its answer

Ids = Array | np.ndarray
Prompts = str | Sequence[str] | Sequence[Sequence[int]] | Int[Array, "batch length"]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def new_cache(
    model: DecoderLM, batch: int, slots: int, total: int | None = None, chunk: int | None = None
) -> PyTree:
    """Returns an empty cache with `slots` for each sequence. See `DecoderLM` for `total` and `chunk`."""
    tokens = jnp.zeros((batch, slots), jnp.int32)
    # The compiler keeps the cache alone: no parameters are made.
    return model.init(jax.random.key(0), tokens, decode=True, total=total, chunk=chunk)["cache"]


@functools.partial(jax.jit, static_argnums=0, static_argnames=("fresh", "last"), donate_argnums=2)
def read(
    model: DecoderLM,
    params: PyTree,
    cache: PyTree,
    tokens: Int[Array, "batch length"],
    positions: Int[Array, "batch length"] | None = None,
    *,
    fresh: bool = False,
    last: int | None = None,
) -> tuple[Float[Array, "batch last vocabulary"], PyTree]:
    """Returns the logits after each of the `last` tokens (defaults to all), and the cache with these
    tokens.

    See `DecoderLM.__call__` with `decode=True` for arguments and errors. The cache changes in place
    and can't be used again. With `scan_layers` each call copies each layer's parameters out of their
    stack. `unrolled` avoids this.
    """

    def logits(module: DecoderLM) -> Array:
        return module.vocabulary.logits(
            module.features(tokens, positions=positions, decode=True, fresh=fresh, last=last), True
        )

    variables = {"params": params, "cache": cache}
    out, updated = model.apply(variables, method=logits, mutable=["cache"])
    return out, updated["cache"]


def unrolled(model: DecoderLM, params: PyTree) -> tuple[DecoderLM, PyTree]:
    """Returns the model and its parameters with separate layers, which decode faster than scanned
    layers.
    """
    if not model.config.scan_layers:
        return model, params
    config = dataclasses.replace(model.config, scan_layers=False)
    return model.clone(config=config), jax.jit(unstacked)(params)


def generate(
    model: DecoderLM,
    params: PyTree,
    prompt: Prompts,
    new_tokens: int,
    *,
    tokenizer: Tokenizer | None = None,
    sample: Sampler = GREEDY,
    seed: int = 0,
    chunk: int = 512,
    total: int | None = None,
    positions: Int[Ids, "batch length"] | None = None,
) -> Any:
    """Continues each prompt: returns texts for texts, else token ids `[batch,
    new_tokens]`.

    A program is compiled for each batch size, prompt length and number of new tokens. With `total`
    all prompt lengths share one. `stream` can stop earlier and yields the NLL of each token.

    Args:
      prompt: a text or a list of texts, or token ids: an array `[batch, length]` or lists, which may
        differ in length.
      tokenizer: the run's tokenizer, for texts.
      sample: draws the next token from the logits: `Sampling`, or your own function.
      seed: from 0 to 2**32 - 1. Sequence i draws with `jax.random.key(seed + i)`.
      chunk: prompt tokens read at a time, which bounds the memory. The cache of a layer with a
        sliding window holds a window and a chunk.
      total: the most tokens of prompt and answer together. Defaults to the tokens of this call.
        Methods that depend on the length use it. Prompts are padded to whole chunks, so choose a
        small chunk.
      positions: the prompt's positions. A position below 0 is padding before a shorter prompt.

    Raises:
      ValueError: a prompt of another shape or dtype, or with ids beyond the vocabulary (if their
        values are known here, padding aside), a text without a tokenizer, a number out of its range,
        or more tokens in all than the position method is defined for, or than fit into the memory.
    """
    is_text, rows = _all_are(prompt, str), cast(Any, prompt)
    if is_text:
        if tokenizer is None:
            raise ValueError("prompts that are text need tokenizer=, such as that of a TrainedRun")
        texts = [prompt] if isinstance(prompt, str) else rows
        rows = ids = [tokenizer.encode_beginning(text) for text in texts]
    if _all_are(rows, Sequence) and len(set(map(len, rows))) > 1:
        rows, positions = padded_prompts(rows)
    tokens, positions = as_array(rows), as_array(positions)
    model, params, cache, logits = prefill(
        model, params, tokens, positions, new_tokens, chunk, total
    )
    keys = sequence_keys([checked_seed(seed) + index for index in range(len(tokens))])
    made = decode(model, params, cache, logits, keys, 0, sample=sample, count=new_tokens)[0]
    if not is_text or tokenizer is None:
        return made
    answers = [decode_answer(tokenizer, *pair) for pair in zip(ids, made.tolist(), strict=True)]
    return answers[0] if isinstance(prompt, str) else answers


def _all_are(x: Any, kind: type) -> bool:
    return isinstance(x, Sequence) and all(isinstance(item, kind) for item in x)


def stream(
    model: DecoderLM,
    params: PyTree,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    sample: Sampler = GREEDY,
    seeds: Sequence[int] | None = None,
    chunk: int = 512,
    total: int | None = None,
    each: int = 1,
) -> Iterator[tuple[Int[np.ndarray, "batch each"], Float[np.ndarray, "batch each"]]]:
    """Yields all sequences' next `each` tokens and their NLL under the model in nats.

    One program reads the first chunk, one later chunks, and one makes `each` tokens. Calls with as
    many prompts and the same `total` share them.

    Args:
      prompts: token ids, which may differ in length.
      new_tokens: tokens to make. The last piece may be shorter than `each`.
      seeds: one for each sequence. Defaults to 0, 1, ...
      sample, chunk, total: as in `generate`.

    Raises:
      ValueError: as in `generate`.
    """
    prompt, positions = padded_prompts(prompts)
    total = prompt.shape[1] + new_tokens if total is None else total
    model, params, cache, logits = prefill(
        model, params, prompt, positions, new_tokens, chunk, total
    )
    keys = sequence_keys(np.arange(len(prompt)) if seeds is None else seeds)
    for first in range(0, new_tokens, each):
        tokens, nll, logits, cache = decode(
            model, params, cache, logits, keys, first, sample=sample, count=each
        )
        left = new_tokens - first  # the program makes `each`, perhaps past the end of the cache
        yield np.asarray(tokens)[:, :left], np.asarray(nll)[:, :left]


def decode_answer(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Returns the text that the tokens add to the prompt: with a space between words, and with the
    whole character if the prompt ends within one.
    """
    # after a boundary the tokens begin a text, so many decoders leave out their first space
    before = [] if prompt[-1] == tokenizer.boundary_id else list(prompt[-JOINED:])
    text, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    while not whole.startswith(text):
        text = text[:-1]
    return whole[len(text) :]


def padded_prompts(
    prompts: Sequence[Sequence[int]],
) -> tuple[Int[np.ndarray, "batch length"], Int[np.ndarray, "batch length"]]:
    """Returns prompts with padding before the shorter ones, and their positions."""
    longest = max(map(len, prompts))
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[longest - len(ids) :] = ids
    lengths = np.array(list(map(len, prompts)))
    return tokens, np.arange(longest) - (longest - lengths)[:, None]


def checked_seed(seed: Any) -> Any:
    """Returns the seed. Raises ValueError if it is no whole number of 32 bits, and so equal to another seed."""
    if not isinstance(seed, jax.core.Tracer):
        value = np.asarray(seed)
        if value.ndim or value.dtype.kind not in "iu" or not 0 <= value < 2**32:
            raise ValueError(f"seed={seed!r} must be a whole number from 0 to {2**32 - 1}")
    return seed


def sequence_keys(seeds: Iterable[Any]) -> PRNGKeyArray:
    """Returns each sequence's key. Raises ValueError for a seed out of range."""
    return jax.vmap(jax.random.key)(jnp.array([checked_seed(seed) for seed in seeds], jnp.uint32))


def prefill(
    model: DecoderLM,
    params: PyTree,
    prompt: Int[Ids, "batch length"],
    positions: Int[Ids, "batch length"] | None,
    new_tokens: int,
    chunk: int,
    total: int | None,
) -> tuple[DecoderLM, PyTree, PyTree, Float[Array, "batch 1 vocabulary"]]:
    """Returns model and parameters for `decode`, a cache with the prompt, and the logits after it,
    see `generate`.
    """
    _check_prompt(prompt, positions, model.vocab_size)
    batch, length = prompt.shape
    for name, value in (
        ("the prompt's length", length),
        ("new_tokens", new_tokens),
        ("chunk", chunk),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value} and must be at least 1")
    model, params = unrolled(model, params)
    slots, stand = length + new_tokens, positions
    model.check_length(slots if total is None else total)
    if total is not None:
        if total < slots:
            raise ValueError(
                f"total={total} must be at least the {slots} tokens of prompt and answer"
            )
        slots, padding = total + chunk - 1, ((0, 0), (-length % chunk, 0))
        if stand is None:
            stand = np.broadcast_to(np.arange(length), (batch, length))
        # NumPy's needs no program for each length
        pad = np.pad if isinstance(prompt, np.ndarray) else jnp.pad
        prompt, stand = pad(prompt, padding), pad(stand, padding, constant_values=-1)
        length = prompt.shape[1]
    sizes = batch, slots, total or slots, chunk
    needed = jax.eval_shape(lambda: new_cache(model, *sizes))
    check_memory(f"a cache of {batch} x {slots:,} tokens", needed, "ask for fewer new tokens")
    cache = new_cache(model, *sizes)
    # the first chunk takes the remainder
    starts = [0, *range(length % chunk or chunk, length, chunk)]
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        stand_here = None if stand is None else stand[:, start:end]
        logits, cache = read(
            model, params, cache, prompt[:, start:end], stand_here, fresh=start == 0, last=1
        )
    return model, params, cache, logits


def _check_prompt(prompt: Ids, positions: Ids | None, vocab_size: int) -> None:
    if prompt.ndim != 2:
        raise ValueError(
            f"the prompt has shape {prompt.shape} and must be [batch, length]; give one as prompt[None]"
        )
    if prompt.size and not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(
            f"the prompt has dtype {prompt.dtype}; it must hold token ids, integers: encode text with the run's own "
            "tokenizer"
        )
    if positions is not None and positions.shape != prompt.shape:
        raise ValueError(f"positions have shape {positions.shape}; the prompt needs {prompt.shape}")
    arrays = [x for x in (prompt, positions) if isinstance(x, jax.Array)]
    if any(isinstance(x, jax.core.Tracer) or not x.is_fully_addressable for x in arrays):
        return
    ids = (
        np.asarray(prompt) if positions is None else np.asarray(prompt)[np.asarray(positions) >= 0]
    )
    # a look-up would silently take other ids
    if wrong := ids[(ids < 0) | (ids >= vocab_size)].tolist():
        raise ValueError(
            f"the prompt holds the id {wrong[0]}, and ids must be from 0 to {vocab_size - 1}; "
            "encode it with the run's own tokenizer"
        )


@functools.partial(jax.jit, static_argnums=0, static_argnames=("sample", "count"), donate_argnums=2)
def decode(
    model: DecoderLM,
    params: PyTree,
    cache: PyTree,
    logits: Float[Array, "batch 1 vocabulary"],
    keys: PRNGKeyArray,
    first: int | Int[Array, ""],
    *,
    sample: Sampler,
    count: int,
) -> tuple[
    Int[Array, "batch count"],
    Float[Array, "batch count"],
    Float[Array, "batch 1 vocabulary"],
    PyTree,
]:
    """Returns `count` tokens, the first drawn from these logits, their NLL in nats, the logits after
    the last token, and the cache with all tokens.

    Args:
      cache: changes in place and can't be used again.
      keys: one for each sequence. Token n is drawn with this key folded with n.
      first: the number n of the first token.
    """

    def step(
        before: tuple[Array, PyTree], index: Array
    ) -> tuple[tuple[Array, PyTree], tuple[Array, Array]]:
        logits, cache = before
        of_token = jax.vmap(lambda key: jax.random.fold_in(key, index))(keys)
        token = sample(model.writable(logits[:, -1]), of_token)
        weights = jax.nn.log_softmax(logits[:, -1], axis=-1)
        nll = -jnp.take_along_axis(weights, token[:, None], axis=1)[:, 0]
        return read(model, params, cache, token[:, None], last=1), (token, nll)

    after, (tokens, nll) = jax.lax.scan(step, (logits, cache), first + jnp.arange(count))
    return tokens.T, nll.T, *after
