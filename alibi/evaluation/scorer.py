"""The negative log-likelihood (NLL) of every token in a stream, on any number of devices and hosts."""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Float, Int, PyTree

from alibi.data.tokenfile import Tokens
from alibi.evaluation.windows import (
    Windows,
    predicted,
    read_sequences,
    scored_targets,
    windows_of,
)
from alibi.generation.encoders import check_masked
from alibi.model.decoder import DecoderLM, unrounded
from alibi.objectives import Batch, Objective, Sequences, make_objective
from alibi.parallel.sharding import batch_parts, local_rows
from alibi.runs.trained import TrainedRun

# (params, *Batch) -> numbers [rows, scored], such as the NLL in nats. With a causal objective the
# number of a target does not depend on inputs after its own.
TokenFunction = Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class Score:
    """A number for each scored token: the NLL in nats, or what another function gives."""

    values: Float[np.ndarray, " tokens"]  # float32, in the order of the windows
    # from reading the first batch to the last result on the host, without compilation
    seconds: float

    @property
    def mean_nats(self) -> float:
        """The mean over the tokens, computed in float64."""
        return float(self.values.mean(dtype=np.float64))


class Scorer:
    """Scores streams with a function, compiled once for each batch shape.

    Args:
      function: gives each token's number, as `model_nll`.
      objective: makes inputs and targets from a stream's tokens.
      batch_tokens: inputs per device and batch, but at least a window: longer windows come in
        smaller batches.
      sharding: along the batch, defaults to the first device. Each host reads only the rows for its
        own devices, and all get the result.

    Attributes:
      compiled: the programs for each number of rows, length and scored tokens.
    """

    def __init__(
        self,
        function: TokenFunction,
        *,
        objective: Objective,
        batch_tokens: int,
        sharding: Sharding | None = None,
    ):
        if batch_tokens < 1:
            raise ValueError(f"eval.batch_tokens={batch_tokens} must be at least 1")
        self._sharding = replicated = (
            SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
        )
        self._objective, self._batch_tokens = objective, batch_tokens
        if isinstance(sharding, NamedSharding):
            # each host gets the whole batch
            replicated = NamedSharding(sharding.mesh, PartitionSpec())
        self._jitted = jax.jit(function, out_shardings=replicated)
        self.compiled: dict[tuple[int, int, int], Any] = {}

    def check(self, tokens: Tokens, windows: Windows) -> None:
        """Raises ValueError if no token in `windows` is predicted: among few tokens none may be masked, and a
        text may have no answers.
        """
        selected = predicted(self._objective, tokens, windows)
        if self._objective.selects and not any(map(np.any, selected)):
            raise ValueError(
                f"none of the {windows.num_tokens:,} tokens of the text is predicted, so there is nothing to score; "
                "use a longer text"
            )

    def score(
        self,
        params: PyTree,
        tokens: Tokens,
        length: int,
        stride: int | None = None,
        *,
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> Score:
        """Returns each token's number in windows with `length` inputs that score `stride` tokens (defaults to
        `length`).

        It depends neither on the batch nor on the devices.

        Args:
          progress: called with the number of tokens scored since the last call.

        Raises:
          ValueError: no tokens, a stride outside 1..length, or a length beyond the model's.
        """
        windows = windows_of(len(tokens), length, stride, causal=self._objective.causal)
        return self.score_windows(params, tokens, windows, progress=progress)

    def score_windows(
        self,
        params: PyTree,
        tokens: Tokens,
        windows: Windows,
        *,
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> Score:
        """Returns the numbers of the tokens that `windows` score and the objective predicts, in their order.

        Args:
          progress: as in `score`.
        """
        self.compile(params, windows)
        values, start = np.empty(windows.num_tokens, np.float32), time.perf_counter()
        left = values
        for size, result in self.batches(params, tokens, windows):
            # tokens after the scored ones have a number too
            left[:size] = np.asarray(result)[:, : result.shape[1] - windows.after].ravel()[:size]
            left = left[size:]
            progress(size)
        seconds = time.perf_counter() - start
        if self._objective.selects:
            values = values[np.concatenate([*predicted(self._objective, tokens, windows)])]
        return Score(values, seconds)

    def compile(self, params: PyTree, windows: Windows) -> None:
        """Compiles the programs for `windows`, so that their time does not count as scoring."""
        for group in windows.groups:
            self._compile(params, group)

    def batches(
        self, params: PyTree, tokens: Tokens, windows: Windows
    ) -> Iterator[tuple[int, Any]]:
        """Yields how many tokens each batch of `windows` scores, and what the function returns for it.

        The last batch may extend beyond the last row.
        """
        running: collections.deque[tuple[int, Any]] = collections.deque()
        for group in windows.groups:
            function, batch_size = self._compile(params, group)
            for first in range(0, len(group), batch_size):
                rows = np.arange(first, first + batch_size)
                size = min(batch_size * group.stride, group.num_tokens - first * group.stride)
                running.append((size, function(params, *self._place(tokens, group, rows))))
                if len(running) > 1:  # a batch is fetched only after the devices have the next one
                    yield running.popleft()
        yield from running

    def _compile(self, params: PyTree, windows: Windows) -> tuple[Any, int]:
        """Returns the function compiled for the shape of `windows`, and its number of rows.

        A batch has as many rows as `batch_tokens` allows on each device, and not more than
        `windows`. The function is kept, so validations during training compile once.
        """
        devices = batch_parts(self._sharding)
        rows = devices * min(
            max(1, self._batch_tokens // windows.length), -(-len(windows) // devices)
        )
        shape = rows, windows.length, windows.stride + windows.after
        if shape not in self.compiled:
            none = Sequences(np.zeros((0, windows.length + 1), np.int32), np.zeros(0, np.int64))
            batch = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    (rows, x.shape[1]), np.int32, sharding=self._sharding
                ),
                self._batch(none, windows),
            )
            self.compiled[shape] = (
                self._jitted
                if jax.config.values["jax_disable_jit"]
                else self._jitted.lower(params, *batch).compile()
            )
        return self.compiled[shape], rows

    def _place(self, tokens: Tokens, windows: Windows, rows: Int[np.ndarray, " rows"]) -> Batch:
        """Returns the batch on the devices. Reads only the rows for this host's devices."""
        local_numbers = rows[local_rows(self._sharding, rows.size)]
        return jax.tree.map(
            lambda local: jax.make_array_from_process_local_data(
                self._sharding, local, (rows.size, local.shape[1])
            ),
            self._batch(read_sequences(tokens, windows, local_numbers), windows),
        )

    def _batch(self, sequences: Sequences, windows: Windows) -> Batch:
        batch = self._objective.batch(sequences)
        return batch._replace(targets=scored_targets(batch.targets, windows))


@functools.lru_cache(
    maxsize=16
)  # JAX keeps the programs of a function: runs with the same model share them
def model_nll(model: DecoderLM) -> TokenFunction:
    """Returns the function of parameters, inputs and targets to the NLL in nats, for a `Scorer`."""

    def nll(params: PyTree, *batch: Array) -> Array:
        arguments: dict[str, Any] = Batch(*batch)._asdict()
        with unrounded(model):
            return jnp.asarray(model.apply({"params": params}, method="token_nll", **arguments))

    return nll


def run_scorer(run: TrainedRun, of: Callable[[DecoderLM], TokenFunction] = model_nll) -> Scorer:
    """Returns a scorer for the run's tokens, to call as `scorer.score(run.params, ...)`.

    Args:
      of: returns the function that gives a number for each token, defaults to `model_nll`.
    """
    return Scorer(
        of(run.model),
        objective=run_objective(run),
        batch_tokens=run.batch_tokens,
        sharding=run.model.sharding,
    )


def run_objective(run: TrainedRun) -> Objective:
    """Returns the objective that a run was trained for, with its tokenizer. Raises ValueError for a model
    of masked tokens that was imported without a head.
    """
    text = {"vocab_size": run.tokenizer.vocab_size, "boundary_id": run.tokenizer.boundary_id}
    objective = make_objective(run.config, **text)
    if not objective.causal:
        check_masked(run, "an evaluation", head=True)
    return objective


def wrong_tokens(model: DecoderLM) -> TokenFunction:
    """Returns the function of parameters, inputs and targets that gives 0.0 for a target that is the
    likeliest token after the true ones before it, else 1.0.
    """

    def wrong(params: PyTree, *arrays: Array) -> Array:
        inputs, targets, positions, segment_ids, reach = Batch(*arrays)

        def last_logits(model: DecoderLM) -> Array:
            sides = {"positions": positions, "segment_ids": segment_ids, "reach": reach}
            features = model.features(inputs, last=targets.shape[1], **sides)
            return model.vocabulary.logits(features, True)

        with unrounded(model):
            logits = jnp.asarray(model.apply({"params": params}, method=last_logits))
        return jnp.asarray(model.writable(logits).argmax(axis=-1) != targets, jnp.float32)

    return wrong
