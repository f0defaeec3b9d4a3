"""The contenders of `scripts/benchmark.py attention`: this project's backends, Flax's and PyTorch's attention."""

import argparse
import ctypes
import dataclasses
import functools
import gc
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.attention_growth import computed_weights
from benchmarks.processes import Contender, Step, require_torch, seconds_of, warm_up


@dataclasses.dataclass(frozen=True)
class Shape:
    """Queries, keys and values are `[batch, length, heads, head_dim]` (PyTorch's: heads before length)."""

    length: int
    batch: int
    heads: int
    head_dim: int
    dtype: str

    @property
    def forward_flops(self) -> float:
        """Of the two products, for each pair of a query and a key that it sees, however it is computed."""
        return 4.0 * self.head_dim * self.batch * self.heads * self.length * (self.length + 1) / 2

    def dense_bytes(self, weights: float = 0.0, biases: float = 0.0) -> float:
        """Of so many float32 tensors `[batch, heads, length, length]`, and `[heads, length, length]`."""
        return 4.0 * (self.batch * weights + biases) * self.heads * self.length**2


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """All of a `Shape` but its length."""
    for name, value in (("batch", 1), ("heads", 8), ("head_dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")


def shape_of(length: int, arguments: argparse.Namespace) -> Shape:
    """What `add_shape_arguments` has read, at a length."""
    return Shape(length, arguments.batch, arguments.heads, arguments.head_dim, arguments.dtype)


@dataclasses.dataclass
class AttentionStep(Step):
    """`run` is the forward and the backward pass.

    Attributes:
      forward: as `run`, without the backward pass.
      held_bytes: of what it needs besides queries, keys and values: a dense bias.
      compiler_bytes: what the compiler says that a run needs, once there was one.
      computed_weights: gives those of each head, see `benchmarks.attention_growth`.
    """

    forward: Callable[[int], None] | None = None
    held_bytes: int = 0
    compiler_bytes: Callable[[], int | None] = lambda: None
    computed_weights: Callable[[], list[int] | None] = lambda: None


@dataclasses.dataclass
class AttentionContender(Contender):
    """Has timed each part, and measured the memory of the passes by itself, once it is prepared."""

    needed_bytes: float = 0.0  # at least, where that is known to be much

    def shortage(self) -> str:
        """Why it should not be started; empty if it can be."""
        available = available_memory()
        if available is None or self.needed_bytes <= available:
            return ""
        return f"needs about {self.needed_bytes / 2**30:.0f} GiB, and {available / 2**30:.0f} GiB are available"

    def prepare(self) -> tuple[Step, dict[str, Any]]:
        _volunteer_to_be_killed()
        step = self.build(*self.arguments)
        parts, reason = ["run", "forward"], None
        try:
            first_seconds = seconds_of(step.run, 1)
        except NotImplementedError as error:  # so PyTorch says that FlexAttention has no backward pass on CPUs
            parts, reason = ["forward"], str(error).strip().splitlines()[0]
            first_seconds = seconds_of(step.forward, 1)
        growth = growth_of_peak_memory(functools.partial(getattr(step, parts[0]), 1))
        part_seconds = {parts[0]: warm_up(getattr(step, parts[0]))}
        for part in parts[1:]:  # the process is warm by now, only this part must be compiled
            seconds_of(getattr(step, part), 1)
            part_seconds[part] = seconds_of(getattr(step, part), 2) / 2
        return step, {
            "part_seconds": part_seconds,
            "first_call_seconds": first_seconds,
            "memory_bytes": None if growth is None else growth + step.held_bytes,
            "compiler_bytes": step.compiler_bytes(),
            "computed_weights": step.computed_weights(),  # last: it takes memory of its own
            "no_backward": reason,
        }


def project_attention(shape: Shape, backend: str, skip_epsilon: float | None) -> AttentionContender:
    """`alibi.attention.attend`."""
    tensors = {"reference": 4.0, "saved": 0.5}.get(backend, 0.0)
    return AttentionContender(_project_step, (shape, backend, skip_epsilon), shape.dense_bytes(tensors))


def flax_attention(shape: Shape) -> AttentionContender:
    """`flax.linen.dot_product_attention` with the dense bias and the causal mask."""
    return AttentionContender(_flax_step, (shape,), shape.dense_bytes(weights=4.0, biases=1.25))


def torch_attention(shape: Shape, kind: str) -> AttentionContender:
    """PyTorch's, of a kind that `benchmarks.torch_peers.ATTENTION` has.

    Raises:
      ValueError: PyTorch is not installed.
    """
    require_torch()
    return AttentionContender(_torch_step, (shape, kind), shape.dense_bytes(biases=float(kind == "dense")))


def available_memory() -> int | None:
    """Bytes that can be had now without pushing anything out; None if the system doesn't say."""
    try:
        return 1024 * int(re.search(r"MemAvailable:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text())[1])
    except (OSError, TypeError):
        return None


def growth_of_peak_memory(call: Callable[[], object]) -> int | None:
    """Bytes that the process held during the call above those before.

    What earlier calls and compilers have freed is given back to the system first, so that
    it is not used again unseen. None where the system (other than Linux) doesn't say.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    except (AttributeError, OSError):
        return None
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])


def _volunteer_to_be_killed() -> None:
    """So that too large a contender ends itself, not the benchmark or a neighbour."""
    path = pathlib.Path("/proc/self/oom_score_adj")
    if path.exists():
        path.write_text("1000")


def _arrays(shape: Shape) -> np.ndarray:
    """Query, key, value and the result's cotangent, each feature normal."""
    size = (4, shape.batch, shape.length, shape.heads, shape.head_dim)
    return np.random.default_rng(0).standard_normal(size, dtype=np.float32)


def jax_arrays(shape: Shape) -> list[Any]:
    """As `_arrays`, of the shape's dtype."""
    import jax.numpy as jnp

    return [jnp.asarray(x, shape.dtype) for x in _arrays(shape)]


class _Program:
    """A function for `AttentionStep`, compiled when it first runs."""

    def __init__(self, function: Callable, arguments: Sequence[Any], held_bytes: int):
        self._function, self._arguments, self._held_bytes = function, arguments, held_bytes
        self._compiled = None

    def __call__(self, steps: int) -> None:
        import jax

        if self._compiled is None:
            self._compiled = jax.jit(self._function).lower(*self._arguments).compile()
        for _ in range(steps):
            jax.block_until_ready(self._compiled(*self._arguments))

    def compiler_bytes(self) -> int | None:
        memory = self._compiled.memory_analysis()
        return memory and memory.temp_size_in_bytes + memory.output_size_in_bytes + self._held_bytes


def _project_step(shape: Shape, backend: str, skip_epsilon: float | None) -> AttentionStep:
    from alibi.attention.attend import attend
    from alibi.slopes import alibi_slopes

    slopes = alibi_slopes(shape.heads)
    step = _jax_step(shape, functools.partial(attend, slopes=slopes, backend=backend, skip_epsilon=skip_epsilon))
    step.computed_weights = lambda: computed_weights(*jax_arrays(shape)[:3], slopes, backend, skip_epsilon)
    return step


def _flax_step(shape: Shape) -> AttentionStep:
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from alibi.slopes import alibi_slopes

    def bias_and_mask():
        distance = jnp.arange(shape.length)[:, None] - jnp.arange(shape.length)[None, :]
        return -alibi_slopes(shape.heads)[None, :, None, None] * distance[None, None], (distance >= 0)[None, None]

    return _jax_step(shape, nn.dot_product_attention, *jax.jit(bias_and_mask)())


def _jax_step(shape: Shape, attention: Callable, *held: Any) -> AttentionStep:
    """Of attention(query, key, value, *held)."""
    import jax

    def both(query, key, value, cotangent, *held):
        result, pull = jax.vjp(lambda *arrays: attention(*arrays, *held), query, key, value)
        return result, pull(cotangent)

    query, key, value, cotangent = jax_arrays(shape)
    held_bytes = sum(x.nbytes for x in held)
    run = _Program(both, (query, key, value, cotangent, *held), held_bytes)
    forward = _Program(attention, (query, key, value, *held), held_bytes)
    return AttentionStep(run, forward=forward, held_bytes=held_bytes, compiler_bytes=run.compiler_bytes)


def _torch_step(shape: Shape, kind: str) -> AttentionStep:
    import torch

    from benchmarks.torch_peers import ATTENTION

    arrays = torch.from_numpy(_arrays(shape)).transpose(2, 3).to(getattr(torch, shape.dtype)).contiguous()
    cotangent, inputs = arrays[3], [x.clone().requires_grad_() for x in arrays[:3]]
    attention, held_bytes = ATTENTION[kind](shape.heads, shape.length, arrays.dtype)

    def run(steps: int) -> None:
        try:
            for _ in range(steps):
                torch.autograd.grad(attention(*inputs), inputs, cotangent)
        except NotImplementedError:  # FlexAttention's, on CPUs; `prepare` then measures the forward pass alone
            torch.compiler.reset()  # else the forward pass would not be compiled either
            raise

    def forward(steps: int) -> None:
        with torch.no_grad():
            for _ in range(steps):
                attention(*(x.detach() for x in inputs))

    return AttentionStep(run, forward=forward, held_bytes=held_bytes)
