"""The Python blocks of the pages run, each page's in their order, as a reader would run them."""

import importlib.util
import re

import jax
import pytest

from alibi.positions import PositionMethod, make_position
from alibi.testing import check_cache, check_segments, check_shift
from alibi.testing.model import SmallModel
from tests.hosts import ROOT

pytestmark = pytest.mark.slow

# Blocks of other pages need a trained run, or a package of the reader's own.
PAGES = (
    "README.md",
    "docs/five-minutes.md",
    "docs/attention.md",
    "docs/walk-through.md",
    "docs/how-to/read-a-row.md",
    "docs/new-method.md",
)
NEEDED = {"import equinox": "equinox", "my_package": "my_package"}


def blocks(page):
    """Returns a page's Python blocks as test parameters, those of one heading together."""
    found = []
    for part in re.split(r"^##? ", (ROOT / page).read_text(), flags=re.MULTILINE)[1:]:
        code = re.findall(r"^```python\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
        if code:
            found.append(pytest.param(code, id=f"{page}-{part.partition(chr(10))[0]}"))
    assert found, page
    return found


@pytest.mark.parametrize("code", [code for page in PAGES for code in blocks(page)])
def test_blocks_run(code, monkeypatch):
    monkeypatch.chdir(ROOT)  # rows are read by their place in the clone
    variables = {}
    with jax.numpy_rank_promotion("allow"):  # as a reader's JAX has it
        for block in code:
            for words, package in NEEDED.items():
                if words in block and importlib.util.find_spec(package) is None:
                    pytest.skip(f"needs the package {package}")
            exec(block, variables)


def test_the_methods_of_the_guide_keep_what_they_declare():
    """Their shifts, their cache, whose pieces go on by `before`, and their documents."""
    code = "".join(part for block in blocks("docs/new-method.md") for part in block.values[0])
    variables = {}
    exec(code.partition("from alibi.testing")[0], variables)
    own = [
        of for of in variables.values() if isinstance(of, type) and issubclass(of, PositionMethod)
    ]
    names = [of.__name__ for of in own if of is not PositionMethod]
    assert names == ["Root", "Turn", "TurnByText", "Softplus"]
    sizes = {"num_heads": 4, "head_dim": 8, "width": 32, "train_length": 16}
    for name in names[1:]:
        model = SmallModel(make_position(variables[name], **sizes))
        for check in (check_shift, check_cache, check_segments):
            check(model)
