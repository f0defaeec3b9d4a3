"""The installed package describes itself, and has types for a user's code."""

import email
import re
import tomllib
import venv
import zipfile

import mypy.api
import pytest
import yaml

from tests.package.conftest import ROOT, Environment

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USER = """
import jax.numpy as jnp

import alibi
from alibi.linen import SelfAttention

slopes = alibi.alibi_slopes(8)
bias = alibi.alibi_bias(8, 16)
layer = SelfAttention(num_heads=8, position="t5")
closure = alibi.attention_fn("rotary", num_heads="8")  # a text
x = jnp.ones((1, 16, 8, 4))
out = alibi.attend(x, x, x, slopes=slopes, causl=False)  # no such argument
method = alibi.make_position("t5", num_heads=8, head_dim=4, width=32, train_length=16)
line = "version " + alibi.__version__
"""


def test_the_description_has_no_link_into_the_clone(wheel) -> None:
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith("/METADATA")]
        said = email.message_from_bytes(files.read(name))
        assert "alibi/py.typed" in files.namelist()
    links = re.findall(r"\]\(([^)]*)\)", said.get_payload())
    assert len(links) >= 4
    assert all(link.startswith("https://") for link in links), links
    block = re.search(r"```python\n.*?```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    assert block[0] in said.get_payload()
    assert {*PROJECT["optional-dependencies"]} == {*said.get_all("Provides-Extra")}


def test_every_extra_is_described() -> None:
    described = re.findall(r"`(\w+)`", PROJECT["readme"]["text"])
    assert {*PROJECT["optional-dependencies"]} - {"docs", "test"} <= {*described}


def test_the_version_is_one_everywhere(environment) -> None:
    version = PROJECT["version"]
    assert environment().python("import alibi; print(alibi.__version__)") == f"{version}\n"
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == version
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()


@pytest.fixture(scope="module")
def alone(wheel, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel without any package: the types of JAX and Flax, unknown there, take ten seconds."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder, symlinks=True)
    Environment(folder).install(wheel)
    return Environment(folder)


def test_a_users_code_is_checked_by_the_packages_types(
    alone: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two mistakes are planted; mypy finds them and nothing else."""
    (alone.folder / "user.py").write_text(USER)
    python = alone.folder / "bin" / "python"
    words = ["--ignore-missing-imports", "--no-error-summary", "--hide-error-context"]
    monkeypatch.chdir(alone.folder)
    told, _, _ = mypy.api.run([f"--python-executable={python}", *words, "user.py"])
    errors = [line for line in told.splitlines() if ": error: " in line]
    wanted = ["# a text", "# no such argument"]
    lines = [
        number for number, line in enumerate(USER.splitlines(), 1) if line.endswith(tuple(wanted))
    ]
    assert [int(error.split(":")[1]) for error in errors] == lines, told
    assert '"num_heads" to "attention_fn"' in errors[0]
    assert '"causl" for "attend"' in errors[1]
