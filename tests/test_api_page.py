"""docs/api.md shows each public name, with an example that runs."""

import doctest
import importlib

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


@pytest.mark.parametrize("name", alibi.__all__)
def test_examples_run(name, script):
    variables = {name: getattr(alibi, name)}
    example = doctest.DocTestParser().get_doctest(
        script.docstring(name), variables, name, "docs/api.md", 0
    )
    assert example.examples, f"{name} lacks an example"
    with jax.numpy_rank_promotion("allow"):  # as a reader's JAX has it
        doctest.DebugRunner().run(example)
