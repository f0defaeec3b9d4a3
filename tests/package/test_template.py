"""examples/position_method, installed as a package of its own beside the wheel."""

import pathlib
import shutil

import pytest

from tests.package.conftest import ROOT, Environment, build, distributions, link

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "position_method"


@pytest.fixture(scope="module")
def installed(environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    found = environment("train")
    source = tmp_path_factory.mktemp("example") / "source"
    shutil.copytree(EXAMPLE, source)
    found.install(build(source))
    (site,) = found.folder.glob("lib/python3.*/site-packages")
    for distribution in distributions(["pytest"]).values():
        link(distribution, site)
    return found


def test_its_method_is_found_by_name(installed: Environment) -> None:
    """The formula is the package's own test; its contract takes a minute."""
    tests = pathlib.Path(EXAMPLE / "tests")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "formula", tests)
    assert "1 passed" in installed.run("python", *words).stdout
    said = installed.python(f"""
import jax.numpy as jnp
import alibi
from alibi.config import load_config
from alibi.model.positions import layer_pattern
from alibi.runs import method_files

config = load_config("{EXAMPLE}/config.py:position_options.initial=2")
(kind,) = layer_pattern(config)
print(type(kind.position).__name__, kind.position.initial, *method_files(config))
x = jnp.ones((1, 3, 2, 4))
attention = alibi.attention_fn("root", num_heads=2, params={{"scale": jnp.ones(2)}})
print(attention(x, x, x).shape)
try:
    alibi.make_position("rooot", num_heads=2, head_dim=4, width=8, train_length=16)
except ValueError as error:
    print(error)
""").splitlines()
    assert said[:2] == ["Root 2.0 own file alibi_root", "(1, 3, 2, 4)"]
    assert said[2].startswith("unknown position method 'rooot'; did you mean 'root'?")
