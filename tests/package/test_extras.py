"""The wheel with the packages of its base alone, and with those of an extra."""

import json
import re

import pytest

from alibi import extras
from tests.package.conftest import ROOT

# Imports every module of the library, and prints the message of each that lacks a package.
WALK = """
import importlib, json, pkgutil, alibi
from alibi.extras import MissingPackageError
left, found = ["alibi"], {}
while left:
    name = left.pop()
    try:
        module = importlib.import_module(name)
    except MissingPackageError as error:
        found[name] = str(error)
    else:
        found[name] = ""
        left += [f"{name}.{one.name}" for one in pkgutil.iter_modules(getattr(module, "__path__", []))]
print(json.dumps(found))
"""
LIBRARY = {"attention", "config", "cpu", "linen", "model", "nnx", "positions", "slopes", "testing"}
MESSAGE = r'{} needs the package {}, which is not installed: pip install "alibi-jax\[{}\]"'


def test_the_base_has_the_library_and_names_the_extra_of_the_rest(environment) -> None:
    found = json.loads(environment().python(WALK))
    whole = {name for name, message in found.items() if not message}
    assert whole >= {"alibi", *(f"alibi.{room}" for room in LIBRARY)}
    assert {"alibi.training", "alibi.evaluation", "alibi.data"} <= found.keys() - whole
    for name in found.keys() - whole:
        assert name.split(".")[1] not in LIBRARY, name
        assert re.fullmatch(MESSAGE.format(r"alibi\.\w+", r"\w+", "train"), found[name])


def test_with_train_all_modules_import_and_the_rest_names_its_extra(environment) -> None:
    found = json.loads(environment("train").python(WALK))
    assert not any(found.values())
    said = (
        environment("train")
        .python("""
from alibi.config import DataConfig
from alibi.data.tokenizers import given_tokenizer
from alibi.data.hosted import Hub
from alibi.reporting.charts import png
from alibi.storage.files import resolve
for wrong in (
    lambda: given_tokenizer(DataConfig(tokenizer="bpe", tokenizer_file="x.json")),
    lambda: Hub(DataConfig(corpus="hub", name="x")),
    lambda: png({}),
    lambda: resolve("gs://bucket/run"),
):
    try:
        wrong()
    except ImportError as error:
        print(error)
""")
        .splitlines()
    )
    for line, (user, package, extra) in zip(
        said,
        [
            ("data.tokenizer=bpe", "tokenizers", "data"),
            ("data.corpus=hub", "datasets", "data"),
            ("a figure", "vl_convert", "report"),
            ("the address gs://bucket/run", "gcsfs", "gcs"),
        ],
        strict=True,
    ):
        assert re.fullmatch(MESSAGE.format(user, package, extra), line), line


def test_the_first_block_of_the_readme_runs_with_the_base(environment) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    call = """
import jax, jax.numpy as jnp
x = jnp.ones((1, 4, 64))
print(attention.init_with_output(jax.random.key(0), x)[0].shape)
"""
    assert environment().python(blocks[0] + call) == "(1, 4, 64)\n"


def test_import_alibi_loads_nothing_else(environment) -> None:
    loaded = environment().python(
        "import sys; before = {*sys.modules}; import alibi\n"
        "print(*{name.partition('.')[0] for name in {*sys.modules} - before})"
    )
    assert not {"jax", "flax", "numpy"} & {*loaded.split()}


@pytest.mark.parametrize("package", ["torch", "gcsfs"])
def test_in_a_clone_the_remedy_is_its_set_up_script(monkeypatch, package) -> None:
    def absent(name: str) -> str:
        raise extras.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras.importlib.metadata, "version", absent)
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    extra = {"torch": "torch", "gcsfs": "gcs"}[package]
    with pytest.raises(
        extras.MissingPackageError, match=rf"bash scripts/setup\.sh --extra={extra}$"
    ):
        extras.needs("this", package)
