"""Damaged files of work directories, and commit and processor in the provenance."""

import dataclasses
import importlib
import pathlib
import platform
import re
import sys

import pytest

from alibi.config import make_config
from alibi.data.tokenizers import ByteTokenizer
from alibi.runs import RunDirectory, git_commit, method_files, processor
from alibi.runs.code import own_files
from tests.refusals import assert_refused


def test_a_hugging_face_folder_is_told_with_the_command_that_imports_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 768}')
    assert_refused(
        r"import_hf\.py --model=.* --workdir=DIR", lambda: RunDirectory(tmp_path).config()
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[1]", "config.json is damaged (it was altered"),
        ("config.json", "{}", "config.json is damaged (it was altered"),
        ("status.json", '{"state": ', "status.json is damaged (Expecting value"),
        ("provenance.json", "{}", "provenance.json is damaged (it was altered"),
        (
            "tokenizer/tokenizer_config.json",
            "{}",
            "tokenizer holds no saved tokenizer, or a damaged one (",
        ),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, tiny_config, name, content, message):
    run = RunDirectory(tmp_path / "run")
    run.check(tiny_config())
    run.claim(tiny_config(), ByteTokenizer())
    run.release()
    (run.path / name).write_text(content)
    readers = {
        "config.json": run.config,
        "status.json": run.status,
        "provenance.json": lambda: run.check_same(
            {"train": {"sha256": "a", "tokenizer_fingerprint": "b"}}, {}
        ),
        "tokenizer/tokenizer_config.json": run.tokenizer,
    }
    remedy = "copy it from a run of the same text|train the run again elsewhere"
    assert f"{run.path}/{message}" in assert_refused(rf"; restore .*, or ({remedy})", readers[name])


def test_a_config_with_keys_that_this_version_lacks_is_not_called_damaged(tmp_path, tiny_config):
    run = RunDirectory(tmp_path / "run")
    run.claim(tiny_config(), ByteTokenizer())
    content = dataclasses.asdict(tiny_config())
    content["model"]["new_key"] = 1
    run.write("config.json", content)
    run.release()
    assert_refused(r"newer version .* model\.new_key", run.config)


def test_a_folder_of_the_user_is_no_tokenizer_and_stays(tmp_path, tiny_config):
    run = RunDirectory(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.json").write_text("of the user")
    assert_refused("no saved tokenizer", run.claim, tiny_config(), ByteTokenizer())
    assert (tmp_path / "tokenizer" / "vocab.json").read_text() == "of the user"


def test_the_commit_of_an_image_comes_from_the_environment(tmp_path, monkeypatch):
    """An image has neither git nor the history; with git, the environment does not count."""
    monkeypatch.setenv("PATH", str(tmp_path))
    commit = git_commit.__wrapped__  # without its cache
    assert commit() == "unknown"
    monkeypatch.setenv("ALIBI_COMMIT", "")  # ENV of an ARG that was not given
    assert commit() == "unknown"
    monkeypatch.setenv("ALIBI_COMMIT", "1234abcd")
    assert commit() == "1234abcd"
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\n[ $1 = status ] || echo 5678\n")
    git.chmod(0o700)
    assert commit() == "5678"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel\t\t: 1\nmodel name\t: AMD EPYC 7B13\n" * 2, "AMD EPYC 7B13"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", "aarch64"),
        (None, "aarch64"),
    ],
    ids=["x86", "ARM tells numbers only", "no Linux"],
)
def test_the_processor_has_its_model_name_or_its_architecture(cpuinfo, name, monkeypatch):
    def read_text(path):
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo

    monkeypatch.setattr(pathlib.Path, "read_text", read_text)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert processor.__wrapped__() == name


def test_own_files_are_hashed_and_no_others(tmp_path, monkeypatch):
    """A user's module, such as a position method. Not numpy or alibi."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_own_method.py").write_text("SLOPE = 1")
    importlib.import_module("my_own_method")
    before = own_files()
    assert not [name for name in before if re.match(r"own file (alibi|numpy|jax|json)\b", name)]
    (tmp_path / "my_own_method.py").write_text("SLOPE = 2")
    changed = {name for name, digest in own_files().items() if before[name] != digest}
    monkeypatch.delitem(sys.modules, "my_own_method")
    assert changed == {"own file my_own_method"}


METHOD = """
import dataclasses, importlib, pathlib
from alibi.positions.alibi import Alibi
from . import FACTOR
try:
    from .within_try import TRIED
except ImportError:
    TRIED = 1
# itself, files elsewhere, and no module
NAMED = "method.py", "/proc/uptime", "../unused.txt", "mypackage.unused"


@dataclasses.dataclass(frozen=True)
class Mine(Alibi):
    def bias(self, params):
        from mypackage.lazy import lazy
        importlib.import_module(f"{__package__}.by_string")
        pathlib.Path(__file__).with_name("table.txt").read_text()
        return super().bias(params)
"""


@pytest.mark.parametrize("folder", ["", "site-packages"])  # of the user's own, or installed
def test_the_files_of_a_method_are_those_that_it_may_load(tmp_path, monkeypatch, folder):
    """In a try, in a function, by a string, transitively, and a file that is read."""
    monkeypatch.syspath_prepend(tmp_path / folder)
    package = tmp_path / folder / "mypackage"
    package.mkdir(parents=True)
    files = {
        "__init__.py": "FACTOR = 1",
        "method.py": METHOD,
        "within_try.py": "TRIED = 2\nfrom .transitive import *",
        "transitive.py": "import json, numpy",
        "lazy.py": "import mypackage.method\nlazy = 1",
        "by_string.py": "",
        "table.txt": "0.5",
        "unused.py": "",
        "unused.txt": "",
    }
    for name, content in files.items():
        (package / name).write_text(content)
    try:
        before = method_files(make_config(position="mypackage.method:Mine,alibi"))
        names = [
            f"own file mypackage.{name}" if name else "own file mypackage"
            for name in ("", "by_string", "lazy", "method", "transitive", "within_try")
        ]
        assert sorted(before) == sorted([*names, "own file mypackage.method's table.txt"])
        assert "mypackage.lazy" not in sys.modules, "only what importing loads is loaded"
        for name, content in files.items():
            (package / name).write_text(content + "\n")
            assert (method_files(make_config(position="mypackage.method:Mine")) != before) == (
                "unused" not in name
            )
            (package / name).write_text(content)
        assert method_files(make_config(position="alibi,rotary")) == {}
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mypackage"]:
            del sys.modules[name]
