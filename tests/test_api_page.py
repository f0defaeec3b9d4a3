"""docs/api.md shows each public name, with an example that runs."""

import doctest
import importlib
import inspect

import jax
import pytest

import alibi
from tests.hosts import ROOT


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("api_page")


def test_the_page_is_fresh(script):
    assert script.PAGE.read_text() == script.page(), "run: python scripts/api_page.py"


def test_help_and_dir_show_what_a_reader_needs():
    """Types by their short names, which took 2,000 characters; nothing that the modules import."""
    shown = str(inspect.signature(alibi.attend))
    assert shown.startswith(
        "(query: 'Queries', key: 'Keys', value: 'Values', *, slopes: 'Slopes | None'"
    )
    assert len(shown) < 1000
    assert dir(alibi) == sorted([*alibi.__all__, "__version__"])


@pytest.mark.parametrize("name", alibi.__all__)
def test_examples_run(name, script):
    """Those of a module are of its classes."""
    shown = [one for one in script.names() if one.partition(".")[0] == name]
    assert shown
    for one in shown:
        variables = {name: getattr(alibi, name)}
        example = doctest.DocTestParser().get_doctest(
            script.docstring(one), variables, one, "docs/api.md", 0
        )
        assert example.examples, f"{one} lacks an example"
        with jax.numpy_rank_promotion("allow"):  # as a reader's JAX has it
            doctest.DebugRunner().run(example)
