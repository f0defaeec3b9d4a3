"""The softmax over the vocabulary: logits, and the loss of tokens in bounded memory."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from alibi.config import Config
from alibi.numerics.products import Products, transposed
from alibi.parallel.sharding import for_lookup, split_batch, whole_rows

Losses = Float[Array, "*batch_length"]  # `[batch, length]`, or a sum

# From float32 logits and targets to each token's loss.
TokenLoss = Callable[
    [Float[Array, "batch length vocabulary"], Int[Array, "batch length"]],
    Float[Array, "batch length"],
]


def cross_entropy(
    logits: Float[Array, "batch length vocabulary"], targets: Int[Array, "batch length"]
) -> Float[Array, "batch length"]:
    """Returns -log softmax(logits)[target] in nats, float32, and 0 for negative targets."""
    logits = logits.astype(jnp.float32)
    of_target = jnp.where(_is_target(logits, targets), logits, 0.0).sum(axis=-1)
    nll = jax.nn.logsumexp(logits, axis=-1) - of_target
    return jnp.where(targets < 0, 0.0, nll)


def training_loss(config: Config) -> TokenLoss:
    """Returns the loss that training minimizes. Reported losses are `cross_entropy`.

    With s = label_smoothing, target y, n words, logits x and Z = sum(exp(x)):

        (1 - s) (log Z - x_y) + s (log Z - sum(x) / n) + z_loss (log Z)^2

    Sources: Szegedy et al. 2016 (arXiv 1512.00567), section 7, as `optax.smooth_labels`; Chowdhery
    et al. 2022 (PaLM, arXiv 2204.02311), section 5.

    Raises:
      ValueError: options that don't go with the model.

    Example:
      >>> from alibi.config import make_config
      >>> import jax.numpy as jnp
      >>> loss = training_loss(make_config("train.z_loss=0.01"))
      >>> loss(jnp.zeros((1, 1, 4)), jnp.zeros((1, 1), int)).round(4).tolist()
      [[1.4055]]
    """
    smoothing, z_loss = config.train.label_smoothing, config.train.z_loss
    if not smoothing and not z_loss:
        return cross_entropy
    if config.model.embedding == "adaptive":
        raise ValueError(
            f"train.label_smoothing={smoothing} and train.z_loss={z_loss} read the logits of all words, which "
            "model.embedding=adaptive never computes; leave them at 0, or use model.embedding=tied"
        )

    def loss(logits: Array, targets: Array) -> Array:
        log_z = jax.nn.logsumexp(logits, axis=-1)
        uniform = log_z - logits.mean(axis=-1)
        smoothed = (1 - smoothing) * cross_entropy(logits, targets) + smoothing * uniform
        return smoothed + z_loss * log_z**2

    return loss


@dataclasses.dataclass(frozen=True)
class Head:
    """Computes logits from features, and losses from logits.

    Attributes:
      dtype: the product's dtype.
      products: compute the product.
      logits_chunk: how many tokens have logits at the same time.
      sharding: how the batch is split over devices. Defaults to the compiler's choice.
    """

    dtype: Any
    products: Products
    logits_chunk: int
    sharding: NamedSharding | None

    def logits(
        self,
        features: Float[Array, "batch length width"],
        embedding: Float[Array, "vocabulary width"],
    ) -> Float[Array, "batch length vocabulary"]:
        """Returns features embedding^T, multiplied in `dtype`, float32."""
        features = split_batch(features, self.sharding).astype(self.dtype)
        logits = self.products.matmul(features, embedding.astype(self.dtype), axis=1)
        return split_batch(logits, self.sharding, split_features=True)

    def token_losses(
        self,
        logits: Callable[[Float[Array, "_ _ width"]], Float[Array, "_ _ vocabulary"]],
        features: Float[Array, "batch length width"],
        targets: Int[Array, "batch length"],
        loss: TokenLoss = cross_entropy,
        summed: bool = False,
    ) -> tuple[Losses, Losses]:
        """Returns each target's loss and cross entropy, or with `summed` their sums, float32. Negative
        targets count 0.

        About `logits_chunk` tokens have logits at the same time: chunks are computed in turn. A chunk is
        a range of positions in all sequences, so that a sharded batch stays on its devices. The backward
        pass computes a chunk's logits again, but not for sums: their gradient is computed with them.

        Args:
          logits: a function from features to float32 logits.
          loss: a function on a chunk, negative targets included. Beside another loss than the default,
            and in a sum, the cross entropy has no gradient.
          summed: return the sums over all targets. Only `model.products=plain` has forward-mode
            derivatives for them.
        """
        batch, length = targets.shape
        # A batch larger than a chunk is folded, neighbouring rows together: rows stay on their devices.
        rows = next(
            batch // n
            for n in range(1, batch + 1)
            if batch % n == 0 and batch // n <= self.logits_chunk
        )
        features, targets = (x.reshape(rows, -1, *x.shape[2:]) for x in (features, targets))
        columns = targets.shape[1]
        chunk = self.logits_chunk // rows

        def of_chunk(chunk: tuple[Array, Array]) -> list[Array]:
            scores, chosen = logits(chunk[0]), chunk[1]
            if loss is cross_entropy:
                return [cross_entropy(scores, chosen)]
            nll = cross_entropy(jax.lax.stop_gradient(scores), chosen)
            own = jnp.where(chosen < 0, 0.0, loss(scores, chosen).astype(jnp.float32))
            return [own, nll]

        def sums(losses: list[Array]) -> tuple[Array, Array]:
            return losses[0].sum(), jax.lax.stop_gradient(losses[-1].sum())

        if chunk >= columns:
            losses = of_chunk((features, targets))
        else:
            padding = ((0, 0), (0, -columns % chunk))
            tiles = (rows, -1, chunk)
            features = jnp.pad(features, (*padding, (0, 0))).reshape(*tiles, features.shape[-1])
            targets = jnp.pad(targets, padding, constant_values=-1).reshape(tiles)
            parts = jnp.moveaxis(features, 1, 0), jnp.moveaxis(targets, 1, 0)
            if summed and not self.products.plain:
                # the arrays that the function reads beside its chunk, such as the softmax's matrix
                sums_of, arrays = jax.closure_convert(
                    lambda *chunk: sums(of_chunk(chunk)), parts[0][0], parts[1][0]
                )
                return _sums_of_chunks(sums_of, *parts, arrays)
            losses = jax.lax.map(jax.checkpoint(of_chunk), parts)
            losses = [jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :columns] for x in losses]
        if summed:
            return sums(losses)
        return losses[0].reshape(batch, length), losses[-1].reshape(batch, length)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums_of_chunks(
    sums_of: Callable[..., tuple[Array, Array]],
    features: Float[Array, "chunks rows chunk width"],
    targets: Int[Array, "chunks rows chunk"],
    arrays: list[Array],
) -> tuple[Array, Array]:
    """Returns the sums of `sums_of(features, targets, *arrays)` over all chunks."""
    return _sums_forward(sums_of, features, targets, arrays)[0]


def _sums_forward(
    sums_of: Callable[..., tuple[Array, Array]],
    features: Array,
    targets: Array,
    arrays: list[Array],
) -> tuple[tuple[Array, Array], tuple[Array, list[Array]]]:
    """Returns the sums, and the gradient of the first for features and arrays."""
    gradient = jax.value_and_grad(
        lambda features, arrays, targets: sums_of(features, targets, *arrays),
        argnums=(0, 1),
        has_aux=True,
    )

    def add(totals: Any, chunk: tuple[Array, Array]) -> tuple[Any, Array]:
        sums, (dfeatures, darrays) = gradient(chunk[0], arrays, chunk[1])
        return jax.tree.map(jnp.add, totals, (sums, darrays)), dfeatures

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero), jax.tree.map(jnp.zeros_like, arrays)
    (sums, darrays), dfeatures = jax.lax.scan(add, start, (features, targets))
    return sums, (dfeatures, darrays)


def _sums_backward(
    _: Any, gradients: tuple[Array, list[Array]], dsums: tuple[Array, Array]
) -> tuple[Array, None, list[Array]]:
    # The cross entropy has no gradient, so dsums[1] is not read.
    dfeatures, darrays = jax.tree.map(lambda x: (x * dsums[0]).astype(x.dtype), gradients)
    return dfeatures, None, darrays


_sums_of_chunks.defvjp(_sums_forward, _sums_backward)


@dataclasses.dataclass(frozen=True)
class Embedding:
    """The matrices for inputs and softmax, which may be the same (Press and Wolf 2017).

    Attributes:
      embedding: the inputs' matrix.
      output: the softmax's matrix.
      head: computes the logits.
      logits_scale: multiplies them.
      bias: added to each word's logits, or None.
      transform: changes features before the softmax's matrix, or None.
    """

    embedding: Float[Array, "vocabulary width"]
    output: Float[Array, "vocabulary width"]
    head: Head
    logits_scale: float
    bias: Float[Array, " vocabulary"] | None = None
    transform: Callable[[Array], Array] | None = None

    def embed(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length width"]:
        """Returns the tokens' rows in the matrix."""
        return for_lookup(self.embedding, self.head.sharding)[tokens]

    def logits(
        self, features: Float[Array, "batch length width"], deterministic: bool = True
    ) -> Float[Array, "batch length vocabulary"]:
        """Returns the features' logits, float32."""
        return self._of_transformed(self._transformed(features))

    def _transformed(
        self, features: Float[Array, "batch length width"]
    ) -> Float[Array, "batch length width"]:
        return features if self.transform is None else self.transform(features)

    def _of_transformed(
        self, features: Float[Array, "batch length width"]
    ) -> Float[Array, "batch length vocabulary"]:
        logits = self.head.logits(features, self.output)
        logits = logits if self.logits_scale == 1 else logits * self.logits_scale
        return logits if self.bias is None else logits + self.bias.reshape(1, 1, -1)

    def token_losses(
        self,
        features: Float[Array, "batch length width"],
        targets: Int[Array, "batch length"],
        loss: TokenLoss = cross_entropy,
        deterministic: bool = True,
        summed: bool = False,
    ) -> tuple[Losses, Losses]:
        """Returns each target's loss and NLL, or their sums, as `Head.token_losses`."""
        # Flax's modules can't be called in the loop over chunks.
        features = self._transformed(features)
        whole = dataclasses.replace(self, output=whole_rows(self.output, self.head.sharding))
        return self.head.token_losses(whole._of_transformed, features, targets, loss, summed)


def _is_target(logits: Array, targets: Array) -> Bool[Array, "batch length vocabulary"]:
    # A comparison, not a gather: its gradient is one fused pass and no scatter.
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]


def selected_token_nll(
    embedding: Float[Array, "vocabulary width"],
    features: Float[Array, "batch length width"],
    targets: Int[Array, "batch length"],
    *,
    chunk_rows: int,
    parts: int = 1,
) -> Float[Array, "batch length"]:
    """Returns -log softmax(features embedding^T)[target] in nats, float32, and 0 for negative targets.

    Rows with a target are put together and taken `chunk_rows` at a time until none is left, so that the
    work follows the number of targets while all shapes are known. Only one chunk has logits at a time.
    The backward pass computes them again.

    Args:
      parts: how many parts the batch has, each with rows on its own devices. They compute their chunks
        at the same time.
    """
    parts = parts if targets.shape[0] % parts == 0 else 1
    folded = targets.reshape(parts, -1)
    chunks = -(-(folded >= 0).sum(axis=1).max() // chunk_rows)
    rows = features.reshape(*folded.shape, -1)
    nll = jax.vmap(functools.partial(_selected_nll, chunk_rows), in_axes=(None, 0, 0, None))(
        embedding, rows, folded, chunks
    )
    return nll.reshape(targets.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _selected_nll(
    chunk_rows: int,
    embedding: Float[Array, "vocabulary width"],
    features: Float[Array, "rows width"],
    targets: Int[Array, " rows"],
    chunks: Int[Array, ""],
) -> Float[Array, " rows"]:
    return _selected_forward(chunk_rows, embedding, features, targets, chunks)[0]


def _selected_forward(
    chunk_rows: int, embedding: Array, features: Array, targets: Array, chunks: Array
) -> tuple[Array, tuple[Array, ...]]:
    order, sorted_targets = _selected_first(targets, chunk_rows)

    def add(index: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        rows, of_chunk = (_chunk(x, index, chunk_rows) for x in (order, sorted_targets))
        logits = _logits(features[rows], embedding)
        sums = jax.nn.logsumexp(logits, axis=-1)
        nll = sums - jnp.take_along_axis(logits, jnp.maximum(of_chunk, 0)[:, None], axis=-1)[:, 0]
        return _put(results[0], nll, index), _put(results[1], sums, index)

    zeros = jnp.zeros(order.shape, jnp.float32)
    nll, sums = jax.lax.fori_loop(0, chunks, add, (zeros, zeros))
    return _unsorted(nll, targets), (embedding, features, targets, chunks, sums)


def _selected_backward(
    chunk_rows: int, saved: tuple[Array, ...], gradient: Float[Array, " rows"]
) -> tuple[Array, Array, None, None]:
    embedding, features, targets, chunks, sums = saved
    order, sorted_targets = _selected_first(targets, chunk_rows)
    sorted_gradient = jnp.where(sorted_targets < 0, 0.0, gradient[order])

    def add(index: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        of_embedding, of_features = results
        rows, of_chunk, of_sums, of_nll = (
            _chunk(x, index, chunk_rows) for x in (order, sorted_targets, sums, sorted_gradient)
        )
        selected = features[rows]
        probabilities = jnp.exp(_logits(selected, embedding) - of_sums[:, None])
        is_target = jax.lax.broadcasted_iota(jnp.int32, probabilities.shape, 1) == of_chunk[:, None]
        of_logits = probabilities - is_target.astype(jnp.float32)
        of_logits = (of_logits * of_nll[:, None]).astype(embedding.dtype)
        # Transposed until the end: then the product transposes its small factor.
        of_embedding += jnp.matmul(
            transposed(selected), of_logits, preferred_element_type=jnp.float32
        )
        of_selected = jnp.matmul(of_logits, embedding, preferred_element_type=jnp.float32)
        return of_embedding, _put(of_features, of_selected, index)

    zeros = (
        jnp.zeros(embedding.shape[::-1], jnp.float32),
        jnp.zeros((*order.shape, features.shape[1]), jnp.float32),
    )
    of_embedding, of_features = jax.lax.fori_loop(0, chunks, add, zeros)
    of_features = _unsorted(of_features, targets).astype(features.dtype)
    return of_embedding.T.astype(embedding.dtype), of_features, None, None


_selected_nll.defvjp(_selected_forward, _selected_backward)


def _selected_first(
    targets: Int[Array, " rows"], chunk_rows: int
) -> tuple[Int[Array, " padded"], Int[Array, " padded"]]:
    """Returns rows with a target, then others up to a multiple of `chunk_rows`, and their targets, -1
    for the others.
    """
    padding = (0, -targets.size % chunk_rows)
    order = jnp.argsort(targets < 0, stable=True)
    return jnp.pad(order, padding), jnp.pad(targets[order], padding, constant_values=-1)


def _unsorted(x: Float[Array, "..."], targets: Int[Array, " rows"]) -> Float[Array, "..."]:
    """Returns the results for `_selected_first`'s rows in their places, and 0 without a target."""
    selected = targets >= 0
    rows = jnp.maximum(jnp.cumsum(selected) - 1, 0)
    return jnp.where(selected.reshape(-1, *(1,) * (x.ndim - 1)), x[rows], 0.0)


def _logits(
    features: Float[Array, "rows width"], embedding: Float[Array, "vocabulary width"]
) -> Array:
    return jnp.einsum("rw,vw->rv", features, embedding, preferred_element_type=jnp.float32)


def _chunk(x: Array, index: Array, rows: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * rows, rows)


def _put(x: Array, chunk: Array, index: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, chunk, index * chunk.shape[0], axis=0)
