"""A random encoder, imported once for all tests that read it."""

import pytest

from alibi.runs.trained import TrainedRun
from tests.convert.imported import jina


@pytest.fixture(scope="session")
def masked(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A random model of masked tokens, L = 16; not to be changed."""
    return TrainedRun(jina(tmp_path_factory.mktemp("masked")))
