"""Two runs, and an output directory with the rows of both."""

import pathlib
import shutil

import pytest

from alibi.evaluation.evaluate import evaluate_runs
from tests.evaluation.runs import TEXT, make_run, options_of


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp(
        "runs [1]*{b}'\"%#"
    )  # characters of patterns, shells and formats
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="session")
def alibi_run(folder):
    return make_run(folder, "alibi", "alibi-run")


@pytest.fixture(scope="session")
def learned_run(folder):
    return make_run(folder, "learned", "learned-run")


@pytest.fixture(scope="session")
def evaluated(folder, alibi_run, learned_run):
    """An output directory with both runs at 16 and 32; a test changes only a copy."""
    options = options_of(output_dir=folder / "out", multiples=(1, 2), dump_nll=True)
    assert evaluate_runs([alibi_run, learned_run], options) == []
    return folder / "out"


@pytest.fixture
def copied(evaluated, tmp_path):
    return pathlib.Path(shutil.copytree(evaluated, tmp_path / "out"))
