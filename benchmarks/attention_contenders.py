"""The contenders of `python -m benchmarks attention` and `decode`: this project's backends, Flax's
and PyTorch's.
"""

import ctypes
import dataclasses
import functools
import gc
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.processes import Contender, RunSteps, Step, repeated, seconds_of, warm_up


@dataclasses.dataclass(frozen=True)
class Shape:
    """Queries, keys and values are `[batch, length, heads, head_dim]` (PyTorch's: heads before
    length).
    """

    length: int
    batch: int
    heads: int
    head_dim: int
    dtype: str

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.heads} heads of {self.head_dim}, {self.dtype}"

    @property
    def forward_flops(self) -> float:
        """Operations in the two products, for each query and visible key, however it is computed."""
        return 4.0 * self.head_dim * self.batch * self.heads * self.length * (self.length + 1) / 2


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to compute attention.

    Peers are backends too: "flax" with a dense bias, "cudnn" without one, PyTorch's "sdpa" and "flex".

    Attributes:
      backend: name of a backend or a peer.
      skip_epsilon: largest share of mass that may be lost.
      slots_last: whether a cache holds slots last, as this project's, or first, as Flax's.
      position: the method that gives the bias. Its parameters get gradients.
    """

    backend: str
    skip_epsilon: float | None = None
    slots_last: bool = True
    position: str = "alibi"


# The least float32 tensors that a way holds: those [batch, heads, length, length], and those
# [heads, length, length].
TENSORS = {"reference": (4.0, 0.0), "saved": (0.5, 0.0), "flax": (4.0, 1.25), "sdpa": (0.0, 1.0)}


def contender(shape: Shape, way: Way) -> Contender:
    """Returns both passes of attention, computed in a way."""
    peers = {"flax": flax_step, "cudnn": cudnn_step, "sdpa": torch_step, "flex": torch_step}
    build = peers.get(way.backend, project_step)
    weights, biases = TENSORS.get(way.backend, (0.0, 0.0))
    needed = 4.0 * (shape.batch * weights + biases) * shape.heads * shape.length**2
    return Contender(build, (shape, way), needed, measure_passes)


def measure_passes(step: Step) -> tuple[dict[str, float], dict[str, Any]]:
    """Warms up both passes ("run") and the forward pass, and measures the memory that the passes alone take."""
    oom_score = pathlib.Path("/proc/self/oom_score_adj")
    if oom_score.exists():
        # so that too large a contender ends itself, not the benchmark or a neighbour
        oom_score.write_text("1000")
    names, reason = ["run", "forward"], None
    try:
        first_seconds = seconds_of(step.parts["run"], 1)
    except NotImplementedError as error:  # PyTorch's FlexAttention has no backward pass on CPUs
        names, reason = ["forward"], str(error).strip().splitlines()[0]
        first_seconds = seconds_of(step.parts["forward"], 1)
    growth = None
    if not step.facts.pop("on_gpu", False):  # which holds the arrays
        growth = growth_of_peak_memory(functools.partial(step.parts[names[0]], 1))
    seconds = {names[0]: warm_up(step.parts[names[0]])}
    for name in names[1:]:  # the process is warm by now, only this part must be compiled
        seconds_of(step.parts[name], 1)
        seconds[name] = seconds_of(step.parts[name], 2) / 2
    compiler_bytes = step.facts.pop("compiler_bytes", None)
    return seconds, {
        "first_call_seconds": first_seconds,
        "memory_bytes": None if growth is None else growth + step.facts["held_bytes"],
        "compiler_bytes": compiler_bytes and compiler_bytes(),
        "no_backward": reason,
    }


def growth_of_peak_memory(call: Callable[[], object]) -> int | None:
    """Returns how much the process's peak memory, in bytes, grows during the call.

    Memory that earlier calls and compilers freed goes back to the system first, so it is not used again
    unseen. None if the system (other than Linux) doesn't tell.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    except (AttributeError, OSError):
        return None
    status, pattern = pathlib.Path("/proc/self/status"), r"Vm%s:\s+(\d+)"
    before = int(re.search(pattern % "RSS", status.read_text())[1])
    call()
    return 1024 * (int(re.search(pattern % "HWM", status.read_text())[1]) - before)


def _arrays(shape: Shape) -> np.ndarray:
    """Returns query, key, value and the result's cotangent, each feature normal."""
    size = (4, shape.batch, shape.length, shape.heads, shape.head_dim)
    return np.random.default_rng(0).standard_normal(size, dtype=np.float32)


def _jax_arrays(shape: Shape) -> list[Any]:
    import jax.numpy as jnp

    return [jnp.asarray(x, shape.dtype) for x in _arrays(shape)]


def project_step(shape: Shape, way: Way) -> Step:
    """Returns the passes of a backend."""
    from alibi.attention import attend
    from alibi.slopes import alibi_slopes

    call = functools.partial(attend, backend=way.backend, skip_epsilon=way.skip_epsilon)
    if way.position != "alibi":
        params, bias = bias_of(shape, way.position)
        return _jax_step(shape, lambda *x: call(*x[:3], bias=bias(x[3])), learned=(params,))
    return _jax_step(shape, functools.partial(call, slopes=alibi_slopes(shape.heads)))


def bias_of(shape: Shape, position: str) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a method's bias parameters, and the function from them to the bias. FoX's gates are drawn."""
    import jax
    import jax.numpy as jnp

    from alibi.positions import make_position
    from alibi.positions.fox import FoxBias

    if position == "fox":
        size = shape.batch, shape.length, shape.heads
        gates = jax.nn.log_sigmoid(4.0 + jax.random.normal(jax.random.key(0), size))
        return jnp.cumsum(gates, axis=1), lambda sums: FoxBias(sums, sums)
    width = shape.heads * shape.head_dim
    sizes = {"num_heads": shape.heads, "head_dim": shape.head_dim, "width": width}
    options = {"max_distance": 128} if position == "t5" else {}  # as in its source
    method = make_position(position, **sizes, train_length=shape.length, options=options)
    key = jax.random.key(0)
    return {**method.init(key), **method.init_layer(key)}, method.bias


def cudnn_step(shape: Shape, way: Way) -> Step:
    """Returns the passes of cuDNN's causal attention without a bias."""
    import jax

    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
    )
    return _jax_step(shape, attention)


def flax_step(shape: Shape, way: Way) -> Step:
    """Returns the passes of `flax.linen.dot_product_attention` with the dense bias and the causal
    mask.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from alibi.slopes import alibi_slopes

    def bias_and_mask() -> tuple[jax.Array, jax.Array]:
        distance = jnp.arange(shape.length)[:, None] - jnp.arange(shape.length)[None, :]
        return -alibi_slopes(shape.heads)[None, :, None, None] * distance[None, None], (
            distance >= 0
        )[None, None]

    return _jax_step(shape, nn.dot_product_attention, *jax.jit(bias_and_mask)())


def _jax_step(shape: Shape, attention: Callable, *held: Any, learned: tuple[Any, ...] = ()) -> Step:
    """Returns both passes of attention(query, key, value, *learned, *held), with gradients for all but
    `held`, a dense bias.
    """
    import jax

    def both(arrays: tuple[Any, ...], cotangent: Any, *held: Any) -> tuple:
        result, pull = jax.vjp(lambda *arrays: attention(*arrays, *held), *arrays)
        return result, pull(cotangent)

    query, key, value, cotangent = _jax_arrays(shape)
    held_bytes, arrays = sum(x.nbytes for x in held), (query, key, value, *learned)
    run, compiled = _program(both, (arrays, cotangent, *held))
    forward, _ = _program(attention, (*arrays, *held))

    def compiler_bytes() -> int | None:
        memory = compiled().memory_analysis()
        return memory and memory.temp_size_in_bytes + memory.output_size_in_bytes + held_bytes

    return Step(
        {"run": run, "forward": forward},
        {
            "held_bytes": held_bytes,
            "compiler_bytes": compiler_bytes,
            "on_gpu": _on_accelerator(),
        },
    )


def _program(function: Callable, arguments: Sequence[Any]) -> tuple[RunSteps, Callable[[], Any]]:
    """Returns the function, compiled when it first runs, and a function that returns the compiled
    program.
    """
    import jax

    compiled = functools.cache(lambda: jax.jit(function).lower(*arguments).compile())
    return repeated(lambda: compiled()(*arguments), one_by_one=not _on_accelerator()), compiled


def _on_accelerator() -> bool:
    import jax

    return jax.default_backend() != "cpu"


def torch_step(shape: Shape, way: Way) -> Step:
    """Returns the passes of PyTorch's attention, on a GPU if there is one."""
    import torch

    from benchmarks.torch_peer import ATTENTION

    on_gpu = torch.cuda.is_available()
    arrays = (
        torch.from_numpy(_arrays(shape))
        .transpose(2, 3)
        .to("cuda" if on_gpu else "cpu", getattr(torch, shape.dtype))
        .contiguous()
    )
    cotangent, inputs = arrays[3], [x.clone().requires_grad_() for x in arrays[:3]]
    with arrays.device:
        attention, held_bytes = ATTENTION[way.backend](shape, arrays.dtype, way.position)

    def run(steps: int) -> None:
        try:
            for _ in range(steps):
                torch.autograd.grad(attention(*inputs), inputs, cotangent)
        # FlexAttention's, on CPUs; then the forward pass is measured alone
        except NotImplementedError:
            torch.compiler.reset()  # else the forward pass would not be compiled either
            raise
        if on_gpu:
            torch.cuda.synchronize()

    def forward(steps: int) -> None:
        with torch.no_grad():
            for _ in range(steps):
                attention(*(x.detach() for x in inputs))
        if on_gpu:
            torch.cuda.synchronize()

    return Step({"run": run, "forward": forward}, {"held_bytes": held_bytes, "on_gpu": on_gpu})


def token_step(shape: Shape, way: Way) -> Step:
    """Returns a call for the last token of a full cache."""
    import jax
    import jax.numpy as jnp

    from alibi import alibi_slopes
    from alibi.attention.call import AttentionCall, AttentionOptions
    from alibi.attention.dispatch import compute_call
    from alibi.positions import AlibiBias

    @jax.jit
    def token(index: jax.Array, query: jax.Array, *cache: jax.Array) -> jax.Array:
        slots = jnp.arange(shape.length)
        key, value = (jnp.moveaxis(x, 3, 1) if way.slots_last else x for x in cache)
        call = AttentionCall(
            query,
            key,
            value,
            AlibiBias(alibi_slopes(shape.heads)),
            True,
            query_positions=index[None],
            key_positions=slots,
            mask=(slots <= index)[None, None, None, :],
            slots_last=way.slots_last,
            options=AttentionOptions(skip_epsilon=way.skip_epsilon, backend=way.backend),
        )
        return compute_call(call)

    query, key, value, _ = _jax_arrays(shape)
    cache = [jnp.moveaxis(x, 1, 3) if way.slots_last else x for x in (key, value)]
    arguments = (jnp.asarray(shape.length - 1), query[:, -1:], *cache)
    return Step({"run": repeated(lambda: token(*arguments), one_by_one=True)})
