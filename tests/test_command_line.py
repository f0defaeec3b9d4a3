"""What every entry point does with its flags."""

import functools
import os
import pathlib
import signal
import sys

import jax
import pytest
from absl import flags

from alibi.cli import command_line, evaluation_flags
from alibi.cli.command_line import _keep_compilations, _parse
from alibi.config import Config, flatten
from alibi.errors import REQUEUE, SIGNALS

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


def parsed(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> Config:
    """The config that a command line of `words` gives."""
    values = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", values)
    command_line.define_config_flag()
    assert _parse(["train.py", *words]) == ["train.py"]
    return values["config"].value


def test_keys_are_set_by_flags_as_behind_the_colon(monkeypatch: pytest.MonkeyPatch) -> None:
    file = f"--config={ROOT / 'configs' / 'books_tables.py'}"
    words = ["--config.train_length=96", "--config.train.steps=50", "--config.log.tensorboard=false"]
    config = parsed(monkeypatch, [f"{file}:position=my.package.file:Method", *words])
    assert config.position == "my.package.file:Method"
    assert not config.log.tensorboard
    derived = (config.train.batch_tokens, config.optimizer.warmup_steps, config.optimizer.period_steps)
    assert derived == (960, 5, 45), "whole sequences of the length, and a schedule that ends with the run"
    assert flatten(config) == flatten(
        parsed(monkeypatch, [*words, "--config.position", "my.package.file:Method", file])
    )
    assert not parsed(monkeypatch, [file, "--noconfig.log.tensorboard"]).log.tensorboard
    assert parsed(monkeypatch, [file, "--config.model.remat", "--config.seed=1"]).model.remat
    assert parsed(monkeypatch, [file, "--config.model.cutoffs=20:60"]).model.cutoffs == (20, 60)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("None", None),
        ("closed_form", "closed_form"),
        ("0.5:0.25", (0.5, 0.25)),
        ("[0.5,0.25]", (0.5, 0.25)),
        ("(1, 2)", (1, 2)),
        ("pkg.mod:Cls", "pkg.mod:Cls"),
    ],
)
def test_options_of_a_position_method(monkeypatch: pytest.MonkeyPatch, text: str, value: object) -> None:
    """No config file lists them; what holds a comma can't stand behind the colon."""
    file = f"--config={ROOT / 'configs' / 'quickstart.py'}"
    ways = [[file, f"--config.position_options.some={text}"]]
    ways += [[f"{file}:seed=1,position_options.some={text}"]] if "," not in text else []
    for words in ways:
        assert parsed(monkeypatch, words).position_options == {"some": value}


def test_an_unknown_key_is_named_with_the_nearest(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    file = f"--config={ROOT / 'configs' / 'quickstart.py'}"
    with pytest.raises(SystemExit):
        parsed(monkeypatch, [file, "--config.model.widht=64"])
    assert capsys.readouterr().err.startswith("error: unknown config key 'model.widht'; did you mean 'model.width'?")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--place=gs://bucket/x"], "--place is the address gs://bucket/x, where a path of this machine is needed"),
        (["--places=/tmp,s3://bucket/x"], "--places is the address s3://bucket/x"),
        (["--place=gs:/bucket/x"], "--place is the address gs:/bucket/x"),  # as path libraries write it
        (["--config.data.tokenizer_file=gs://bucket/x"], "data.tokenizer_file is the address gs://bucket/x"),
        (["--config.data.train=s3://bucket/x"], "data.train is the address"),
    ],
)
def test_an_address_is_refused_where_a_path_is_needed(monkeypatch, capsys, words: list[str], said: str) -> None:
    values = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", values)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    command_line.define_config_flag()
    flags.DEFINE_string("place", None, "", flag_values=values, module_name="train.py")
    flags.DEFINE_list("places", None, "", flag_values=values, module_name="train.py")
    for flag in ("place", "places"):
        values.register_key_flag_for_module("train.py", values[flag])
    _parse(["train.py", "--config=configs/quickstart.py", *words])
    assert command_line._guarded(lambda: 0, ["train.py"], (), "") == 1
    assert said in capsys.readouterr().err
    if "--place" in words[0]:
        assert command_line._guarded(lambda: 0, ["train.py"], ("place", "places"), "") == 0


def test_a_cache_at_an_address_is_refused(monkeypatch, capsys) -> None:
    monkeypatch.setenv("ALIBI_CACHE", "gs://bucket/cache")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    assert command_line._guarded(lambda: 0, ["train.py"], (), "") == 1
    assert "$ALIBI_CACHE is the address gs://bucket/cache" in capsys.readouterr().err


def test_flags_that_entry_points_share_belong_to_whoever_asks_for_them() -> None:
    """Else they would be those of alibi/cli/command_line.py, and --help shows the flags of the program's own module."""
    command_line.define_host_flags()
    command_line.define_jobs_flag()
    names = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(__name__)}
    assert names == {"multihost", "coordinator_address", "num_processes", "process_id", "jobs"}
    flags.FLAGS.remove_flag_values(names)


@pytest.mark.parametrize(
    ("words", "given_on"),
    [
        ([], []),
        (["--multihost"], ["--multihost=True"]),
        (["--nomultihost"], []),
        (["--coordinator_address=a:1", "--num_processes=2", "--process_id=0"],) * 2,  # the first process too
    ],
)
def test_flags_of_hosts_are_given_on(monkeypatch: pytest.MonkeyPatch, words: list[str], given_on: list[str]) -> None:
    values = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", values)
    for define in ("DEFINE_bool", "DEFINE_string", "DEFINE_integer"):
        monkeypatch.setattr(flags, define, functools.partial(getattr(flags, define), flag_values=values))
    command_line.define_host_flags()
    values(["sweep.py", *words])
    assert command_line.host_flags() == given_on


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("slopes=[0.5,0.25],draw=3", {"slopes": (0.5, 0.25), "draw": 3}),
        ("slopes=(0.5, 0.25)", {"slopes": (0.5, 0.25)}),
        ("slopes=0.5:0.25, alibi_bias_max=8", {"slopes": (0.5, 0.25), "alibi_bias_max": 8}),
        ("method=fire,method_options=('threshold',7)", {"method": "fire", "method_options": ("threshold", 7)}),
    ],
)
def test_options_that_runs_are_tested_with_are_written_as_those_of_training(monkeypatch, text, options) -> None:
    """A comma within a list separates no options."""
    values = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", values)
    for define in ("DEFINE_bool", "DEFINE_string", "DEFINE_integer", "DEFINE_list"):
        monkeypatch.setattr(flags, define, functools.partial(getattr(flags, define), flag_values=values))
    evaluation_flags.define("1")
    values(["eval_extrapolation.py", f"--position_options={text}"])
    assert dict(evaluation_flags._override().options) == options


@pytest.mark.parametrize("number", SIGNALS)
def test_any_signal_stops_a_command_that_goes_on_with_one_line(capsys, number: int) -> None:
    before = {one: signal.getsignal(one) for one in SIGNALS}
    try:
        code = command_line._guarded(lambda: os.kill(os.getpid(), number), ["x.py"], (), "rows are kept")
        assert (code, capsys.readouterr().err) == (REQUEUE, "stopped; rows are kept\n")
        os.kill(os.getpid(), number)  # as launchers send it again: the process is about to end
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_ctrl_c_to_a_command_that_has_nothing_to_go_on_from(capsys) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have their background jobs ignore it
    try:
        code = command_line._guarded(lambda: os.kill(os.getpid(), signal.SIGINT), ["x.py"], (), "")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, capsys.readouterr().err) == (130, "interrupted\n")
