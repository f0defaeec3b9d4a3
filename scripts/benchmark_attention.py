"""`scripts/benchmark.py attention`: times attention alone, at several lengths, against Flax and PyTorch."""

import dataclasses
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from benchmark_attention_contenders import (
    AttentionContender,
    Shape,
    flax_attention,
    project_attention,
    torch_attention,
)
from benchmark_contenders import Contender, Process, matmul_contender

TURN_SECONDS = 0.5  # of one pass of one contender in one round, but at least one call
LONG, LONG_ROUNDS = 16384, 3  # from this length on, at most so many rounds
BACKWARD_FLOPS = 3.5  # forward and backward pass, relative to the forward pass
PARTS = {"forward": "forward_seconds", "run": "both_seconds"}

# By the name of the peer; "no backward pass" is found out, not written here.
PEERS = {
    "torch": {
        "PyTorch sdpa, dense bias": lambda shape: torch_attention(shape, "dense"),
        "PyTorch FlexAttention": lambda shape: torch_attention(shape, "flex"),
    },
    "flax": {"Flax, dense bias": flax_attention},
}


def contenders(
    shape: Shape, backends: list[str], skip_epsilons: list[float | None], peers: list[str]
) -> tuple[dict[str, AttentionContender], list[str]]:
    """Each contender by its name, and the names of the peers among them."""
    ours = {
        f"alibi {backend}, skip {'none' if epsilon is None else format(epsilon, 'g')}": project_attention(
            shape, backend, epsilon
        )
        for backend in backends
        for epsilon in skip_epsilons
    }
    theirs = {name: make(shape) for peer in peers for name, make in PEERS[peer].items()}
    return {**ours, **theirs}, list(theirs)


@dataclasses.dataclass
class Runner:
    """A contender that is measured, or the reason why it is not (any more)."""

    contender: Contender
    process: Process | None = None
    answer: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    failed: str | None = None

    def prepare(self) -> None:
        if isinstance(self.contender, AttentionContender) and (shortage := self.contender.shortage()):
            self.failed = shortage
            return
        self.process = self.contender.start()
        with _Failing(self):
            self.answer = self.process.prepare()
            part_seconds = self.answer.get("part_seconds") or {"run": self.answer["step_seconds"]}
            self.calls = {part: max(1, round(TURN_SECONDS / seconds)) for part, seconds in part_seconds.items()}
            self.seconds = {part: [] for part in self.calls}

    def turn(self) -> None:
        """Times each part once."""
        if self.failed is None:
            with _Failing(self):
                for part, calls in self.calls.items():
                    self.seconds[part].append(self.process.run(calls, part) / calls)

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


def measure(shape: Shape, entrants: dict[str, AttentionContender], peers: list[str], rounds: int) -> list[dict]:
    """Rows of the contenders: medians over `rounds` rounds in which each is timed in turn."""
    runners = {"matmul": Runner(matmul_contender())} | {name: Runner(entrant) for name, entrant in entrants.items()}
    try:
        for name, runner in runners.items():  # one at a time: their compilations would slow each other down
            _progress(f"L={shape.length}: preparing {name}")
            runner.prepare()
        for number in range(rounds):
            _progress(f"L={shape.length}: round {number + 1} of {rounds}")
            for runner in runners.values():
                runner.turn()
        _progress("")
    finally:
        for runner in runners.values():
            runner.stop()
    matmul = runners.pop("matmul")
    if matmul.failed:
        raise RuntimeError(f"the matrix product, which gives the peak, was not measured: {matmul.failed}")
    peak = matmul.answer["flops"] / matmul.median("run")
    return [
        {**_row(name, runner, shape, peak), **_ratios(runner, {peer: runners[peer] for peer in peers})}
        for name, runner in runners.items()
    ]


def _row(name: str, runner: Runner, shape: Shape, peak: float) -> dict[str, Any]:
    useful = {"forward": shape.forward_flops, "run": BACKWARD_FLOPS * shape.forward_flops}
    row = {"contender": name, **dataclasses.asdict(shape), "failed": runner.failed, "matmul_gflops": peak / 1e9}
    for part, title in PARTS.items():
        seconds = runner.median(part)
        row[title] = seconds
        row[f"{title}_of_rounds"] = runner.seconds.get(part)
        row[title.replace("seconds", "share_of_matmul_peak")] = seconds and useful[part] / seconds / peak
    for key in ("first_call_seconds", "memory_bytes", "compiler_bytes", "no_backward"):
        row[key] = runner.answer.get(key)
    return row


def _ratios(runner: Runner, peers: dict[str, Runner]) -> dict[str, Any]:
    """How many times as fast as each peer it is."""
    return {
        title.replace("seconds", "of_peers"): {
            name: peer.median(part) / runner.median(part) if peer.median(part) and runner.median(part) else None
            for name, peer in peers.items()
        }
        for part, title in PARTS.items()
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The measured contenders of one length as a table, then those that could not run, with the reasons."""
    first = rows[0]
    print(
        f"\nL={first['length']}: batch {first['batch']}, {first['heads']} heads of {first['head_dim']}, "
        f"{first['dtype']}; {first['machine']['cpu']}, {first['machine']['cores']} cores, {first['date']}; "
        f"float32 matmul peak {first['matmul_gflops']:.0f} GFLOP/s; medians of {first['rounds']} rounds; "
        "a/b: forward/forward and backward\n"
    )
    peers = list(first["forward_of_peers"])
    print_table(
        ["", "forward, ms", "with backward, ms", "of peak", "first call, s", "memory, MB", "compiler's, MB"]
        + [f"x {name}" for name in peers],
        [list(_cells(row, peers)) for row in rows],
    )
    for row in rows:
        if row["failed"]:
            print(f"{row['contender']} could not run: {row['failed']}")
        if row["no_backward"]:
            print(f"{row['contender']} has no backward pass here, its memory is the forward's: {row['no_backward']}")


def _cells(row: dict[str, Any], peers: list[str]) -> Iterator[str]:
    yield row["contender"]
    if row["failed"]:
        yield "could not run"
        yield from ["-"] * (5 + len(peers))
        return
    yield _text(row["forward_seconds"], ",.2f", 1e3)
    yield "no backward" if row["no_backward"] else _text(row["both_seconds"], ",.2f", 1e3)
    yield _pair(row["forward_share_of_matmul_peak"], row["both_share_of_matmul_peak"])
    yield _text(row["first_call_seconds"], ".1f")
    yield _text(row["memory_bytes"], ",.0f", 1e-6)
    yield _text(row["compiler_bytes"], ",.0f", 1e-6)
    for peer in peers:
        yield _pair(row["forward_of_peers"][peer], row["both_of_peers"][peer])


def print_table(titles: list[str], rows: list[list[str]]) -> None:
    """A Markdown table, the first column aligned left."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for cells in (titles, *rows):
        aligned = [cells[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]
        print(f"| {' | '.join(aligned)} |")
        if cells is titles:
            print("|:" + "|".join([f"{'-' * (widths[0])}-"] + [f"{'-' * (w + 1)}:" for w in widths[1:]]) + "|")
    sys.stdout.flush()


def _pair(forward: float | None, both: float | None) -> str:
    return "-" if forward is None and both is None else f"{_text(forward, '.2f')}/{_text(both, '.2f')}"


def _text(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else format(value * factor, form)


def _progress(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
