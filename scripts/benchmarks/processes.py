"""What the benchmarks time: steps that run, when told to, in processes of their own."""

import dataclasses
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from alibi.cpu.host_memory import keep_freed_memory

# A process is slow at first: its threads may share a core for up to three turns of half a second, as long as the
# system knows no better (results/benchmarks/startup.md). It is warm after WARM_SECONDS, when its last two turns differ
# by no more than STEADY from the fastest, or after three times as many.
WARM_SECONDS, TURN_SECONDS, STEADY = 2.0, 0.5, 1.1
STOP_SECONDS = 3.0  # that an idle process may take to end
MATMUL_SIZE = 2048  # rows and columns of the product that gives the machine's float32 peak


@dataclasses.dataclass
class Step:
    """What a contender's process has built.

    Attributes:
      run: does a number of steps and waits for the last.
      memory_bytes: what the compiler says that one step needs, if it does.
      flops: of one step, where that is what it is for.
      program: gives the compiled program of one step as text, where somebody reads it.
    """

    run: Callable[[int], None]
    memory_bytes: int | None = None
    flops: float | None = None
    program: Callable[[], str] | None = None


@dataclasses.dataclass
class Contender:
    """A function that builds a `Step`, by module level name, and its arguments."""

    build: Callable[..., Step]
    arguments: tuple[Any, ...] = ()

    def shortage(self) -> str:
        """Why it should not be started; empty if it can be."""
        return ""

    def start(self) -> "Process":
        return Process(self)

    def prepare(self) -> tuple[Step, dict[str, Any]]:
        """In the process: the step, warmed up, and what `Process.prepare` gives."""
        start = time.perf_counter()
        step = self.build(*self.arguments)
        step.run(1)
        first_seconds = time.perf_counter() - start
        step_seconds = warm_up(step.run)
        return step, {
            "first_seconds": first_seconds,
            "step_seconds": step_seconds,
            "step_memory_bytes": step.memory_bytes,
            "flops": step.flops,
        }


def require_torch() -> None:
    """Raises ValueError if PyTorch, which a peer needs, is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError("--peer=torch needs PyTorch, which is not installed; run: pip install torch==2.13.0")


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
    import jax

    # As the entry points do, and for the peers too.
    keep_freed_memory()
    # The time of compiling is measured. (JAX, which alibi imports, has read its environment already.)
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    step = None
    while True:
        try:
            question = connection.recv()
            if step is None:
                step, answer = contender.prepare()
            elif question == "memory":
                answer = peak_memory()
            else:
                part, steps = question
                answer = seconds_of(getattr(step, part), steps)
        except EOFError:
            return
        except Exception:
            answer = traceback.format_exc()
        connection.send(answer)


def peak_memory() -> int:
    """Most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def seconds_of(run: Callable[[int], None], steps: int) -> float:
    start = time.perf_counter()
    run(steps)
    return time.perf_counter() - start


def warm_up(run: Callable[[int], None]) -> float:
    """Runs until the time is steady; seconds of a step."""
    turns, elapsed, steps = [], 0.0, 1
    while elapsed < 3 * WARM_SECONDS:
        seconds = seconds_of(run, steps)
        elapsed += seconds
        turns.append(seconds / steps)
        steps = max(1, round(TURN_SECONDS / turns[-1]))
        if elapsed >= WARM_SECONDS and len(turns) > 1 and max(turns[-2:]) <= STEADY * min(turns):
            break
    return turns[-1]


def matmul_contender() -> Contender:
    """A large float32 matrix product: what the machine can do."""
    return Contender(_matmul_step)


def _matmul_step() -> Step:
    import jax

    operand = jax.random.normal(jax.random.key(0), (MATMUL_SIZE, MATMUL_SIZE))
    product = jax.jit(lambda x: x @ x)

    def run(steps: int) -> None:
        for _ in range(steps):
            result = product(operand)
        result.block_until_ready()

    return Step(run, flops=2.0 * MATMUL_SIZE**3)
