"""`python -m benchmarks profile`: how long each part of the model takes in a training step."""

import argparse
import collections
import pathlib
import re
import tempfile
from typing import Any

from alibi.cli.host_memory import keep_freed_memory
from benchmarks.processes import seconds_of, warm_up
from benchmarks.rounds import chosen_names, conditions, print_table
from benchmarks.training import FOR_CPUS, SHAPES
from benchmarks.training_contenders import VOCABULARY, training_step

# The parts by patterns of the scopes in which Flax and JAX trace the step; the first match counts.
# A kernel that XLA made of several parts has the scope of the last.
PARTS = {
    "projections of attention": r"/attention/(query|key|value|out)/",
    "attention": r"/attention/",
    "feed-forward": r"\b(layers_\d+|Block)/(?!\w*norm)",  # with the sums of the residual stream
    "norms": r"norm/",
    "embedding and loss": r"(Decoder|Flax)LM",
    "optimizer": r"^jit\(update\)",
    "other": "",
}
# These only hold the kernels inside them.
CONTROL = re.compile(r"(while|conditional|call)\b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default=FOR_CPUS, help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--position", default="alibi", help="position method")
    parser.set_defaults(command=profile)


def profile(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns each part's share of a step's time, one row for each part, kind and pass; `rounds` steps are
    traced.

    The optimizer, which has no passes, counts as forward.

    Raises:
      ValueError: not a CPU. Only there do traces name the program's kernels.
    """
    import jax

    keep_freed_memory()  # before JAX is asked for its backend, which starts its threads
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"a step is profiled on CPUs alone, and this is a {jax.default_backend()}: JAX_PLATFORMS=cpu"
        )
    shapes = chosen_names(arguments.shapes, SHAPES, "shape")
    rounds = arguments.rounds
    return [row for shape in shapes for row in _profile(shape, arguments.position, rounds)]


def _profile(shape: str, position: str, rounds: int) -> list[dict[str, Any]]:
    import jax

    step = training_step(SHAPES[shape](f"position={position}"), VOCABULARY)
    warm_up(step.parts["run"])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds = seconds_of(step.parts["run"], rounds) / rounds
        (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
        spent = _seconds(jax.profiler.ProfileData.from_file(str(trace)), step.program())
    times = {key: sum(each) / rounds for key, each in spent.items()}
    total = sum(times.values())
    print(
        f"\n{shape}, {position}: {seconds * 1e3:.1f} ms a step while it was traced, {rounds} steps; its kernels took "
        f"{total * 1e3:.1f} ms in all, which is more where some run at the same time\n"
    )
    cells = [
        [
            part,
            kind,
            *(f"{times.get((part, kind, way), 0) / total:.1%}" for way in ("forward", "backward")),
        ]
        for part in PARTS
        for kind in ("with products", "the rest")
        if any(times.get((part, kind, way)) for way in ("forward", "backward"))
    ]
    print_table(["part", "kernels", "forward", "backward"], cells)
    return [
        {
            "benchmark": "profile",
            "shape": shape,
            "position": position,
            "part": part,
            "kind": kind,
            "pass": way,
            "seconds": seconds_of_part,
            "share": seconds_of_part / total,
            "kernels": len(spent[part, kind, way]) / rounds,
            "step_seconds": seconds,
            **conditions(rounds),
        }
        for (part, kind, way), seconds_of_part in times.items()
    ]


def _seconds(trace: Any, program: str) -> dict[tuple[str, str, str], list[float]]:
    """Returns the seconds of each kernel in a trace, by part, kind and pass."""
    kernels = _kernels(program)
    seconds: dict[tuple[str, str, str], list[float]] = collections.defaultdict(list)
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                if event.name in kernels and not CONTROL.match(event.name):
                    seconds[kernels[event.name]].append(event.duration_ns * 1e-9)
    return seconds


def _kernels(program: str) -> dict[str, tuple[str, str, str]]:
    """Returns part, kind and pass for each instruction name in a compiled program."""
    bodies = dict(re.findall(r"^%([\w.\-]+) [^\n]*\{\n(.*?)^\}", program, re.M | re.S))
    kernels = {}
    for name, line in re.findall(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$", program, re.M):
        called, named = (
            re.search(pattern, line) for pattern in (r"calls=%([\w.\-]+)", r'op_name="([^"]*)"')
        )
        body, scope = bodies.get(called[1], "") if called else "", named[1] if named else ""
        part = next(part for part, pattern in PARTS.items() if re.search(pattern, scope))
        kind = "with products" if " dot(" in line + body else "the rest"
        kernels[name] = part, kind, "backward" if "transpose(" in scope else "forward"
    return kernels
