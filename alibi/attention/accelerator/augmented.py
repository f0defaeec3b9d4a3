"""Causal ALiBi with cuDNN's flash kernel: eight more columns of queries and keys give the bias."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from alibi.attention.call import AttentionCall
from alibi.positions.bias import consecutive

# bfloat16 holds each integer up to 256, so 512 a + b with |a|, |b| <= 256 reaches 131,072 on both
# sides of 0.
DIGIT = 512
MAX_LENGTH = DIGIT**2
COLUMNS = 8

Slopes = Float[Array, " heads"]


def augmented_attention(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """Computes causal ALiBi attention with cuDNN's flash kernel, in memory linear in the length.

    cuDNN knows no ALiBi and needs none: the bias is in the products of widened queries and
    keys (`bias_columns`), so there is neither a `[heads, q, k]` bias nor its gradient. It is
    differentiable once, in reverse mode, in queries, keys, values and slopes.

    For bfloat16 inputs the logits are as exact as the dense ones. The slopes' gradient is
    summed in float32 from the kernel's dq, which is rounded to bfloat16 first. The error is about 1%
    at 1,024 tokens, so `auto` leaves learned slopes to other backends.

    On a CPU the dense formula of `jax.nn` stands in for a kernel, for tests.

    Source: paper, section 3, and FlashBias (arXiv 2505.12044).
    """
    assert call.bias is not None
    rows = [x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value)]
    length, head_dim, value_dim = call.query.shape[-3], call.query.shape[-1], call.value.shape[-1]
    # The kernel multiplies by the scale in float32. Scaled before, the bfloat16 queries would
    # be rounded wherever the scale is no power of two.
    scale, window = head_dim**-0.5, call.options.window
    slopes = jnp.asarray(call.bias.slopes, jnp.float32) / scale
    # Columns stand in front, so that large products cancel before small ones are added. They are
    # cast after broadcasting, so that the gradient of the slopes is summed over the batch in
    # float32.
    for index, columns in enumerate(bias_columns(slopes, length)):
        columns = jnp.broadcast_to(columns, (*rows[index].shape[:-1], COLUMNS))
        rows[index] = jnp.concatenate([columns.astype(rows[index].dtype), rows[index]], axis=-1)
    # cuDNN's backward pass needs an even length, and CPUs add the columns in their order only at
    # multiples of 16. Queries, keys and values must have one width. The causal mask hides the added
    # keys from the real queries, and the results of added queries are cut off.
    width, padded_length = _kernel_width(head_dim, value_dim), length + -length % 16
    attended = jax.nn.dot_product_attention(
        *(padded(padded(x, -1, width), 1, padded_length) for x in rows),
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None or window >= length else (window - 1, 0),
        implementation="cudnn" if call.options.platform == "gpu" else "xla",
    )
    return attended[:, :length, :, :value_dim].reshape(*call.query.shape[:-1], value_dim)


def cannot_augment(call: AttentionCall) -> str:
    """Returns why `augmented_attention` can't do the call, or an empty string."""
    platform = call.options.platform
    bias = call.bias
    if bias is None or bias.slopes is None or bias.symmetric or bias.metric or not call.causal:
        return "its bias is not ALiBi's under a causal mask"
    if call.precision is not None:
        return "its kernels take no precision"
    if call.known_positions is None:
        return "positions are not known when it is traced"
    if platform == "tpu":
        return "it has a kernel for GPUs alone"
    queries, keys = call.known_positions
    if not (np.array_equal(queries, keys) and consecutive(keys)):
        return "queries do not stand at the same consecutive positions as the keys"
    if keys.size > MAX_LENGTH:
        return f"it has columns for {MAX_LENGTH} positions and got {keys.size}"
    dtypes = {"gpu": ["bfloat16"]}.get(platform, ["bfloat16", "float32"])
    if call.query.dtype not in dtypes or not call.query.dtype == call.key.dtype == call.value.dtype:
        return f"on {platform} it takes {' or '.join(dtypes)}, and got {call.query.dtype}"
    if platform == "gpu":
        capability = compute_capability()
        width = _kernel_width(call.query.shape[-1], call.value.shape[-1])
        if jax.default_backend() == "gpu" and capability < 8.0:
            return "cuDNN's flash kernel needs an NVIDIA GPU of compute capability 8.0 or more"
        widest = 256 if capability >= 9.0 else 128
        if width > widest:
            return f"cuDNN takes heads up to {widest} wide here, and with its columns this one has {width}"
    return ""


def bias_columns(
    slopes: Slopes, length: int
) -> tuple[Float[Array, "length heads columns"], Float[Array, "length heads columns"]]:
    """Returns columns for queries and keys, float32, with products -m (i - j) plus a constant in each
    row.

    Softmax ignores the constant. All entries are exact in bfloat16, and their products are exact in
    float32: a position, counted from the middle, is 512 a + b, and a float32 slope is the sum of
    three terms. Six columns add m j. Two more add -m i with a relative error up to 2^-16, which is the
    constant. Without them the sums would grow as m j, and float32 would lose m (i - j) in them at
    long lengths.
    """
    positions = jnp.arange(length, dtype=jnp.int32) - length // 2
    high = (positions + DIGIT // 2) // DIGIT
    low = positions - DIGIT * high
    of_key = jnp.stack([jnp.ones_like(low)] * 2 + [DIGIT * high] * 3 + [low] * 3, axis=-1).astype(
        jnp.float32
    )
    of_row = _terms(-positions.astype(jnp.float32)[:, None] * slopes[None, :], 2)
    of_slope = [jnp.broadcast_to(term, of_row[0].shape) for term in _terms(slopes[None, :], 3)]
    of_query = jnp.stack([*of_row, *of_slope, *of_slope], axis=-1)
    return of_query, jnp.broadcast_to(of_key[:, None, :], of_query.shape)


def _terms(x: Float[Array, "..."], count: int) -> list[Array]:
    """Returns `count` numbers, bfloat16, that sum to x (1 - 2^-(8 count)) or closer, the first with
    x's gradient.
    """
    rest, terms = lax.stop_gradient(x), []
    for _ in range(count):
        # Not by casting to bfloat16 and back, which XLA may leave out.
        terms.append(lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
        rest = rest - terms[-1]
    return [terms[0] + (x - lax.stop_gradient(x)), *terms[1:]]


def _kernel_width(head_dim: int, value_dim: int) -> int:
    width = max(head_dim + COLUMNS, value_dim)
    return width + -width % 8


def compute_capability() -> float:
    """Returns the compute capability of the first NVIDIA GPU, or 0 if there is none."""
    try:
        return float(jax.local_devices(backend="cuda")[0].compute_capability)
    except RuntimeError:
        return 0.0


def padded(x: Array, axis: int, size: int) -> Array:
    """Returns `x` filled up with zeros to `size` along `axis`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
