"""The negative log-likelihood of every token of a stream, window by window, on any number of devices and hosts."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Float, Int, PyTree

from alibi.evaluation.windows import Part, Tokens, Windows, batches, gather, plan
from alibi.model.decoder import DecoderLM
from alibi.parallel.sharding import batch_parts, local_rows
from alibi.runs.trained import TrainedRun

# (params, inputs [rows, length], targets [rows, scored]) -> nats [rows, scored]; the targets are those of the
# last inputs, and no target depends on the inputs after its own.
NllFunction = Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class Score:
    """What a pass over a stream found."""

    windows: Windows | Part  # how the stream was cut, or the windows that were asked for
    nll_nats: Float[np.ndarray, "*shape"]  # float32: of each token in stream order, or [windows, scored]
    seconds: float  # from the first batch read to the last result on the host; compilation is done before

    @property
    def total_nats(self) -> float:
        """The sum over the tokens, in float64."""
        return float(self.nll_nats.sum(dtype=np.float64))

    @property
    def tokens(self) -> int:
        return self.nll_nats.size


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
        self, nll_function: NllFunction, *, boundary_id: int, batch_tokens: int, sharding: Sharding | None = None
    ):
        if batch_tokens < 1:
            raise ValueError(f"eval.batch_tokens={batch_tokens} must be at least 1")
        self._sharding = replicated = SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
        self._boundary_id, self._batch_tokens = boundary_id, batch_tokens
        if isinstance(sharding, NamedSharding):
            replicated = NamedSharding(sharding.mesh, PartitionSpec())  # every host gets the NLL of the whole batch
        self._jitted = jax.jit(nll_function, out_shardings=replicated)
        self._compiled: dict[tuple[int, int, int], Any] = {}

    def score(
        self,
        params: PyTree,
        tokens: Tokens,
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
        for part in windows.parts:
            self._compile(params, part)
        nll = np.empty(windows.num_tokens, np.float32)
        start = time.perf_counter()
        for part in windows.parts:
            self._score_part(params, tokens, part, nll[part.start : part.stop], progress)
        return Score(windows, nll, time.perf_counter() - start)

    def score_windows(
        self, params: PyTree, tokens: Tokens, part: Part, *, progress: Callable[[int], object] = lambda tokens: None
    ) -> Score:
        """The NLL of each token that the windows of `part` score; `progress` as in `score`."""
        self._compile(params, part)
        nll = np.empty((len(part), part.scored), np.float32)
        start = time.perf_counter()
        self._score_part(params, tokens, part, nll.reshape(-1), progress)
        return Score(part, nll, time.perf_counter() - start)

    def _score_part(
        self,
        params: PyTree,
        tokens: Tokens,
        part: Part,
        nll: Float[np.ndarray, " tokens"],
        progress: Callable[[int], object],
    ) -> None:
        """Fills `nll` with that of the tokens that the rows of `part` score, in their order."""
        function = self._compile(params, part)
        running: collections.deque[tuple[np.ndarray, Array]] = collections.deque()
        for rows in batches(part, self._rows(part)):
            running.append((nll[rows[0] * part.scored :], function(params, *self._place(tokens, part, rows))))
            if len(running) > 1:  # fetch a batch only when the devices have the next one to work on
                progress(_fetch(*running.popleft()))
        progress(_fetch(*running.popleft()))

    def _rows(self, part: Part) -> int:
        """Rows of a batch: what the token budget allows on each device, and no more than there are."""
        parts = batch_parts(self._sharding)
        return parts * min(max(1, self._batch_tokens // part.length), -(-len(part) // parts))

    def _compile(self, params: PyTree, part: Part) -> Any:
        """The function compiled for this shape; kept, so that a validation during training compiles once."""
        shape = self._rows(part), part.length, part.scored
        if shape not in self._compiled:
            sizes = (shape[0], part.length), (shape[0], part.scored)
            batch = [jax.ShapeDtypeStruct(size, np.int32, sharding=self._sharding) for size in sizes]
            self._compiled[shape] = self._jitted.lower(params, *batch).compile()
        return self._compiled[shape]

    def _place(self, tokens: Tokens, part: Part, rows: Int[np.ndarray, " rows"]) -> list:
        """The batch on the devices; only the rows of this host's devices are read."""
        batch = gather(tokens, part, rows[local_rows(self._sharding, rows.size)], self._boundary_id)
        return [
            jax.make_array_from_process_local_data(self._sharding, local, (rows.size, local.shape[1]))
            for local in batch
        ]


def run_scorer(run: TrainedRun) -> Scorer:
    """Returns a scorer of streams of the run's tokens; call `scorer.score(run.params, ...)`."""
    nll, boundary_id = model_nll(run.model), run.tokenizer.boundary_id
    return Scorer(nll, boundary_id=boundary_id, batch_tokens=run.batch_tokens, sharding=run.model.sharding)


def model_nll(model: DecoderLM) -> NllFunction:
    """The function that a `Scorer` needs."""

    def nll(params: PyTree, inputs: Array, targets: Array) -> Array:
        with unrounded(model):
            return jnp.asarray(model.apply({"params": params}, inputs, targets, method="token_nll"))

    return nll


def unrounded(model: DecoderLM) -> contextlib.AbstractContextManager[None]:
    """A context in which a float32 model is traced, so that its products are float32's on accelerators too.

    By default these round the operands of products to fewer bits.
    """
    rounds = jax.default_backend() != "cpu" and model.config.dtype == "float32"
    return jax.default_matmul_precision("highest") if rounds else contextlib.nullcontext()


def _fetch(nll: Float[np.ndarray, " tokens"], result: Array) -> int:
    """Waits for a batch and puts it at the start of `nll`, which may be shorter; returns how many are there."""
    count = min(nll.size, result.size)
    nll[:count] = np.asarray(result).ravel()[:count]
    return count
