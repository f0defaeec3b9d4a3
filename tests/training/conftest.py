"""A small run, trained once for all tests that read or copy it."""

import pathlib
import shutil

import pytest

from alibi.training import loop


@pytest.fixture(scope="session")
def whole(tiny_config, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The run of `tiny_config()`, finished without a stop; of all tests, so not to be changed."""
    workdir = tmp_path_factory.mktemp("whole [1]*") / "run"
    loop.train(tiny_config(), str(workdir))
    return workdir


@pytest.fixture
def finished(whole: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of `whole` for the test."""
    return shutil.copytree(whole, tmp_path / "run")
