"""What every benchmark shares: contenders measured in turn, round after round, and their rows and table."""

import concurrent.futures
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import math
import pathlib
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from alibi.runs.provenance import processor, usable_cores, versions
from benchmarks.processes import Contender, Process, matmul_step, prepare, turn

MATMUL = "matmul"
PEERS = "PyTorch", "Flax"  # how the names of peers begin
WIDEST = 120  # columns of a terminal that a table may take
Row = dict[str, Any]


@dataclasses.dataclass
class Runner:
    """A contender under measurement, or the reason why it is not measured (any more).

    Attributes:
      facts: values that its process answered.
      calls: how many calls of each part make a turn.
      seconds: a number for each part and round: the seconds of a call.
    """

    contender: Contender
    process: Process | None = None
    facts: Row = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    failed: str | None = None

    def attempt(self, action: Callable[["Runner"], None]) -> None:
        """Does `action`, unless it has failed. A failure is kept as the reason, and its memory is freed."""
        if self.failed is None:
            try:
                action(self)
            except RuntimeError as error:
                self.failed = str(error)
                self.stop()

    def prepare(self, turn_seconds: float) -> None:
        """Starts it and warms it up. Each part will be timed for about `turn_seconds` in a round."""
        needed, available = self.contender.needed_bytes, available_memory()
        if needed > available:
            raise RuntimeError(
                f"needs about {needed / 2**30:.0f} GiB, and {available / 2**30:.0f} GiB are available"
            )
        self.process = Process(keeps_memory=self.contender.keeps_memory)
        seconds, self.facts = self.process.ask(prepare, self.contender)
        self.calls = {
            part: max(1, round(turn_seconds / of_call)) for part, of_call in seconds.items()
        }
        self.seconds = {part: [] for part in self.calls}

    def turn(self) -> None:
        """Times each part once, after an untimed call if a turn has several.

        The untimed call finds its threads asleep and the caches full of another contender's data; a run
        under way doesn't.
        """
        for part, calls in self.calls.items():
            if calls > 1:
                self.process.ask(turn, part, 1)
            seconds, self.facts["peak_memory_bytes"] = self.process.ask(turn, part, calls)
            self.seconds[part].append(seconds / calls)

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()

    def median(self, part: str = "run") -> float | None:
        """Returns the median seconds of a call, None if it was not measured."""
        return (
            statistics.median(self.seconds[part])
            if self.failed is None and part in self.seconds
            else None
        )

    def rate(self, amount: float, part: str = "run") -> float | None:
        """Returns `amount` a second, if each call does that amount."""
        seconds = self.median(part)
        return seconds and amount / seconds

    def times_as_fast(self, other: "Runner | None", part: str = "run") -> float | None:
        """Returns the median of the rounds' ratios: the machine drifts less within a round than
        between them.
        """
        if other is None or self.median(part) is None or other.median(part) is None:
            return None
        return statistics.median(
            b / a for a, b in zip(self.seconds[part], other.seconds[part], strict=True)
        )


Runners = dict[str, Runner]


def fastest_peer(runners: Runners, part: str = "run") -> Runner | None:
    """Returns the peer that took least time for a part, or None if none was measured."""
    peers = [
        (seconds, name)
        for name, runner in runners.items()
        if name.startswith(PEERS) and (seconds := runner.median(part))
    ]
    return runners[min(peers)[1]] if peers else None


def available_memory() -> float:
    """Returns the bytes available without pushing anything out, infinity if the system doesn't tell."""
    file = pathlib.Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+)", file.read_text()) if file.exists() else None
    return 1024 * int(match[1]) if match else math.inf


def run_rounds(
    contenders: Mapping[str, Contender],
    rounds: int,
    *,
    turn_seconds: float,
    title: str,
    preparing: int = 1,
) -> tuple[Runners, Runner]:
    """Times every contender in turn in each round. Returns them, and the matrix product timed among them,
    which gives the peak.

    Args:
      turn_seconds: time for each part of a contender in a round, but at least a call.
      title: shown in the progress line.
      preparing: contenders prepared at a time. With several, preparation times are no measurement.
    """
    runners = {
        name: Runner(contender)
        for name, contender in {MATMUL: Contender(matmul_step), **contenders}.items()
    }
    try:
        _progress(f"{title}: preparing")
        with concurrent.futures.ThreadPoolExecutor(preparing) as pool:
            list(
                pool.map(
                    lambda runner: runner.attempt(lambda runner: runner.prepare(turn_seconds)),
                    runners.values(),
                )
            )
        for index in range(rounds):
            _progress(f"{title}: round {index + 1} of {rounds}")
            # In turn from both ends, so that none always comes after the same neighbour.
            for runner in list(runners.values())[:: -1 if index % 2 else 1]:
                runner.attempt(Runner.turn)
        _progress("")
    finally:
        for runner in runners.values():
            runner.stop()
    matmul = runners.pop(MATMUL)
    if matmul.failed:
        raise RuntimeError(
            f"the matrix product, which gives the peak, was not measured: {matmul.failed}"
        )
    return runners, matmul


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the printed table: a number from each row.

    Attributes:
      value: the row's key, several keys for nested values, or a function from the row to text.
      form, factor: format of the number, and a factor before it.
    """

    title: str
    value: str | tuple[str, ...] | Callable[[Row], str]
    form: str = ".2f"
    factor: float = 1.0

    def cell(self, row: Row) -> str:
        if callable(self.value):
            return self.value(row)
        keys = (self.value,) if isinstance(self.value, str) else self.value
        value = functools.reduce(lambda inner, key: inner and inner.get(key), keys, row)
        return "-" if value is None else format(value * self.factor, self.form)


def measure(
    benchmark: str,
    contenders: Mapping[str, Contender],
    rounds: int,
    row_of: Callable[[str, Runners, float], Row],
    **how: Any,
) -> list[Row]:
    """Measures the contenders and returns a row for each.

    Args:
      row_of: from a contender's name, all runners and the peak to the benchmark's own values.
      how: arguments for `run_rounds`.
    """
    runners, matmul = run_rounds(contenders, rounds, **how)
    peak = matmul.rate(matmul.facts["flops"])
    assert peak is not None
    common = {
        "matmul_gflops": peak / 1e9,
        "matmul_dtype": matmul.facts["dtype"],
        "device": matmul.facts["device"],
        **conditions(rounds),
    }
    return [
        {
            "benchmark": benchmark,
            "contender": name,
            "failed": runner.failed,
            **row_of(name, runners, peak),
            **common,
        }
        for name, runner in runners.items()
    ]


def compare(headline: str, columns: list[Column], *contest: Any, **how: Any) -> list[Row]:
    """Measures the contenders and shows the rows, which it returns (see `show` and `measure`)."""
    rows = measure(*contest, **how)
    show(headline, rows, columns)
    return rows


def show(headline: str, rows: list[Row], columns: list[Column]) -> None:
    """Prints a headline, the rows as a Markdown table, and the contenders that could not run, with
    the reasons.
    """
    peak = (
        f"; {rows[0]['matmul_dtype']} matmul peak {rows[0]['matmul_gflops']:,.0f} GFLOP/s"
        if "matmul_gflops" in rows[0]
        else ""
    )
    device = f"{rows[0]['device']}, " if rows[0].get("device") else ""
    machine = f"{rows[0]['machine']['cpu']}, {rows[0]['machine']['cores']} cores, {rows[0]['date']}"
    print(f"\n{headline}\n{device}{machine}{peak}; medians of {rows[0]['rounds']} rounds\n")
    print_rows(rows, columns)
    for row in rows:
        if row.get("failed"):
            print(f"{row['contender']} could not run: {row['failed']}")


def conditions(rounds: int) -> Row:
    """Returns the values that give a row's figures a meaning: the rounds, the machine, the
    versions, the date.
    """
    installed = versions()
    torch = importlib.metadata.version("torch") if importlib.util.find_spec("torch") else None
    packages = {package: installed[package] for package in ("jax", "jaxlib", "flax", "optax")}
    return {
        "rounds": rounds,
        "machine": {"cpu": processor(), "cores": usable_cores(), "system": platform.platform()},
        "versions": {**packages, "torch": torch},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def chosen_names(names: str, choices: Iterable[str], kind: str) -> list[str]:
    """Returns the comma-separated names, none for "none". Raises ValueError for an unknown name."""
    chosen = [name for name in names.split(",") if name != "none" or "none" in choices]
    if unknown := [name for name in chosen if name not in choices]:
        raise ValueError(f"unknown {kind} {unknown[0]!r}; use {', '.join(choices)}")
    return chosen


def whole_numbers(words: str, flag: str, *, divisor_of: int = 0) -> list[int]:
    """Returns a flag's comma-separated numbers. Raises ValueError if they are not whole, above 0, and divisors."""
    numbers = words.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise ValueError(
            f"--{flag}={words} must be whole numbers above 0, separated by commas, such as 64,128"
        )
    for number in map(int, numbers):
        if divisor_of % number:
            raise ValueError(
                f"--batch_tokens={divisor_of} must be a multiple of the length {number}"
            )
    return [int(number) for number in numbers]


def print_rows(rows: list[Row], columns: list[Column]) -> None:
    """Prints a line for each contender, as a Markdown table, or as several if it would be wider than WIDEST."""
    names = ["", *(row["contender"] for row in rows)]
    left = [[column.title, *(column.cell(row) for row in rows)] for column in columns]
    while left:
        width, table = max(map(len, names)) + 4, [names]
        while left and (len(table) == 1 or width + max(map(len, left[0])) + 3 <= WIDEST):
            width += max(map(len, left[0])) + 3
            table.append(left.pop(0))
        titles, *cells = map(list, zip(*table, strict=True))
        print_table(titles, cells)
        print("\n" * bool(left), end="")


def print_table(titles: list[str], rows: list[list[str]]) -> None:
    """Prints a Markdown table, the first column aligned left."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for cells in (titles, *rows):
        aligned = [cells[0].ljust(widths[0])] + [
            c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)
        ]
        print(f"| {' | '.join(aligned)} |")
        if cells is titles:
            print(
                "|:"
                + "|".join([f"{'-' * (widths[0])}-"] + [f"{'-' * (w + 1)}:" for w in widths[1:]])
                + "|"
            )
    sys.stdout.flush()


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
