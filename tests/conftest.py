"""Settings that hold for every test: strict dtypes and ranks, and the optional folder of real corpora."""

import os
import pathlib

import jax
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def shared_dir() -> pathlib.Path:
    """The folder `shared` beside the project, with real corpora and recorded results; skips where it is absent."""
    folder = pathlib.Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the optional folder {folder} with corpora and recorded results")
    return folder
