"""Times contenders in turn, round by round, and prints what was found."""

import concurrent.futures
import dataclasses
import datetime
import importlib.metadata
import pathlib
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from alibi.runs import usable_cores
from benchmarks.processes import Contender, Process, matmul_contender

MATMUL = "matmul"


@dataclasses.dataclass
class Runner:
    """A contender that is measured, or the reason why it is not (any more)."""

    contender: Contender
    process: Process | None = None
    answer: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    peak_memory: int | None = None
    failed: str | None = None

    def prepare(self, turn_seconds: float) -> None:
        """Starts it and warms it up; each part will be timed for about `turn_seconds` in a round."""
        self.failed = self.contender.shortage() or None
        if self.failed:
            return
        self.process = self.contender.start()
        with _Failing(self):
            self.answer = self.process.prepare()
            part_seconds = self.answer.get("part_seconds") or {"run": self.answer["step_seconds"]}
            self.calls = {part: max(1, round(turn_seconds / seconds)) for part, seconds in part_seconds.items()}
            self.seconds = {part: [] for part in self.calls}

    def turn(self) -> None:
        """Times each part once, after a call that is not timed where a turn has several.

        That one finds its threads asleep and the caches full of another contender's data; a run under way doesn't.
        """
        if self.failed is None:
            with _Failing(self):
                for part, calls in self.calls.items():
                    if calls > 1:
                        self.process.run(1, part)
                    self.seconds[part].append(self.process.run(calls, part) / calls)

    def note_memory(self) -> None:
        """Asks how much its process has held."""
        if self.failed is None:
            with _Failing(self):
                self.peak_memory = self.process.peak_memory()

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = None

    def median(self, part: str) -> float | None:
        return statistics.median(self.seconds[part]) if self.failed is None and part in self.seconds else None


@dataclasses.dataclass
class _Failing:
    """Turns the failure of a runner's process into its reason, and frees its memory for the others."""

    runner: Runner

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, RuntimeError):
            return False
        self.runner.failed = str(error).strip().splitlines()[-1]
        self.runner.stop()
        return True


def run_rounds(
    contenders: Mapping[str, Contender], rounds: int, *, turn_seconds: float, title: str, preparing: int = 1
) -> tuple[dict[str, Runner], float]:
    """Every contender, timed in turn in each round, and the float32 peak that was measured among them, FLOP/s.

    Args:
      turn_seconds: of each part of one contender in one round, but at least one call.
      title: of the progress line.
      preparing: contenders that are prepared at a time; what they tell of their preparation is then no measurement.
    """
    runners = {MATMUL: Runner(matmul_contender())} | {name: Runner(one) for name, one in contenders.items()}
    try:

        def prepare(name: str) -> None:
            _progress(f"{title}: preparing {name}")
            runners[name].prepare(turn_seconds)

        with concurrent.futures.ThreadPoolExecutor(preparing) as pool:
            list(pool.map(prepare, runners))  # which raises what one of them has raised
        for number in range(rounds):
            _progress(f"{title}: round {number + 1} of {rounds}")
            # In turn from both ends, so that none always comes after the same one.
            for runner in list(runners.values())[:: -1 if number % 2 else 1]:
                runner.turn()
        for runner in runners.values():
            runner.note_memory()
        _progress("")
    finally:
        for runner in runners.values():
            runner.stop()
    matmul = runners.pop(MATMUL)
    if matmul.failed:
        raise RuntimeError(f"the matrix product, which gives the peak, was not measured: {matmul.failed}")
    return runners, matmul.answer["flops"] / matmul.median("run")


def about(rounds: int) -> dict[str, Any]:
    """What a row must say for its figures to mean something."""
    versions = {}
    for package in ("jax", "jaxlib", "flax", "optax", "torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = {"cpu": _cpu_model(), "cores": usable_cores(), "system": platform.platform()}
    return {"rounds": rounds, "machine": machine, "versions": versions, "date": date}


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def measured_on(row: dict[str, Any]) -> str:
    """The machine, the date and the peak that a row's shares are of."""
    return (
        f"{row['machine']['cpu']}, {row['machine']['cores']} cores, {row['date']}; float32 matmul peak "
        f"{row['matmul_gflops']:.0f} GFLOP/s; medians of {row['rounds']} rounds"
    )


def known(name: str, choices: Iterable[str], what: str) -> str:
    """`name`, if it is among the choices; raises ValueError."""
    if name not in choices:
        raise ValueError(f"unknown {what} {name!r}; use {', '.join(choices)}")
    return name


def whole_numbers(words: str, flag: str) -> list[int]:
    """The numbers of a comma-separated `flag`; ValueError for what is none, or below 1."""
    numbers = words.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise ValueError(f"--{flag}={words} must be whole numbers above 0, separated by commas, such as 64,128")
    return [int(number) for number in numbers]


def print_table(titles: list[str], rows: list[list[str]]) -> None:
    """A Markdown table, the first column aligned left."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for cells in (titles, *rows):
        aligned = [cells[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]
        print(f"| {' | '.join(aligned)} |")
        if cells is titles:
            print("|:" + "|".join([f"{'-' * (widths[0])}-"] + [f"{'-' * (w + 1)}:" for w in widths[1:]]) + "|")
    sys.stdout.flush()


def print_failures(rows: list[dict[str, Any]]) -> None:
    """Each contender that could not run, with the reason."""
    for row in rows:
        if row["failed"]:
            print(f"{row['contender']} could not run: {row['failed']}")


def text(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else format(value * factor, form)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
