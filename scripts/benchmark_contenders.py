"""What scripts/benchmark.py measures: steps that run, when told to, in processes of their own."""

import dataclasses
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import ml_collections
import numpy as np

from alibi.host_memory import keep_freed_memory

VOCABULARY = 256  # bytes
STOP_SECONDS = 3.0  # that an idle process may take to end
MATMUL_SIZE = 2048  # rows and columns of the product that gives the machine's float32 peak


@dataclasses.dataclass
class Step:
    """What a contender's process has built.

    Attributes:
      run: does a number of steps and waits for the last.
      memory_bytes: what the compiler says that one step needs, if it does.
      flops: of one step, where that is what it is for.
    """

    run: Callable[[int], None]
    memory_bytes: int | None = None
    flops: float | None = None


@dataclasses.dataclass
class Contender:
    """A function that builds a `Step`, by module level name, and its arguments."""

    build: Callable[..., Step]
    arguments: tuple[Any, ...] = ()

    def start(self) -> "Process":
        return Process(self)

    def prepare(self) -> tuple[Step, dict[str, Any]]:
        """In the process: the step, warmed up, and what `Process.prepare` gives."""
        start = time.perf_counter()
        step = self.build(*self.arguments)
        step.run(1)
        first_seconds = time.perf_counter() - start
        step.run(2)
        return step, {
            "first_seconds": first_seconds,
            "step_seconds": seconds_of(step.run, 2) / 2,
            "step_memory_bytes": step.memory_bytes,
            "flops": step.flops,
        }


class Process:
    """A contender in a process of its own, asleep except while it is asked for something."""

    def __init__(self, contender: Contender):
        context = multiprocessing.get_context("spawn")  # a fork would inherit threads
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, contender), daemon=True)
        self._process.start()
        theirs.close()

    def prepare(self) -> dict[str, Any]:
        """Builds, compiles and warms up; the seconds of the first and of a later step, memory and flops."""
        return self._ask("prepare")

    def run(self, steps: int, part: str = "run") -> float:
        """Seconds that `steps` steps take, or runs of another such part of the `Step`."""
        return self._ask((part, steps))

    def peak_memory(self) -> int:
        """Most bytes that the process has held."""
        return self._ask("memory")

    def stop(self) -> None:
        self._connection.close()  # an idle process ends by itself, and ends its own helpers
        self._process.join(STOP_SECONDS)
        self._process.terminate()
        self._process.join()

    def _ask(self, question: str | tuple[str, int]) -> Any:
        try:
            self._connection.send(question)
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise RuntimeError("a measured process died; is there memory left?") from None
        if isinstance(answer, str):
            raise RuntimeError(f"a measured process failed:\n{answer}")
        return answer


def _serve(connection: multiprocessing.connection.Connection, contender: Contender) -> None:
    """Answers the parent until it ends; a failure's traceback as a string."""
    # As the entry points do, and for the peers too.
    keep_freed_memory()
    # The time of compiling is measured.
    os.environ.update(JAX_ENABLE_COMPILATION_CACHE="false", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    step = None
    while True:
        try:
            question = connection.recv()
            if step is None:
                step, answer = contender.prepare()
            elif question == "memory":
                answer = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            else:
                part, steps = question
                answer = seconds_of(getattr(step, part), steps)
        except EOFError:
            return
        except Exception:
            answer = traceback.format_exc()
        connection.send(answer)


def seconds_of(run: Callable[[int], None], steps: int) -> float:
    start = time.perf_counter()
    run(steps)
    return time.perf_counter() - start


def project_contender(config: ml_collections.ConfigDict) -> Contender:
    """This project's own model and jitted training step, as train.py builds them."""
    return Contender(_project_step, (config,))


def torch_contender(config: ml_collections.ConfigDict, *, compiled: bool) -> Contender:
    """The same model, optimizer and batch in PyTorch.

    Raises:
      ValueError: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ValueError("--peer=torch needs PyTorch, which is not installed; run: pip install torch==2.13.0")
    return Contender(_torch_step, (config, compiled))


def matmul_contender() -> Contender:
    """A large float32 matrix product: what the machine can do."""
    return Contender(_matmul_step)


def model_flops_per_token(config: ml_collections.ConfigDict) -> float:
    """Floating-point operations that a training step needs for one token, however it is computed.

    Six for each weight of a matrix (two forward, four backward), and as many for each
    pair of a query and a key that it sees, per feature of queries and of values.
    """
    model = config.model
    weights = model.num_layers * (4 * model.width**2 + 2 * model.width * model.feed_forward)
    pairs = (config.train_length + 1) / 2
    return 6.0 * (weights + VOCABULARY * model.width + 2 * model.num_layers * model.width * pairs)


def _project_step(config: ml_collections.ConfigDict) -> Step:
    import jax

    from alibi.model import build_model
    from alibi.training.optimizer import make_optimizer, make_schedule
    from alibi.training.sharding import batch_sharding, make_mesh
    from alibi.training.state import abstract_state, initial_state
    from alibi.training.step import make_train_step

    mesh = make_mesh(config.mesh)
    model = build_model(config, VOCABULARY, activations=batch_sharding(mesh))
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, mesh))
    schedule = make_schedule(config.optimizer, config.train.steps)
    train_step = make_train_step(model, optimizer, config.seed, schedule=schedule, state_shardings=shardings)
    inputs, targets = (jax.device_put(x[None], batch_sharding(mesh, leading=1)) for x in _batch(config))
    state = initial_state(model, optimizer, mesh, config.seed)
    compiled = train_step.lower(state, inputs, targets).compile()

    def run(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, metrics = compiled(state, inputs, targets)
        jax.block_until_ready(metrics)

    memory = compiled.memory_analysis()
    return Step(run, memory_bytes=memory.argument_size_in_bytes + memory.temp_size_in_bytes if memory else None)


def _torch_step(config: ml_collections.ConfigDict, compiled: bool) -> Step:
    from benchmark_torch import make_train_step

    train_step = make_train_step(config, VOCABULARY, _batch(config), compiled=compiled)

    def run(steps: int) -> None:
        for _ in range(steps):
            loss = train_step()
        loss.item()

    return Step(run)


def _matmul_step() -> Step:
    import jax

    operand = jax.random.normal(jax.random.key(0), (MATMUL_SIZE, MATMUL_SIZE))
    product = jax.jit(lambda x: x @ x)

    def run(steps: int) -> None:
        for _ in range(steps):
            result = product(operand)
        result.block_until_ready()

    return Step(run, flops=2.0 * MATMUL_SIZE**3)


def _batch(config: ml_collections.ConfigDict) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets `[batch, length]`, random."""
    shape = (2, config.train.batch_tokens // config.train_length, config.train_length)
    inputs, targets = np.random.default_rng(0).integers(0, VOCABULARY, shape, dtype=np.int32)
    return inputs, targets


# The processes are started with only scripts/ on their path.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
