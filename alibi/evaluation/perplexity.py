"""The negative log-likelihood of every token of a stream, window by window, on any number of devices and hosts."""

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Float, Int, PyTree

from alibi.evaluation.windows import Batch, Windows, batches, gather, plan

# (params, inputs [rows, length], targets [rows, stride], scored_from [rows]) -> nats [rows, stride];
# without scored_from, which windows that do not overlap leave out, targets belong to the first inputs.
NllFunction = Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class Score:
    """What a pass over a stream found.

    Attributes:
      windows: how the stream was cut.
      nll_nats: float32, of each token, in stream order.
      seconds: wall time of the pass, from the first batch read to the last result on the
        host; compilation is done before and not counted.
    """

    windows: Windows
    nll_nats: Float[np.ndarray, " tokens"]
    seconds: float

    @property
    def total_nats(self) -> float:
        """The sum over the tokens, in float64."""
        return float(self.nll_nats.sum(dtype=np.float64))

    @property
    def tokens(self) -> int:
        return self.nll_nats.size

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Scorer:
    """Scores streams with one function, which is compiled once for each batch shape and then kept.

    Args:
      nll_function: see `model_nll`.
      boundary_id: the token that stands before the first one of a stream.
      batch_tokens: inputs a device holds at one time, so that longer windows come in
        smaller batches; at least one window.
      sharding: how the batch dimension lies on the devices; by default all on the first.
        On several hosts each reads only the rows of its own devices, and all get the result.
    """

    def __init__(
        self,
        nll_function: NllFunction,
        *,
        boundary_id: int,
        batch_tokens: int,
        sharding: Sharding | None = None,
    ):
        if batch_tokens < 1:
            raise ValueError(f"eval.batch_tokens={batch_tokens} must be at least 1")
        self._sharding = SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
        self._boundary_id, self._batch_tokens = boundary_id, batch_tokens
        self._jitted = jax.jit(nll_function, out_shardings=_replicated(self._sharding))
        self._compiled: dict[tuple[int, int, int], Any] = {}

    def score(
        self,
        params: PyTree,
        tokens: Int[np.ndarray, " tokens"],
        length: int,
        stride: int | None = None,
        *,
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> Score:
        """The NLL of each of `tokens` in windows of `length` inputs, each window scoring `stride` (default: `length`).

        Neither the batch nor the devices change what is computed of a token.

        Args:
          progress: called with the number of tokens that were scored since the last call.

        Raises:
          ValueError: no tokens, a stride outside 1..length, or a length that the model
            is not defined for.
        """
        windows = plan(len(tokens), length, stride)
        rows = self._rows(windows)
        function = self._compile(params, windows, rows)
        nll = np.empty(windows.num_tokens, np.float32)
        running: collections.deque[tuple[int, Array]] = collections.deque()
        start = time.perf_counter()
        for numbers in batches(windows, rows):
            running.append((int(numbers[0]), function(params, *self._place(tokens, windows, numbers))))
            if len(running) > 1:  # fetch a batch only when the devices have the next one to work on
                progress(_fetch(nll, windows, *running.popleft()))
        progress(_fetch(nll, windows, *running.popleft()))
        return Score(windows, nll, time.perf_counter() - start)

    def _rows(self, windows: Windows) -> int:
        """Windows of a batch: what the token budget allows on each device, and no more than there are."""
        devices = len(self._sharding.device_set)
        shards = devices // self._sharding.shard_shape((devices,))[0]
        each = max(1, self._batch_tokens // windows.length)
        return shards * min(each, -(-len(windows) // shards))

    def _compile(self, params: PyTree, windows: Windows, rows: int) -> Any:
        """The function compiled for this shape; kept, so that a validation during training compiles once."""
        key = (rows, windows.length, windows.stride)
        if key not in self._compiled:
            shapes = _shapes(windows, rows).values()
            batch = [jax.ShapeDtypeStruct(shape, np.int32, sharding=self._sharding) for shape in shapes]
            self._compiled[key] = self._jitted.lower(params, *batch).compile()
        return self._compiled[key]

    def _place(self, tokens: Int[np.ndarray, " tokens"], windows: Windows, numbers: Int[np.ndarray, " rows"]) -> list:
        """The batch on the devices; only the rows of this host's devices are read."""
        parts: dict[tuple[int, ...], Batch] = {}

        def local(name: str, index: tuple[slice, ...]) -> np.ndarray:
            bounds = index[0].indices(numbers.size)[:2]
            if bounds not in parts:
                parts[bounds] = gather(tokens, windows, numbers[slice(*bounds)], self._boundary_id)
            return getattr(parts[bounds], name)

        return [
            jax.make_array_from_callback(shape, self._sharding, functools.partial(local, name))
            for name, shape in _shapes(windows, numbers.size).items()
        ]


def model_nll(model: nn.Module) -> NllFunction:
    """The function that a `Scorer` needs, of a model with `token_nll` such as `alibi.model.DecoderLM`."""

    def nll(params: PyTree, inputs: Array, targets: Array, scored_from: Array | None = None) -> Array:
        nll = model.apply({"params": params}, inputs, targets, scored_from=scored_from, method="token_nll")
        return jnp.asarray(nll)

    return nll


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Of a text: perplexity by token and by word, and bits per byte.

    None where the text has no words or bytes, and for a perplexity that is no float64.
    """

    perplexity: float | None
    word_perplexity: float | None
    bits_per_byte: float | None


def metrics(nll_nats: float, tokens: int, words: int, bytes: int) -> Metrics:
    """The figures that are reported of a summed NLL in nats; the counts are those of the text that was scored."""
    return Metrics(
        perplexity=_exp(nll_nats / tokens),
        word_perplexity=_exp(nll_nats / words) if words else None,
        bits_per_byte=nll_nats / math.log(2) / bytes if bytes else None,
    )


def _exp(nats: float) -> float | None:
    return math.exp(nats) if nats < 709 else None


def _shapes(windows: Windows, rows: int) -> dict[str, tuple[int, ...]]:
    """Of the arrays of a batch; windows that do not overlap are scored from their first input on."""
    shapes: dict[str, tuple[int, ...]] = {"inputs": (rows, windows.length), "targets": (rows, windows.stride)}
    return shapes if windows.stride == windows.length else shapes | {"scored_from": (rows,)}


def _fetch(nll: Float[np.ndarray, " tokens"], windows: Windows, first: int, result: Array) -> int:
    """Waits for a batch and puts it where it belongs; only the last window of a stream is not full."""
    part = nll[first * windows.stride :][: result.size]
    part[:] = np.asarray(result).ravel()[: part.size]
    return part.size


def _replicated(sharding: Sharding) -> Sharding:
    """Every host gets the NLL of the whole batch."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
