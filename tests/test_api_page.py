"""docs/api.md shows each public name, with an example that runs."""

import doctest

import jax
import pytest

import alibi
from tools import api_page


def test_the_page_is_fresh():
    assert api_page.PAGE.read_text() == api_page.page(), "run: python -m tools.api_page"


def test_the_options_of_evaluators_are_fresh():
    text = api_page.EVALUATION.read_text()
    assert text == api_page.with_options(text), "run: python -m tools.api_page"
    line = "| `--prompts` | passkey | keys to be found at each length and distance; defaults to 200 |\n"
    assert line in text
    assert line in api_page.with_options(text.replace(line, "")), "each option has a line"


@pytest.mark.parametrize("name", alibi.__all__)
def test_examples_run(name):
    """A module's examples are its classes' examples."""
    shown = [one for one in api_page.names() if one.partition(".")[0] == name]
    assert shown
    for one in shown:
        variables = {name: getattr(alibi, name)}
        example = doctest.DocTestParser().get_doctest(
            api_page.docstring(one), variables, one, "docs/api.md", 0
        )
        assert example.examples, f"{one} lacks an example"
        with jax.numpy_rank_promotion("allow"):  # as a reader's JAX has it
            doctest.DebugRunner().run(example)
