"""Imports run one way, so that a reader can take the rooms in order and a room can be used alone."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Each room with the rooms that it may import, besides itself; a module that stands nearer to the entry points than the
# rest of its room is named by itself.
LIBRARY = {"alibi.slopes", "alibi.positions", "alibi.attention"}
MODEL = LIBRARY | {"alibi.model", "alibi.parallel", "alibi.ranges"}
OF_RUNS = (
    MODEL
    | {
        f"alibi.{room}"
        for room in (
            "data",
            "runs",
            "runs.store",
            "runs.trained",
            "evaluation",
            "evaluation.output",
            "reporting",
            "errors",
            "progress",
        )
    }
    | {"alibi.evaluation.extrapolation"}
)
ALLOWED = {
    "alibi.slopes": set(),
    "alibi.positions": {"alibi.slopes"},
    "alibi.attention": {"alibi.slopes", "alibi.positions"},
    "alibi.parallel": {"alibi.errors"},
    "alibi.model": LIBRARY | {"alibi.parallel", "alibi.ranges"},
    "alibi.generation": MODEL,
    "alibi.testing": MODEL,
    "alibi": LIBRARY,
    "alibi.atomic": set(),
    "alibi.errors": set(),
    "alibi.host_memory": set(),
    "alibi.progress": set(),
    "alibi.ranges": set(),
    "alibi.config_files": {"alibi.ranges", "alibi.runs", "configs.base"},
    "alibi.command_line": {"alibi.atomic", "alibi.config_files", "alibi.data", "alibi.errors", "alibi.host_memory"}
    | {"alibi.parallel", "alibi.ranges", "configs.base"},
    "alibi.evaluation_flags": {"alibi.reporting", "alibi.runs", "configs.base"},
    "alibi.data": {"alibi.atomic", "alibi.errors", "alibi.progress", "alibi.data.shared"},
    "alibi.data.shared": {"alibi.atomic", "alibi.data", "alibi.runs.store"},
    "alibi.runs.store": {"alibi.atomic", "alibi.errors", "alibi.runs.bucket"},
    "alibi.runs.bucket": {"alibi.atomic", "alibi.runs.store"},
    "alibi.reporting": {"alibi.atomic", "alibi.runs.store"},
    "alibi.runs": {"alibi.data", "alibi.atomic", "alibi.errors", "alibi.runs.store"},
    "alibi.evaluation": MODEL | {"alibi.reporting", "alibi.errors", "alibi.atomic", "alibi.runs.store"},
    "alibi.training": MODEL
    | {"alibi.data", "alibi.runs", "alibi.runs.store", "alibi.evaluation", "alibi.errors", "alibi.atomic"}
    | {"alibi.progress"},
    "alibi.runs.trained": MODEL | {"alibi.data", "alibi.runs", "alibi.evaluation", "alibi.training", "alibi.reporting"},
    "alibi.evaluation.output": OF_RUNS,
    "alibi.evaluation.extrapolation": OF_RUNS,
    "alibi.evaluation.passkey": OF_RUNS,
    "alibi.importers": MODEL | {"alibi.data", "alibi.runs", "alibi.training", "alibi.atomic"},
    "alibi.planning": MODEL | {"alibi.data", "alibi.runs", "alibi.training", "alibi.reporting"},
    "alibi.sweeps": MODEL
    | {"alibi.data", "alibi.runs", "alibi.training", "alibi.evaluation", "alibi.reporting", "alibi.errors"}
    | {"alibi.atomic", "alibi.config_files", "alibi.runs.store", "configs.base", "alibi.planning", "alibi.progress"},
    "alibi.paper": MODEL
    | {"alibi.data", "alibi.runs", "alibi.runs.store", "alibi.reporting", "alibi.sweeps", "alibi.atomic"},
    "configs": {
        "configs.base",
        "configs.wikitext103",
        "configs.wikitext2",
        "configs.books",
        "configs.quickstart",
        "configs.sweeps",
    },  # a config may vary another one, and a sweep
}


def room_of(module: str) -> str:
    if module in ALLOWED:
        return module
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in ("alibi", "configs") and len(parts) > 1 else parts[0]


def imported(file: pathlib.Path) -> set[str]:
    """The project's modules that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            package = ROOT / pathlib.Path(*(node.module or "").split("."))
            found |= {
                f"{node.module}.{alias.name}" if (package / f"{alias.name}.py").exists() else str(node.module)
                for alias in node.names
            }
    return {name for name in found if name.split(".")[0] in ("alibi", "configs", "tests", "scripts")}


def files() -> list[pathlib.Path]:
    return sorted([*ROOT.glob("alibi/**/*.py"), *ROOT.glob("configs/**/*.py")])


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_run_one_way(file: pathlib.Path) -> None:
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    room = "configs" if module.startswith("configs") else room_of(module)
    assert room in ALLOWED, f"{room} is a new room: say here what it may import"
    for name in imported(file):
        other = room_of(name)
        assert other == room or other in ALLOWED[room], f"{module} must not import {name}"


def test_what_reads_text_rows_and_runs_starts_without_jax() -> None:
    """JAX takes seconds to import, and a notebook that reads rows, texts or the state of a sweep needs none of it."""
    rooms = [file for room in ("data", "reporting") for file in sorted((ROOT / "alibi" / room).glob("*.py"))]
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in rooms] + ["alibi.sweeps.state"]
    code = f"import sys, {', '.join(modules)}; print(*{{'jax', 'flax', 'optax'}} & {{*sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True)
    assert found.stdout == "\n"
