"""Contenders: steps that run on request, each in a process of its own."""

import dataclasses
import functools
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

Run = Callable[[int], None]  # does a number of steps and waits for the last


@dataclasses.dataclass
class Step:
    """The work of a contender, as its process has built it.

    Attributes:
      parts: functions that are timed, by name.
      facts: other values for the row of results.
      program: returns the compiled program of a step as text.
    """

    parts: dict[str, Run]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    program: Callable[[], str] | None = None


def one_part(run: Run, **facts: Any) -> Step:
    """Returns a step with the single part "run"."""
    return Step({"run": run}, facts)


def repeated(call: Callable[[], Any], *, one_by_one: bool = False) -> Run:
    """Returns a function that calls `call` a number of times, and waits for the last result or for each."""
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
    """A function, by module level name, that builds a `Step`, and its arguments.

    Attributes:
      needed_bytes: a lower bound of the memory it needs, if that is known to be much.
      prepare: warms the step up in its process, and returns the seconds of each part and more facts.
    """

    build: Callable[..., Step]
    arguments: tuple[Any, ...] = ()
    needed_bytes: float = 0.0
    prepare: Callable[[Step], tuple[dict[str, float], dict[str, Any]]] | None = None

    def prepared(self) -> tuple[Step, dict[str, float], dict[str, Any]]:
        """Returns, in the process, the warm step, the seconds of each part, and facts for the row."""
        start = time.perf_counter()
        step = self.build(*self.arguments)
        if self.prepare is not None:
            seconds, facts = self.prepare(step)
            return step, seconds, step.facts | facts
        for run in step.parts.values():
            run(1)
        first_seconds = time.perf_counter() - start
        seconds = {name: warm_up(run) for name, run in step.parts.items()}
        return step, seconds, step.facts | {"first_seconds": first_seconds}


def require_torch() -> None:
    """Raises ValueError if PyTorch, which a peer needs, is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError("--peer=torch needs PyTorch, which is not installed; run: pip install torch==2.13.0")


class Process:
    """A contender in a process of its own, asleep between requests."""

    def __init__(self, contender: Contender):
        context = multiprocessing.get_context("spawn")  # a fork would inherit threads
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, contender), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, question: Any) -> Any:
        """Returns the answer to "prepare", "memory" (most bytes held) or (part, steps), which takes seconds.

        Raises:
          RuntimeError: the process failed or died.
        """
        try:
            self._connection.send(question)
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise RuntimeError("a measured process died; is there memory left?") from None
        if isinstance(answer, str):
            raise RuntimeError(f"a measured process failed:\n{answer}")
        return answer

    def stop(self) -> None:
        self._connection.close()  # an idle process ends by itself, and ends its own helpers
        self._process.join(STOP_SECONDS)
        self._process.terminate()
        self._process.join()


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
            if question == "prepare":
                step, *answer = contender.prepared()
            elif question == "memory":
                answer = peak_memory()
            else:
                part, steps = question
                answer = seconds_of(step.parts[part], steps)
        except EOFError:
            return
        except Exception:
            answer = traceback.format_exc()
        connection.send(answer)


def peak_memory() -> int:
    """Returns the most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def seconds_of(run: Run, steps: int) -> float:
    """Returns the seconds that `steps` steps take."""
    start = time.perf_counter()
    run(steps)
    return time.perf_counter() - start


def warm_up(run: Run) -> float:
    """Runs until the time is steady; returns the seconds of a step."""
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
    """Returns a large float32 matrix product: the machine's peak."""
    import jax

    operand = jax.random.normal(jax.random.key(0), (MATMUL_SIZE, MATMUL_SIZE))
    product = functools.partial(jax.jit(lambda x: x @ x), operand)
    return one_part(repeated(product), flops=2.0 * MATMUL_SIZE**3)
