"""The notebooks run, in a quick form, and their committed outputs are of their cells."""

import json
import sys

import jax
import pytest

from tests.hosts import ROOT
from tools import run_notebooks

# fewer updates, layers and lengths than their own
QUICK = {
    "UPDATES": "2",
    "CONFIG": "ModelConfig(num_layers=1, width=64, num_heads=4, feed_forward=64)",
    "lengths": "[64]",
}
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    notebook = json.loads(path.read_text())
    if path.stem == "grids":
        pytest.importorskip("sklearn", reason="needs the package scikit-learn")
    with jax.numpy_rank_promotion("allow"):  # as a reader's JAX has it
        outputs = run_notebooks.run(notebook, **QUICK)
    committed = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]

    def kinds(cells):
        return [[(one["output_type"], *one.get("data", ())) for one in cell] for cell in cells]

    assert kinds(outputs) == kinds(committed), "run: python -m tools.run_notebooks --write"
    # what doesn't depend on the updates is printed as it is committed
    texts = [cell[0]["text"] for cell in outputs if cell and "text" in cell[0]]
    assert texts[:-1] == [cell[0]["text"] for cell in committed if cell and "text" in cell[0]][:-1]


def test_a_cell_that_fails_is_an_error():
    cells = [{"cell_type": "code", "source": ["N = 3\n", "print(N)\n", "N * 2"]}]
    ((printed, value),) = run_notebooks.run({"cells": cells}, N="4")
    assert (printed["text"], value["data"]) == (["4\n"], {"text/plain": ["8"]})
    with pytest.raises(ZeroDivisionError):
        run_notebooks.run({"cells": [{"cell_type": "code", "source": ["N = 0\n", "1 / N"]}]})


def test_tracked_notebooks_are_written_only_on_request(monkeypatch, tmp_path):
    monkeypatch.setattr(run_notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", tmp_path)
    cell = {"cell_type": "code", "source": ["1 + 1"], "outputs": []}
    tracked = tmp_path / "sum.ipynb"
    tracked.write_text(json.dumps({"cells": [cell]}))

    def written(path, *words):
        monkeypatch.setattr(sys, "argv", ["run_notebooks.py", *words])
        run_notebooks.main()
        return [one["data"] for one in json.loads(path.read_text())["cells"][0]["outputs"]]

    before = tracked.read_text()
    assert written(tmp_path / "workdirs/notebooks/sum.ipynb") == [{"text/plain": ["2"]}]
    assert tracked.read_text() == before
    assert written(tracked, "sum.ipynb", "--write") == [{"text/plain": ["2"]}]
    monkeypatch.setattr(sys, "argv", ["run_notebooks.py", "sun.ipynb"])
    with pytest.raises(SystemExit, match="2"):
        run_notebooks.main()
