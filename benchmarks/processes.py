"""Contenders: steps to run on request, each in a process of its own."""

import dataclasses
import functools
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from alibi.cli.host_memory import keep_freed_memory

# A process is slow at first: its threads may share a core for up to three turns of half a second,
# as long as the system knows no better (results/benchmarks/startup.md). It is warm after
# WARM_SECONDS, when its last two turns differ by no more than STEADY from the fastest, or after
# three times as many.
# (Trials, which measure nothing, set the environment variable.)
WARM_SECONDS = float(os.environ.get("ALIBI_WARM_SECONDS", "2"))
TURN_SECONDS, STEADY = 0.5, 1.1
STOP_SECONDS = 3.0  # that an idle process may take to end
# Of the product that gives the peak: its rows and columns on CPUs and on accelerators, each of which
# it fills.
MATMUL_SIZE, ACCELERATOR_MATMUL_SIZE = 2048, 8192

RunSteps = Callable[[int], None]  # does a number of steps and waits for the last
PARTS: dict[str, RunSteps] = {}  # of the contender of this process


@dataclasses.dataclass
class Step:
    """A contender's work, as its process has built it.

    Attributes:
      parts: the timed functions with their names, "run" if there is a single part.
      facts: other values for the row of results.
      program: returns a step's compiled program as text.
    """

    parts: dict[str, RunSteps]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    program: Callable[[], str] | None = None


def repeated(call: Callable[[], Any], *, one_by_one: bool = False) -> RunSteps:
    """Returns a function that calls `call` a number of times, and waits for the last result or for
    each.
    """
    import jax

    def run(steps: int) -> None:
        for _ in range(steps):
            result = call()
            if one_by_one:
                jax.block_until_ready(result)
        jax.block_until_ready(result)

    return run


@dataclasses.dataclass
class Contender:
    """A module-level function that builds a `Step`, and its arguments.

    Attributes:
      needed_bytes: a lower bound on the memory it needs, if that is known to be much.
      warm: warms the step up in its process, and returns the seconds of each part, and facts. Defaults to
        all parts in turn.
      keeps_memory: its process keeps freed memory, as the entry points do.
    """

    build: Callable[..., Step]
    arguments: tuple[Any, ...] = ()
    needed_bytes: float = 0.0
    warm: Callable[[Step], tuple[dict[str, float], dict[str, Any]]] | None = None
    keeps_memory: bool = True


def prepare(contender: Contender) -> tuple[dict[str, float], dict[str, Any]]:
    """Builds the step in its process and warms it up. Returns the seconds of each part, and facts for the row."""
    start = time.perf_counter()
    step = contender.build(*contender.arguments)
    PARTS.update(step.parts)
    if contender.warm is not None:
        seconds, facts = contender.warm(step)
        return seconds, step.facts | facts
    for run in step.parts.values():
        run(1)
    first_seconds = time.perf_counter() - start
    return {name: warm_up(run) for name, run in step.parts.items()}, step.facts | {
        "first_seconds": first_seconds
    }


def turn(part: str, steps: int) -> tuple[float, int]:
    """Returns how many seconds some steps of a part take in its process, and the process's peak memory in bytes."""
    return seconds_of(PARTS[part], steps), peak_memory()


def require_torch() -> None:
    """Raises ValueError if PyTorch, which a peer needs, is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError(
            "--peer=torch needs PyTorch, which is not installed; run: pip install torch==2.13.0"
        )


class Process:
    """A process that calls functions on request, and sleeps between the requests."""

    def __init__(self, *, keeps_memory: bool = True) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit threads
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, keeps_memory))
        self._process.start()
        theirs.close()

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns what a module-level function returns in the process.

        Raises:
          RuntimeError: the function failed, or the process died.
        """
        try:
            self._connection.send((function, arguments))
            answer, failure = self._connection.recv()
        except (EOFError, OSError):
            raise RuntimeError("a measured process died; is there memory left?") from None
        if failure:
            raise RuntimeError(failure)
        return answer

    def stop(self) -> None:
        self._connection.close()  # an idle process ends by itself, and ends its own helpers
        self._process.join(STOP_SECONDS)
        self._process.terminate()
        self._process.join()


def _serve(connection: multiprocessing.connection.Connection, keeps_memory: bool) -> None:
    """Answers the parent until it ends: with a result, and with the first line of an error."""
    import jax

    if keeps_memory:
        keep_freed_memory()
    # The time of compiling is measured. (JAX, which alibi imports, has read its environment
    # already.)
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    while True:
        answer = failure = None
        try:
            function, arguments = connection.recv()
            answer = function(*arguments)
        except EOFError:
            return
        except Exception as error:
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        connection.send((answer, failure))


def peak_memory() -> int:
    """Returns this process's peak memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def seconds_of(run: RunSteps, steps: int) -> float:
    """Returns the seconds of `steps` steps."""
    start = time.perf_counter()
    run(steps)
    return time.perf_counter() - start


def warm_up(run: RunSteps) -> float:
    """Runs until the time is steady. Returns the seconds of a step."""
    turns, elapsed, steps = [], 0.0, 1
    while elapsed < 3 * WARM_SECONDS:
        seconds = seconds_of(run, steps)
        elapsed += seconds
        turns.append(seconds / steps)
        steps = max(1, round(TURN_SECONDS / turns[-1]))
        if elapsed >= WARM_SECONDS and len(turns) > 1 and max(turns[-2:]) <= STEADY * min(turns):
            break
    return turns[-1]


def matmul_step() -> Step:
    """Returns a large matrix product, which gives the machine's peak: float32 on CPUs, bfloat16 on accelerators."""
    import jax

    on_cpu = jax.default_backend() == "cpu"
    size, dtype = (MATMUL_SIZE, "float32") if on_cpu else (ACCELERATOR_MATMUL_SIZE, "bfloat16")
    operand = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = functools.partial(jax.jit(lambda x: x @ x), operand)
    device = None if on_cpu else jax.local_devices()[0].device_kind
    facts = {"flops": 2.0 * size**3, "dtype": dtype, "device": device}
    return Step({"run": repeated(product)}, facts)
