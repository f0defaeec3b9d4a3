"""Configs that training refuses before it reads its text: a cluster's user learns it at once."""

import dataclasses
import re

import pytest

from alibi.config import DataConfig
from alibi.config.files import load_config
from alibi.data.tokenfile import TokenFile
from alibi.data.tokens import prepare
from alibi.training import setup
from alibi.training.setup import check_trainable, prepare_files, shared_text
from tests.refusals import assert_refused


@pytest.mark.parametrize(
    ("keys", "devices", "message"),
    [
        ("mesh.tensor=3", 16, "mesh.data=-1, mesh.fsdp=1, mesh.tensor=3 do not fit 16 devices"),
        (
            "mesh.tensor=3,mesh.data=5",
            None,
            "mesh.tensor=3 splits the heads and does not divide model.num_heads=4",
        ),
        ("mesh.data=3", None, "train.batch_tokens=2048 must be a multiple of 384"),
        ("", 64, "train.batch_tokens=2048 must be a multiple of 8192"),
        ("position=bogus", None, "'bogus'"),
        ("optimizer.name=bogus", None, "'bogus'"),
        ("data.train=gs://b/text", None, "gs://b/text"),
        (
            "position=tests.test_testing:LooksAhead",
            None,
            "not causal: in a sequence of 12 tokens, token 10 depends",
        ),
        ("position=tests.test_testing:NotFinite", None, "its bias is nan in head 1 at distance 0"),
    ],
)
def test_what_training_would_refuse(keys: str, devices: int | None, message: str) -> None:
    assert_refused(
        re.escape(message),
        lambda: check_trainable(load_config(f"configs/quickstart.py:{keys}"), devices),
    )


@pytest.mark.parametrize(
    ("keys", "devices"),
    [
        ("", None),
        ("", 16),
        ("mesh.tensor=4,mesh.data=-1", 64),
        ("length=1,position=tests.test_testing:RunningSum", None),
    ],
)
def test_what_can_be_trained(keys: str, devices: int | None) -> None:
    check_trainable(load_config(f"configs/quickstart.py:{keys}"), devices)


def test_a_method_of_many_runs_is_looked_at_once(monkeypatch) -> None:
    looked: list[object] = []
    monkeypatch.setattr(setup, "check_few_tokens", looked.append)
    for keys in ("seed=1", "seed=2", "model.num_layers=1"):
        keys += ",length=96,train.batch_tokens=192,position=tests.test_testing:RunningSum"
        check_trainable(load_config(f"configs/quickstart.py:{keys}"))
    assert len(looked) == 1


def test_a_validation_text_within_the_train_text_is_told(tmp_path, capsys) -> None:
    for name, content in {"a": "one two\n", "b": "three\n", "c": "four\n"}.items():
        (tmp_path / f"{name}.txt").write_text(content * 9)
    at = {name: str(tmp_path / f"{name}.txt") for name in "abc"}
    told = {}
    for valid in (at["a"], f"{at['b']},{at['c']}", at["c"]):
        data = {"train": f"{at['a']},{at['b']}", "valid": valid, "cache_dir": str(tmp_path)}
        prepare_files(DataConfig(corpus="text", **data))
        told[valid] = capsys.readouterr().err
    assert "all of data.valid is in data.train too" in told[at["a"]]
    assert "1 of 2 files of data.valid is in data.train too" in told[f"{at['b']},{at['c']}"]
    assert "too: the validation" not in told[at["c"]]


@pytest.mark.parametrize(
    ("train", "valid", "shared"),
    [
        ("train", "train[:5%]", "all"),
        ("train", "train", "all"),
        ("train[5%:]", "train[:5%]", ""),
        ("train", "validation[:5%]", ""),
    ],
)
def test_a_slice_of_the_train_split_is_within_the_train_text(
    train, valid, shared, tmp_path
) -> None:
    """Also where limits cut both texts, whose hashes then differ."""
    made = prepare(DataConfig(max_train_bytes=99, cache_dir=str(tmp_path)), "train", progress=False)

    def named(split: str, text: str) -> TokenFile:
        about = {"corpus": "hub", "name": "wikitext", "split": split}
        manifest = dataclasses.replace(made.manifest, description=about, sha256=text)
        return dataclasses.replace(made, manifest=manifest)

    assert shared_text(named(train, "its beginning"), named(valid, "another")) == shared
