"""What every entry point does with its flags."""

import pathlib

import jax
import pytest
from absl import flags

from alibi import command_line
from alibi.command_line import _behind_the_colon, _check_config_file, _keep_compilations

ROOT = pathlib.Path(__file__).resolve().parents[1]


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


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--config=configs/quickstart", "--config.seed=1"], "configs/quickstart.py"),  # only the ending is missing
        (["--config=configs"], "configs/quickstart.py"),
        (["--config", "wikitext130.py:length=8"], "configs/wikitext103.py"),
        (["-config="], "configs/quickstart.py"),
    ],
)
def test_a_config_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch, words: list[str], meant: str) -> None:
    """Before ml_collections takes it, which raises an error for each key that is set of it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(flags, "FLAGS", ["config"])
    with pytest.raises(ValueError, match=f"there is no config file .*; did you mean {meant}"):
        _check_config_file(["train.py", *words])
    _check_config_file(["train.py", f"--config={meant}:length=8"])


def test_flags_that_entry_points_share_belong_to_whoever_asks_for_them() -> None:
    """Else they would be those of alibi/command_line.py, and --help shows the flags of the program's own module."""
    command_line.define_host_flags()
    command_line.define_jobs_flag()
    names = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(__name__)}
    assert names == {"multihost", "coordinator_address", "num_processes", "process_id", "jobs"}
    flags.FLAGS.remove_flag_values(names)
