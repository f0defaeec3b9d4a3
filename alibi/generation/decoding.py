"""Generation: a prompt is read in chunks, then token by token, through a key-value cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from alibi.attention.call import as_array
from alibi.model.decoder import DecoderLM
from alibi.model.layers import unstacked


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def new_cache(
    model: DecoderLM, batch: int, slots: int, total: int | None = None, chunk: int | None = None
) -> PyTree:
    """Returns an empty cache of `slots` tokens for each sequence, of `total` tokens to come, read
    in chunks of `chunk` at most (see `DecoderLM`).
    """
    tokens = jnp.zeros((batch, slots), jnp.int32)
    # The compiler keeps only the cache of all that `init` traces: no parameters are made.
    made = model.init(jax.random.key(0), tokens, decode=True, total=total, chunk=chunk)
    return made["cache"]


@functools.partial(jax.jit, static_argnums=0, static_argnames="last", donate_argnums=2)
def read(
    model: DecoderLM,
    params: PyTree,
    cache: PyTree,
    tokens: Int[Array, "batch length"],
    positions: Int[Array, "batch length"] | None = None,
    *,
    last: int | None = None,
) -> tuple[Float[Array, "batch last vocabulary"], PyTree]:
    """Returns the logits after each of the `last` tokens (None: all tokens), and the cache with
    these tokens.

    Arguments and errors are those of `DecoderLM.__call__` with `decode=True`. The cache is changed
    in place: the given cache can't be used again. With `scan_layers` each call copies each layer's
    parameters out of their stack; the model of `unrolled` needn't.
    """

    def logits(module: DecoderLM) -> Array:
        return module.vocabulary.logits(
            module.features(tokens, positions=positions, decode=True, last=last), True
        )

    found, updated = model.apply(
        {"params": params, "cache": cache}, method=logits, mutable=["cache"]
    )
    return found, updated["cache"]


def unrolled(model: DecoderLM, params: PyTree) -> tuple[DecoderLM, PyTree]:
    """Returns the model with separate layers, which decode faster than scanned layers, and its
    parameters.
    """
    if not model.config.scan_layers:
        return model, params
    return model.clone(config=dataclasses.replace(model.config, scan_layers=False)), jax.jit(
        unstacked
    )(params)


def generate(
    model: DecoderLM,
    params: PyTree,
    prompt: Int[Array, "batch length"],
    new_tokens: int,
    *,
    chunk: int = 512,
    total: int | None = None,
    temperature: float = 0.0,
    key: PRNGKeyArray | None = None,
    positions: Int[Array, "batch length"] | None = None,
) -> Int[Array, "batch new_tokens"]:
    """Returns the model's continuation of each prompt.

    Its programs are compiled for a batch size, a length of prompts and a number of new tokens; with
    `total` prompts of all lengths share them.

    Args:
      prompt: token ids; if they are NumPy arrays, prompts of other lengths also share the padding
        programs.
      chunk: tokens of the prompt read at a time, which bounds the memory; the cache of a layer
        under a sliding window holds a window and a chunk.
      total: the largest number of tokens of prompt and answer together. Prompts are then padded to
        whole chunks, so choose a small chunk. Methods that depend on the length use it. None: the
        tokens of this call.
      temperature: divides the logits before `key` draws a token; 0: the likeliest token is taken.
      positions: positions of the prompt; a position below 0 is padding, by which prompts of several
        lengths end together.

    Raises:
      ValueError: a prompt of another shape or dtype, or with ids beyond the vocabulary (if their
        values are known here, padding aside); a number out of its range, no key to draw by, or more
        tokens in all than the position method is defined for.
    """
    prompt, positions = as_array(prompt), as_array(positions)
    _check_prompt(prompt, positions, model.vocab_size)
    batch, length = prompt.shape
    for name, value in (
        ("the prompt's length", length),
        ("new_tokens", new_tokens),
        ("chunk", chunk),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value} and must be at least 1")
    if temperature < 0 or (temperature and key is None):
        raise ValueError(
            f"temperature={temperature} must be 0, or above 0 with a key, such as key=jax.random.key(0)"
        )
    model, params = unrolled(model, params)
    stand = np.broadcast_to(np.arange(length), (batch, length)) if positions is None else positions
    slots = length + new_tokens
    if total is not None:
        if total < slots:
            raise ValueError(
                f"total={total} must be at least the {slots} tokens of prompt and answer"
            )
        slots, padding = total + chunk - 1, ((0, 0), (-length % chunk, 0))
        # NumPy's needs no program for each length
        pad = np.pad if isinstance(prompt, np.ndarray) else jnp.pad
        prompt, stand = pad(prompt, padding), pad(stand, padding, constant_values=-1)
        length = prompt.shape[1]
    cache = new_cache(model, batch, slots, total or slots, chunk)
    # the first chunk takes the remainder
    starts = [0, *range(length % chunk or chunk, length, chunk)]
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        part = slice(start, end)
        logits, cache = read(model, params, cache, prompt[:, part], stand[:, part], last=1)
    return decode(
        model, new_tokens, params, cache, logits, temperature, key if temperature else None
    )[0]


def _check_prompt(prompt: Array, positions: Array | None, vocab_size: int) -> None:
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


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def decode(
    model: DecoderLM,
    count: int,
    params: PyTree,
    cache: PyTree,
    logits: Float[Array, "batch 1 vocabulary"],
    temperature: float | Float[Array, ""],
    key: PRNGKeyArray | None,
) -> tuple[Int[Array, "batch count"], PyTree]:
    """Returns `count` tokens, the first drawn from these logits, and the cache with all of them but
    the last.

    Without a key they are the likeliest. A count below 1 raises ValueError.
    """
    if count < 1:
        raise ValueError(f"count is {count} and must be at least 1")

    def draw(
        logits: Float[Array, "batch 1 vocabulary"], number: int | Array
    ) -> Int[Array, " batch"]:
        if key is None:
            return jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)
        drawn = jax.random.categorical(jax.random.fold_in(key, number), logits[:, -1] / temperature)
        return drawn.astype(jnp.int32)

    def step(before: tuple[Array, PyTree], number: Array) -> tuple[tuple[Array, PyTree], Array]:
        token = draw(before[0], number)
        return read(model, params, before[1], token[:, None], last=1), token

    (logits, cache), tokens = jax.lax.scan(step, (logits, cache), jnp.arange(count - 1))
    return jnp.append(tokens.T, draw(logits, count - 1)[:, None], axis=1), cache
