"""Runs the notebooks of docs/ and writes what their cells print and draw, without Jupyter.

python scripts/run_notebooks.py                  # all
python scripts/run_notebooks.py figure.ipynb
"""

import ast
import base64
import contextlib
import io
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import clone
from absl import app

NOTEBOOKS = clone.ROOT / "docs" / "notebooks"


def run(notebook: Mapping[str, Any], **replaced: str) -> list[list[dict[str, Any]]]:
    """Returns the outputs of each code cell: what it printed, and the value of a last expression.

    Args:
      replaced: other values for the names that a cell sets by a line `NAME = VALUE`.
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
    found: list[dict[str, Any]] = []
    if printed:
        lines = printed.splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data: dict[str, Any] = {"text/plain": [repr(value)]}
        if hasattr(value, "_repr_png_"):
            picture = base64.b64encode(value._repr_png_()).decode()
            data = {"image/png": picture + "\n", "text/plain": [f"<{type(value).__name__}>"]}
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return found


def main(arguments: list[str]) -> None:
    for path in [NOTEBOOKS / name for name in arguments[1:]] or sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for cell, outputs in zip(cells, run(notebook), strict=True):
            cell["outputs"] = outputs
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"written: {path.relative_to(pathlib.Path.cwd())}", flush=True)


if __name__ == "__main__":
    app.run(main)
