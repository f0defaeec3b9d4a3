"""The shared flags, exit codes and messages of all entry points."""

import contextlib
import functools
import importlib.util
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest
from absl import flags

from alibi.cli import command_line, evaluation_flags
from alibi.config import Config
from alibi.config.override import Override
from alibi.errors import ERROR_FILE, REQUEUE, SIGNALS, masked, print_error
from alibi.runs import RunDirectory, make_provenance
from alibi.training import loop
from tests.hosts import run_python

ROOT = pathlib.Path(__file__).resolve().parents[1]
QUICKSTART = f"--config={ROOT / 'configs' / 'quickstart.py'}"


@pytest.fixture
def execute(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command with the flags --config, --place and --places, those of hosts and those of
    evaluations.
    """
    values = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", values)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for kind in ("bool", "string", "integer", "float", "list"):
        define = functools.partial(getattr(flags, f"DEFINE_{kind}"), flag_values=values)
        monkeypatch.setattr(flags, f"DEFINE_{kind}", define)
    command_line.define_config_flag()
    command_line.define_host_flags()
    evaluation_flags.define_lengths("1")
    evaluation_flags.define_model()
    flags.DEFINE_string("place", None, "")
    flags.DEFINE_list("places", None, "")
    for name in ("place", "places", "output_dir"):
        values.register_key_flag_for_module("train.py", values[name])

    def run(*words: str, main: Callable[[], Any] = lambda: 0, **options: Any) -> int:
        return command_line.execute(main, ["train.py", *words], **options)

    return run


def config_of(execute: Callable[..., int], *words: str) -> Config:
    assert execute(*words) == 0
    return flags.FLAGS["config"].value


def test_compilations_are_kept_beside_the_token_files(
    execute, monkeypatch, tmp_path: pathlib.Path
) -> None:
    set_to: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    monkeypatch.setenv("ALIBI_CACHE", str(tmp_path))
    execute()
    assert not set_to, "the user's own JAX_COMPILATION_CACHE_DIR stays"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    execute()
    assert set_to["jax_compilation_cache_dir"] == str(tmp_path / "compilations")
    assert set_to["jax_persistent_cache_min_compile_time_secs"] == 0.0, "small ones too"


def test_a_flag_file_holds_keys_of_the_config_too(execute, tmp_path: pathlib.Path) -> None:
    # ml_collections' own flags lose them (google/ml_collections#20)
    file = tmp_path / "flags.txt"
    file.write_text("--config.train.steps=7\n--place=here\n")
    config = config_of(
        execute, QUICKSTART, f"--flagfile={file}", "--config.optimizer.warmup_steps=2"
    )
    assert (config.train.steps, config.optimizer.warmup_steps, flags.FLAGS["place"].value) == (
        7,
        2,
        "here",
    )


def test_keys_are_set_by_flags_as_behind_the_colon(execute) -> None:
    file = f"--config={ROOT / 'configs' / 'books_tables.py'}"
    words = [
        "--config.train_length=96",
        "--config.train.steps=50",
        "--config.log.tensorboard=false",
    ]
    config = config_of(execute, f"{file}:position=my.package.file:Method", *words)
    assert config.position == "my.package.file:Method"
    assert not config.log.tensorboard
    derived = (
        config.train.batch_tokens,
        config.optimizer.warmup_steps,
        config.optimizer.period_steps,
    )
    assert derived == (960, 5, 45), (
        "whole sequences of the length, and a schedule that ends with the run"
    )
    assert config == config_of(execute, *words, "--config.position", "my.package.file:Method", file)
    assert not config_of(execute, file, "--noconfig.log.tensorboard").log.tensorboard
    assert config_of(execute, file, "--config.model.remat", "--config.seed=1").model.remat
    assert config_of(execute, file, "--config.model.cutoffs=20:60").model.cutoffs == (20, 60)


def test_fewer_updates_than_the_files_warm_up_shorten_it(execute, capsys) -> None:
    for words in ([f"{QUICKSTART}:train.steps=20"], [QUICKSTART, "--config.train.steps=20"]):
        assert config_of(execute, *words).optimizer.warmup_steps == 2
        told = "optimizer.warmup_steps is 2 in place of 50, to fit train.steps=20\n"
        assert capsys.readouterr().err == told
    given = config_of(execute, f"{QUICKSTART}:train.steps=20,optimizer.warmup_steps=30")
    assert given.optimizer.warmup_steps == 30, "a contradiction of the user's is not mended"
    assert config_of(execute, f"{QUICKSTART}:train.steps=60").optimizer.warmup_steps == 50
    assert capsys.readouterr().err == ""


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
def test_options_of_a_position_method(execute, text: str, value: object) -> None:
    """No config file lists them; a value with a comma can't stand behind the colon."""
    assert config_of(
        execute, QUICKSTART, f"--config.position_options.some={text}"
    ).position_options == {"some": value}
    if "," not in text:
        config = config_of(execute, f"{QUICKSTART}:seed=1,position_options.some={text}")
        assert config.position_options == {"some": value}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--place=gs://bucket/x"],
            "--place is the address gs://bucket/x, where a path of this machine is needed",
        ),
        (["--places=/tmp,s3://bucket/x"], "--places is the address s3://bucket/x"),
        # as path libraries write it
        (["--place=gs:/bucket/x"], "--place is the address gs:/bucket/x"),
        (
            [QUICKSTART, "--config.data.tokenizer_file=gs://bucket/x"],
            "data.tokenizer_file is the address",
        ),
        ([QUICKSTART, "--config.data.train=s3://bucket/x"], "data.train is the address"),
        (["--output_dir="], "--output_dir is empty"),
    ],
)
def test_a_place_that_is_none(execute, capsys, words: list[str], message: str) -> None:
    assert execute(*words) == 1
    assert message in capsys.readouterr().err
    if "--place" in words[0]:
        assert execute(*words, addresses=("place", "places")) == 0


def test_words_without_a_flag_are_named(execute, capsys) -> None:
    """Flags behind them are not parsed, so --config seems to be missing."""
    assert execute("quick", QUICKSTART, required=("config",)) == 1
    assert "unknown arguments: quick" in capsys.readouterr().err


def test_a_cache_at_an_address_is_refused(execute, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ALIBI_CACHE", "gs://bucket/cache")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    assert execute() == 1
    assert "$ALIBI_CACHE is the address gs://bucket/cache" in capsys.readouterr().err


def test_one_process_imports_all_commands(monkeypatch, capsys, tmp_path: pathlib.Path) -> None:
    """Flags of one name differ in type and default: --prompts counts keys, or names a file."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    commands, before = {}, {*flags.FLAGS}
    for file in sorted(
        [*ROOT.glob("alibi/cli/*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("tools/*.py")]
    ):
        if "command_line.run(" in file.read_text():
            spec = importlib.util.spec_from_file_location(f"command_{file.stem}", file)
            commands[file.stem] = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, spec.name, commands[file.stem])
            spec.loader.exec_module(commands[file.stem])
    assert len(commands) > 15
    assert {*flags.FLAGS} == before, "a command's flags are its own"

    def run(name: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        return command_line.execute(commands[name].main, sys.argv), *capsys.readouterr()

    code, printed, _ = run("train", f"{QUICKSTART}:seed=3", "--print_config")
    assert (code, "config.seed = 3" in printed) == (0, True)
    words = ("--workdirs=a", f"--output_dir={tmp_path}", "--evaluators=passkey")
    _, _, told = run("eval_extrapolation", *words, "--prompts=some.jsonl")
    assert "option prompts='some.jsonl' of evaluator 'passkey' must be of type int" in told
    _, _, told = run("generate", f"--workdir={tmp_path}", f"--prompts={tmp_path}/some.jsonl")
    assert f"{tmp_path} is no work directory of a run" in told
    code, _, told = run("train", QUICKSTART)
    assert (code, "give --workdir" in told) == (1, True), "no value is left of the former start"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at http://user:word@host:80/x doesn't", "at http://***@host:80/x doesn't"),
        ("at http://user:wo/rd@host/x", "at http://***@host/x"),
        ("gs:/token@bucket/x", "gs:/***@bucket/x"),  # as path libraries write it
        (
            "--place=s3://b/x?X-Amz-Credential=a/b&part=1",
            "--place=s3://b/x?X-Amz-Credential=***&part=1",
        ),
        ("'https://h/?access_token=abc', 401", "'https://h/?access_token=***', 401"),
        (f"--model=hf_{'aB3' * 11}", "--model=hf_***"),
        # no secrets
        *[
            (text, text)
            for text in (
                *("gs://bucket/a@b/?seed=1", "http://h:80/a@b", "m@h.org: //"),
                "HF_HUB_OFFLINE_OF_THE_PROCESS",
            )
        ],
    ],
)
def test_secrets_in_addresses_are_masked(
    text: str, shown: str, monkeypatch, capsys, tmp_path: pathlib.Path
) -> None:
    assert masked(text) == shown
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error"))
    print_error(text)
    assert capsys.readouterr().err == f"error: {shown}\n"
    assert (tmp_path / "error").read_text() == shown
    monkeypatch.setattr(sys, "argv", ["train.py", text])
    assert make_provenance()["command"] == ["train.py", shown]
    run = RunDirectory(tmp_path)
    with contextlib.suppress(RuntimeError), loop.failure_recorded(run, 5):
        raise RuntimeError(text)
    assert run.status()["reason"] == f"RuntimeError: {shown}"
    assert (tmp_path / "error.txt").read_text().endswith(f"RuntimeError: {shown}\n")


TELLING = """
import logging, sys, warnings
from alibi.cli import command_line

def main(address):
    logging.getLogger("some.library").warning("asks %s", address)
    warnings.warn(address)
    print(address)
    raise RuntimeError(address)

command_line.run(main, takes="an address")
"""


def test_all_that_a_command_says_is_masked() -> None:
    """Lines of libraries' logs, warnings and tracebacks; its answers on stdout stay as they are."""
    done = run_python("-c", TELLING, "http://user:PASS1@host/x", code=1)
    assert done.stdout == "http://user:PASS1@host/x\n"
    assert done.stderr.count("http://***@host/x") == 3
    assert "PASS1" not in done.stderr


def test_flags_that_entry_points_share_belong_to_the_entry_point() -> None:
    """Else --help, which shows the flags of the program's own module, would leave them out."""
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
        # the first process too
        (["--coordinator_address=a:1", "--num_processes=2", "--process_id=0"],) * 2,
    ],
)
def test_flags_of_hosts_are_given_on(execute, words: list[str], given_on: list[str]) -> None:
    execute(*words)
    assert command_line.host_flags() == given_on


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("slopes=[0.5,0.25],draw=3", {"slopes": (0.5, 0.25), "draw": 3}),
        ("slopes=(0.5, 0.25)", {"slopes": (0.5, 0.25)}),
        ("slopes=0.5:0.25, alibi_bias_max=8", {"slopes": (0.5, 0.25), "alibi_bias_max": 8}),
        (
            "method=fire,method_options=('threshold',7)",
            {"method": "fire", "method_options": ("threshold", 7)},
        ),
    ],
)
def test_options_of_a_test_are_written_as_options_of_training(
    execute, text: str, options: dict[str, Any]
) -> None:
    """A comma within a list separates no options."""
    execute(f"--position_options={text}", "--workdirs=run", "--output_dir=out")
    assert dict(evaluation_flags.model_options()["override"].options) == options


def test_lists_of_a_test_are_written_as_lists_of_training(execute) -> None:
    words = "--position=none,alibi", "--window=4,0", "--logit_scale=,ssmax"
    execute(*words, "--workdirs=run", "--output_dir=out")
    expected = Override("none,alibi", window=(4, 0), logit_scale=("", "ssmax"))
    assert evaluation_flags.model_options()["override"] == expected


def test_a_work_directory_with_commas_in_its_name_is_one(execute, tmp_path, monkeypatch) -> None:
    """Hydra names folders by overrides: lr=1,wd=2. Quotation marks and spaces belong to a name, too."""
    for name in ("a", "lr=1,wd=2", "b", '"q"', " s "):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    execute('--workdirs=a,lr=1,wd=2, b,"q", s ,gs://bucket/c', "--output_dir=out")
    evaluation_flags.length_options()
    assert flags.FLAGS["workdirs"].value == ["a", "lr=1,wd=2", "b", '"q"', " s ", "gs://bucket/c"]


@pytest.mark.parametrize("number", SIGNALS)
def test_any_signal_stops_a_command_that_goes_on(execute, capsys, number: int) -> None:
    before = {one: signal.getsignal(one) for one in SIGNALS}
    try:
        code = execute(main=lambda: os.kill(os.getpid(), number), resumes="rows are kept")
        assert (code, capsys.readouterr().err) == (REQUEUE, "stopped; rows are kept\n")
        os.kill(os.getpid(), number)  # as launchers send it again: the process is about to end
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_ctrl_c_to_a_command_that_does_not_go_on(execute, capsys) -> None:
    # shells have their background jobs ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = execute(main=lambda: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, capsys.readouterr().err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    "words", [["--margin=0.02"], ["--reference=alibi"], ["--reference=a", "--margin=0"]]
)
def test_a_reference_needs_a_margin(execute, capfd, words: list[str]) -> None:
    given = ["--workdirs=x", "--output_dir=y", *words]
    assert execute(*given, main=evaluation_flags.length_options) == 1
    assert "give both, the margin above 0, or neither" in capfd.readouterr().err
