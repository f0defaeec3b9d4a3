"""Runs the notebooks of docs/ and writes what their cells print and draw, without Jupyter.

    python -m tools.run_notebooks                 # all, into workdirs/notebooks
    python -m tools.run_notebooks figure.ipynb
    python -m tools.run_notebooks --write         # renews the outputs in docs/notebooks

Without --write no tracked file changes: rows of a clone with changes would have a commit "-dirty".
"""

import argparse
import ast
import base64
import contextlib
import io
import json
from collections.abc import Mapping
from typing import Any

from tools import ROOT

NOTEBOOKS = ROOT / "docs" / "notebooks"


def run(notebook: Mapping[str, Any], **replaced: str) -> list[list[dict[str, Any]]]:
    """Returns each code cell's outputs: what it printed, and the value of a last expression.

    Args:
      replaced: other values for names that a cell sets in a line `NAME = VALUE`.
    """
    variables: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        parsed = ast.parse("".join(cell["source"]))
        for line in parsed.body:
            name = getattr(line, "targets", [None])[0]
            if isinstance(name, ast.Name) and name.id in replaced:
                line.value = ast.parse(replaced[name.id], mode="eval").body
        last = parsed.body.pop() if isinstance(parsed.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(parsed, "<cell>", "exec"), variables)
            value = None
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), variables)
        outputs.append(_outputs(printed.getvalue(), value))
    return outputs


def _outputs(printed: str, value: Any) -> list[dict[str, Any]]:
    """Returns the outputs of a cell in the notebook's format."""
    outputs: list[dict[str, Any]] = []
    if printed:
        lines = printed.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data: dict[str, Any] = {"text/plain": [repr(value)]}
        if hasattr(value, "_repr_png_"):
            picture = base64.b64encode(value._repr_png_()).decode()
            data = {"image/png": picture + "\n", "text/plain": [f"<{type(value).__name__}>"]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def main() -> None:
    notebooks = {path.name: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(notebooks)}")
    parser.add_argument("--write", action="store_true", help="renew the outputs in docs/notebooks")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(notebooks):
        parser.error(f"no notebook {', '.join(sorted(unknown))}; there are {', '.join(notebooks)}")
    folder = NOTEBOOKS if arguments.write else ROOT / "workdirs" / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or notebooks:
        notebook = json.loads(notebooks[name].read_text())
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for cell, outputs in zip(cells, run(notebook), strict=True):
            cell["outputs"] = outputs
        (folder / name).write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"written: {folder / name}", flush=True)


if __name__ == "__main__":
    main()
