"""Imports run one way, so that a reader can take the rooms in order and a room can be used alone."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Each room with the rooms that it may import, besides itself.
LIBRARY = {"slopes", "numerics", "positions", "attention"}
MODEL = LIBRARY | {"config", "parallel", "errors", "extras", "objectives", "model"}
RUNS = MODEL | {"optimizers", "devices", "storage", "progress", "data", "runs"}
MEASURED = RUNS | {"evaluation", "reporting"}
ALLOWED: dict[str, set[str]] = {
    "slopes": set(),
    "extras": set(),
    "errors": {"extras"},
    "progress": {"extras"},
    "config": {"errors", "extras"},
    "storage": {"errors", "extras"},
    "numerics": set(),
    "positions": {"slopes", "numerics", "config"},
    "attention": {"slopes", "numerics", "positions"},
    "parallel": {"config", "errors"},
    "devices": set(),
    "optimizers": {"config", "parallel"},
    "model": MODEL,
    "generation": RUNS,
    "testing": MODEL,
    "linen": LIBRARY | {"config"},
    "nnx": LIBRARY,
    "alibi": LIBRARY
    | {"linen", "nnx", "model", "runs"},  # names alone, imported at their first use
    "objectives": {"config"},
    "data": {"config", "storage", "errors", "extras", "progress", "objectives"},
    "reporting": {"config", "storage", "errors", "extras", "progress"},
    "runs": RUNS,
    "evaluation": MEASURED | {"generation"},
    # A position method of the user's own is looked at before it is trained.
    "training": MEASURED | {"training", "generation", "testing"},
    "convert": RUNS | {"training"},
    "planning": MEASURED | {"training"},
    "sweeps": MEASURED | {"training", "planning"},
    "paper": MEASURED | {"training", "planning", "sweeps"},
    "cli": MEASURED | {"generation", "training", "planning", "sweeps"},
    "configs": {"config"},  # a config may vary another one, and a sweep
}


def room_of(module: str) -> str:
    """The folder of `alibi/` that a module lies in, or the module itself at its top; else the
    top-level package.
    """
    parts = module.split(".")
    return parts[1] if parts[0] == "alibi" and len(parts) > 1 else parts[0]


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
                f"{node.module}.{alias.name}"
                if (package / f"{alias.name}.py").exists()
                else str(node.module)
                for alias in node.names
            }
    return {
        name
        for name in found
        if name.split(".")[0] in ("alibi", "configs", "tests", "tools", "benchmarks")
    }


def test_imports_run_one_way() -> None:
    wrong = []
    for file in [*ROOT.glob("alibi/**/*.py"), *ROOT.glob("configs/**/*.py")]:
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        room = room_of(module)
        assert room in ALLOWED, f"{room} is a new room: say here what it may import"
        for name in imported(file):
            if room_of(name) not in {room, *ALLOWED[room]}:
                wrong.append(f"{module} must not import {name}")
    assert not wrong


def test_test_files_have_names_of_their_own() -> None:
    """If two have one name, pytest collects neither."""
    names = [file.name for file in ROOT.glob("tests/**/test_*.py")]
    assert [name for name in names if names.count(name) > 1] == []
