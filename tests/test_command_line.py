"""What every entry point does with its flags."""

import pathlib

import jax
import pytest

from alibi.command_line import _behind_the_colon, _keep_compilations


def test_compilations_are_kept_beside_the_token_files(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    set_to = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    monkeypatch.setenv("ALIBI_CACHE", str(tmp_path))
    _keep_compilations()
    assert not set_to, "the user's own JAX_COMPILATION_CACHE_DIR stays"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    _keep_compilations()
    assert set_to["jax_compilation_cache_dir"] == str(tmp_path / "compilations")


def test_keys_that_a_config_file_must_know_go_behind_the_colon():
    """It lists no options of position methods, and may derive the batch from the training length."""
    argv = [
        "train.py",
        "--config=c.py",
        "--config.seed=1",
        "--config.position_options.slopes=closed_form",
        "--workdir=w",
    ]
    moved = ["train.py", "--config=c.py:position_options.slopes=closed_form", "--config.seed=1", "--workdir=w"]
    assert _behind_the_colon(argv) == moved
    joined = _behind_the_colon(["--config=c.py:position=t5", "--config.position_options.num_buckets=8"])
    assert joined == ["--config=c.py:position=t5,position_options.num_buckets=8"]
    assert _behind_the_colon(moved) == moved
    assert _behind_the_colon(["--config=c.py", "--config.train_length=9"]) == ["--config=c.py:train_length=9"]
    assert _behind_the_colon(["--config=c.py", "--config.train.steps=9"]) == ["--config=c.py:train.steps=9"]
