"""The wheel with the packages of its base alone, and with those of an extra."""

import importlib.metadata
import json
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from alibi import extras
from tests.package.conftest import ROOT
from tests.refusals import assert_refused

# Imports every module of the library, and prints the message of each that lacks a package. A
# command would end the process with it.
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
        paths = getattr(module, "__path__", []) if name != "alibi.cli" else []
        left += [f"{name}.{one.name}" for one in pkgutil.iter_modules(paths)]
print(json.dumps(found))
"""
CONFIG = """
from alibi.config import base

def get_config(arg=""):
    config = base.get_config()
    config.optimizer.warmup_steps = 1
    return base.apply(config, arg)
"""
LIBRARY = {
    "attention",
    "config",
    "linen",
    "model",
    "nnx",
    "numerics",
    "positions",
    "slopes",
    "testing",
}
MESSAGE = r'{} needs the package {}, which is not installed: pip install "alibi-jax\[{}\]"'


@pytest.mark.parametrize("extra", ["train", "data", "report"])
def test_the_names_of_imports_are_those_of_the_extra(extra: str) -> None:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_imports = importlib.metadata.packages_distributions()
    found = {canonicalize_name(of_imports[name][0]) for name in extras.EXTRAS[extra]}
    assert found == {canonicalize_name(Requirement(line).name) for line in lines[extra]}


def test_the_base_has_the_library_and_names_the_extra_of_the_rest(environment) -> None:
    found = json.loads(environment().python(WALK))
    whole = {name for name, message in found.items() if not message}
    assert whole >= {"alibi", *(f"alibi.{room}" for room in LIBRARY)}
    assert {"alibi.training", "alibi.evaluation", "alibi.data"} <= found.keys() - whole
    for name in found.keys() - whole:
        assert name.split(".")[1] not in LIBRARY, name
        assert re.fullmatch(MESSAGE.format(r"alibi\.\w+", r"\w+", "train"), found[name])


def test_with_train_all_modules_import_and_the_rest_names_its_extra(environment) -> None:
    assert not any(json.loads(environment("train").python(WALK)).values())
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


def test_the_examples_with_flax_run_with_the_base(environment) -> None:
    """Those of the pages, with Linen and with NNX; the README's only makes a layer."""
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/five-minutes.md")]
    blocks = [re.findall(r"```python\n(.*?)```", page, re.DOTALL) for page in pages]
    call = """
import jax, jax.numpy as jnp
print(attention.init_with_output(jax.random.key(0), jnp.ones((1, 4, 64)))[0].shape)
"""
    with_flax = [block for block in blocks[1] if "alibi_attention_fn" in block and "flax" in block]
    assert len(with_flax) == 2
    assert environment().python("\n".join([blocks[0][0], call, *with_flax])) == "(1, 4, 64)\n"


def test_import_alibi_loads_nothing_else(environment) -> None:
    loaded = environment().python(
        "import sys; before = {*sys.modules}; import alibi\n"
        "print(*{name.partition('.')[0] for name in {*sys.modules} - before})"
    )
    assert not {"jax", "flax", "numpy"} & {*loaded.split()}


def test_the_commands_name_the_extra_that_they_need(environment) -> None:
    for command in ("alibi-train", "alibi-eval", "alibi-sweep", "alibi-generate"):
        ended = environment().run(command, "--help", code=1)
        assert ended.stdout == ""
        needed = MESSAGE.format(command, r"\w+", "train")
        assert re.fullmatch(f"error: {needed}\n", ended.stderr), ended.stderr


def test_the_commands_run_where_there_is_no_clone(environment) -> None:
    """A config file by its path; and each step of a sweep is a module of the package."""
    installed = environment("train")
    (installed.folder / "mine.py").write_text(CONFIG)
    words = ("--config=mine.py:position=t5", "--config.train.steps=3", "--print_config")
    assert "config.position = 't5'" in installed.run("alibi-train", *words).stdout
    code = """
from alibi.sweeps.processes import _program
print(*_program('eval_extrapolation.py'))
import runpy
runpy.run_module(_program('eval_extrapolation.py')[1], run_name='__main__')
"""
    ended = installed.run("python", "-c", code, code=1)
    assert ended.stdout == "-m alibi.cli.eval_extrapolation\n"
    assert ended.stderr.startswith("error: give --workdirs")


@pytest.mark.parametrize("package", ["torch", "gcsfs"])
def test_in_a_clone_the_remedy_is_its_set_up_script(monkeypatch, package) -> None:
    def absent(name: str) -> str:
        raise extras.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras.importlib.metadata, "version", absent)
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    extra = {"torch": "torch", "gcsfs": "gcs"}[package]
    assert_refused(
        rf"bash scripts/setup\.sh --extra={extra}$",
        extras.needs,
        "this",
        package,
        raised=extras.MissingPackageError,
    )
