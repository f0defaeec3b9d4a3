"""A mistake of the user is a line with the name, the value, the allowed values and the remedy,
before any work.
"""

import math
import pathlib
import re
import sys
from typing import Any

import jax
import pytest
from absl import flags
from etils import epath
from jax._src import xla_bridge

import alibi
from alibi import alibi_bias, alibi_slopes, cli, errors, make_position
from alibi.cli import command_line
from alibi.config import Config, flatten
from alibi.parallel import hosts
from alibi.reporting.rows import read_rows
from alibi.storage.files import drop_rows
from tests.refusals import assert_refused

ROOT = pathlib.Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")


def test_an_untested_jax_is_a_line_and_one_that_lacks_something_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first use of a public name, and at the start of a command."""
    monkeypatch.setattr(alibi, "numerics", alibi.numerics)  # to have it again afterwards

    def import_with(version: str) -> list[str]:
        monkeypatch.setattr(jax, "__version__", version)
        monkeypatch.setattr(jax, "__version_info__", tuple(map(int, version.split("."))))
        monkeypatch.delitem(sys.modules, "alibi.numerics")
        caplog.clear()
        assert alibi.__getattr__("alibi_slopes") is alibi_slopes
        return caplog.messages

    (requirement,) = re.findall(r'"(jax>=.*?)"', (ROOT / "pyproject.toml").read_text())
    for version in ("0.9.2", "0.13.0"):
        (line,) = import_with(version)
        assert f"jax {version} was not tested" in line
        assert f'pip install "{requirement}"' in line
    assert import_with("0.10.0") == import_with("0.12.9") == []
    monkeypatch.delattr(jax, "typeof")
    assert_refused(
        r"^jax\.typeof is missing: jax 0\.12\.9", import_with, "0.12.9", raised=ImportError
    )
    with pytest.raises(SystemExit, match=r"^error: jax\.typeof is missing: "):
        cli.run_train()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Returns a function from the words of a command line to the error line of an entry point."""

    def parse(*words: str, required: tuple[str, ...] = ()) -> str:
        monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
        command_line.define_config_flag()
        for name, says in (
            ("workdir", "directory of the run"),
            ("stride", "tokens that each window scores"),
        ):
            define = flags.DEFINE_string if name == "workdir" else flags.DEFINE_integer
            define(name, None, says, flag_values=flags.FLAGS)
        assert command_line.execute(lambda: 0, ["train.py", *words], required=required) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return parse


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "give --config (a config file such as configs/quickstart.py, as FILE.py[:KEY=VALUE,...]) and --workdir "
            "(directory of the run); --help",
        ),
        (["--steps=3"], "there is no flag --steps; did you mean --config.train.steps?"),
        (["--train.steps=3"], "did you mean --config.train.steps?"),
        (["--length=3"], "there is no flag --length; did you mean --config.train_length?"),
        (
            ["--every_steps=3"],
            "mean --config.checkpoint.every_steps or --config.eval.every_steps or --config.log.every_steps?",
        ),
        (["--wrokdir=x"], "there is no flag --wrokdir; did you mean --workdir?"),
        (["--stride=x"], "--stride=x: invalid literal for int() with base 10: 'x'"),
        (["--config.steps=3"], "unknown config key 'steps'; did you mean 'train.steps'?"),
        (["--config.optimizer.lr=3"], "did you mean 'optimizer.learning_rate'? alibi/config/"),
        (["--lr=3"], "there is no flag --lr; did you mean --config.optimizer.learning_rate?"),
        (["--optimizer.lr=3"], "did you mean --config.optimizer.learning_rate?"),
        (["--batch_size=3"], "did you mean --config.train.batch_tokens?"),
        (["--n_layers=3"], "did you mean --config.model.num_layers?"),
        (["--config.epochs=3"], "did you mean 'train.steps'?"),
        (["--config.warmup=3"], "did you mean 'optimizer.warmup_steps'?"),
        (["--config.context_length=3"], "did you mean 'train_length'?"),
        (["--config.model.heads=3"], "did you mean 'model.num_heads'? alibi/config/"),
        (["--config.eval.dtpye=bfloat16"], "did you mean 'eval.dtype'? alibi/config/"),
        (["--config.optimizer.foo=3"], "'optimizer.foo'; alibi/config/tree.py lists every key"),
        (["--config.xyzzy=3"], "unknown config key 'xyzzy'; alibi/config/tree.py lists every key"),
        (
            ["--config.train.steps'=3"],
            "unknown config key \"train.steps'\"; did you mean 'train.steps'?",
        ),
        (
            ["--config.modle.width=3"],
            "unknown config key 'modle.width'; did you mean 'model.width'?",
        ),
        (["--config.train.steps=1.5"], "train.steps=1.5 must be of type int, such as 600"),
        (["--config.model.remat=maybe"], "model.remat='maybe' must be of type bool, such as False"),
        (
            ["--config.model.cutoffs=1:x"],
            "model.cutoffs='1:x' must be of type tuple[int, ...], such as 20000:60000",
        ),
        (["--config.train_length=0"], "train_length=0 must be at least 1"),
        (["--config.model.window=8,x"], "model.window='8,x' must be of type int | tuple[int, ...]"),
        (
            ["--config.model.window=1,2,3,4,5"],
            "model.window=1,2,3,4,5 lists 5 values for model.num_layers=4 layers; give 1 to 4",
        ),
        (
            ["--config.optimizer.final_fraction=5"],
            "optimizer.final_fraction=5 must be at least 0.0 and at most 1.0",
        ),
        (
            ["--config=configs/quickstart"],
            "there is no config file 'configs/quickstart'; did you mean",
        ),
        (["--config=wikitext130.py:length=8"], "did you mean configs/wikitext103.py"),
        (["--config=mine/own.py"], "no config file 'mine/own.py'; configs/ has alibi_none, "),
        (["--config=README.md"], "README.md is no Python file; its name must end in .py"),
    ],
)
def test_a_command_line(
    told, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(ROOT)
    named = any(word.startswith("--config=") for word in words)
    given = (
        words
        if named or not words
        else [f"--config={QUICKSTART}:train.steps=1,optimizer.warmup_steps=0", *words]
    )
    assert message in told(*given, required=() if words else ("config", "workdir"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def get_config(arg=''):\n    return (",
            "fails at line 2: SyntaxError: '(' was never closed",
        ),
        ("import nosuch", "fails at line 1: ModuleNotFoundError: No module named 'nosuch'"),
        ("x = 1", "has no get_config(); define it as configs/quickstart.py does"),
        (
            "def get_config():\n    pass",
            "must return base.get_config() with other values, and returns None; is its",
        ),
        ("def get_config():\n    return {}", "with other values, and returns a dict"),
        (
            "def get_config():\n    return 1 / 0",
            "fails at line 2: ZeroDivisionError: division by zero",
        ),
        ("import sys\nsys.exit(0)", "fails at line 2: SystemExit: 0"),
        ("def get_config(arg, more):\n    return 1", "TypeError: get_config() missing"),
        (
            "from configs import base\ndef get_config():\n    it = base.get_config()\n    it.model.widht = 3\n"
            "    return it",
            "unknown config key 'model.widht'; did you mean 'model.width'?",
        ),
        (
            "from configs import base\ndef get_config():\n    c = base.get_config()\n    c.model.width = 'x'\n"
            "    return c",
            "model.width='x' must be of type int, such as 128",
        ),
    ],
)
def test_a_config_file(told, tmp_path: pathlib.Path, text: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert message in told(f"--config={tmp_path / 'mine.py'}")


NUMBERS = {key: value for key, value in flatten(Config()).items() if type(value) in (int, float)}


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_outside_its_range(key: str) -> None:
    """No number, infinite, below the least, and beyond the most if there is a most."""
    section, _, name = key.rpartition(".")
    kind = type(Config()[section]) if section else Config
    bounds = kind.__dataclass_fields__[name].metadata["bounds"]
    assert bounds, "every number has a range"
    bad: list[Any] = ["x", None, True]
    bad += [
        bound - 5 if side in ("at_least", "above") else bound + 1 for side, bound in bounds.items()
    ]
    bad += [1.5] if type(NUMBERS[key]) is int else [math.nan, math.inf, -math.inf]
    for value in bad:
        assert_refused(f"^{key}=", kind, **{name: value})


@pytest.mark.parametrize("num_heads", ["8", [8], 8.0, None, True, 10**9, 0, -1, math.nan, (8,)])
def test_heads_that_are_no_number(num_heads: Any) -> None:
    needed = "must be a whole number from 1 to 65,536, such as 8"
    assert_refused(needed, alibi_slopes, num_heads)
    assert_refused(needed, alibi_bias, num_heads, jax.numpy.arange(2), jax.numpy.arange(2))


@pytest.mark.parametrize("positions", [True, 0.5, "01", {0: 1}])
def test_positions_that_are_no_arrays(positions: Any) -> None:
    good = jax.numpy.arange(2)
    for name, both in (("query", (positions, good)), ("key", (good, positions))):
        assert_refused(rf"^{name}_positions=.* jnp\.arange", alibi_bias, 8, *both)
    for listed, message in (
        ((0.5,), "positions have dtype"),
        ([[0], [1, 2]], "of several lengths"),
    ):
        assert_refused(message, alibi_bias, 8, listed, good)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        (3, {}, "position=3 is no subclass of alibi.positions.PositionMethod"),
        (None, {}, "position=None is no subclass"),
        (
            "t5",
            {"num_heads": "8"},
            "num_heads='8' of position method 't5' must be a whole number of at least 1",
        ),
        (
            "rotary",
            {"head_dim": 4.0},
            "head_dim=4.0 of position method 'rotary' must be a whole number",
        ),
        (
            "learned",
            {"train_length": None},
            "train_length=None of position method 'learned' must be",
        ),
    ],
)
def test_position_methods_of_no_size(name: Any, changed: dict[str, Any], message: str) -> None:
    sizes = {"num_heads": 8, "head_dim": 4, "width": 32, "train_length": 8} | changed
    assert_refused(message, make_position, name, **sizes)


@pytest.mark.parametrize("convention", [None, 3, "papr", "Paper", b"paper", {"paper": 1}])
def test_conventions_that_are_none(convention: Any) -> None:
    assert_refused("paper, closed_form, random, or", alibi_slopes, 8, convention)


@pytest.mark.parametrize("line", [b"{", b"nonsense", b"5", b'"x"', b"null", b"[1]", b'{"a": 1}', b'{"step": "x"}',
                                  b'{"step": null}', b"\xff\xfe", b"[" * 10_000])  # fmt: skip
def test_lines_that_are_no_rows(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, line: bytes
) -> None:
    """In metrics they are dropped when the run goes on; of results they are left out, with a
    warning.
    """
    metrics, good = tmp_path / "metrics.jsonl", b'{"step": 1, "train_nll": 2.0}\n'
    metrics.write_bytes(good + line + b"\n" + good.replace(b"1", b"9"))
    drop_rows(epath.Path(metrics), 2)
    assert metrics.read_bytes() == good
    (tmp_path / "results.jsonl").write_bytes(line + b"\n")
    assert read_rows(tmp_path / "results.jsonl") == []
    assert "line 1 is no whole row and was left out" in caplog.text


@pytest.mark.parametrize(
    ("address", "count", "number", "message"),
    [
        ("host", None, None, "--coordinator_address=host must be HOST:PORT"),
        ("localhost:abc", 2, 0, "--coordinator_address=localhost:abc must be HOST:PORT"),
        ("localhost:65536", 2, 0, "must be HOST:PORT"),
        (":12345", 2, 0, "must be HOST:PORT"),
        ("[::1]:12345", 2, 2, "--process_id=2 and --num_processes=2 do not fit"),
        ("localhost:12345", 0, None, "--num_processes=0 do not fit"),
    ],
)
def test_processes_that_cannot_join(
    address: str | None, count: int | None, number: int | None, message: str
) -> None:
    """JAX ends in a segmentation fault at a port that is no number, or waits for five minutes."""
    assert_refused(message, hosts.join, address, count, number)


def test_a_process_that_no_cluster_numbers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, run_script
) -> None:
    """JAX names no flag; and it refuses to join once it has devices, as in this process."""
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    words = ["--config=configs/base.py", f"--workdir={tmp_path}", "--multihost"]
    assert re.search(
        r"^error: .* which process this is .*; give --coordinator_address=HOST:PORT of the first "
        r"process, --num_processes and --process_id; a single process needs none of them",
        run_script(ROOT / "train.py", *words, code=1).stderr,
        re.M,
    )


def no_gpu() -> AssertionError:
    """Returns the error of JAX_PLATFORMS=cuda where there is no GPU."""
    _default_backend = None
    with pytest.raises(AssertionError) as caught:
        assert _default_backend is not None
    return caught.value


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (no_gpu(), "names a platform that isn't here; unset it"),
        (
            RuntimeError("Unable to initialize backend 'cuda': no device"),
            "names a platform that isn't here; unset it",
        ),
        (
            OSError(24, "Too many open files", "x"),
            "no more files can be opened; allow more (ulimit -n 4096)",
        ),
        (
            ValueError("RESOURCE_EXHAUSTED: a\nb [Too many open files]"),
            "allow more (ulimit -n 4096)",
        ),
        (OSError(28, "No space left on device", "x"), "make space and repeat the command"),
        (Exception("No space left on device (os error 28)"), "make space and repeat the command"),
        (
            NotADirectoryError(20, "Not a directory", f"{__file__}/x"),
            f"{__file__} is a file, not a directory",
        ),
        (
            OSError(39, "Directory not empty", "a/.run.12", None, "a/run"),
            "a/run: Directory not empty; give another path",
        ),
        (
            PermissionError(13, "Permission denied", "from", None, "to"),
            "to: Permission denied; give another path",
        ),
        (MemoryError(), "there is not enough memory; use a smaller train.max_device_tokens"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."),
            "with mesh.fsdp: RESOURCE_EXHAUSTED: Out of memory",
        ),
        (
            BrokenPipeError(32, "Broken pipe"),
            "the reader of the output ended before all was printed",
        ),
    ],
)
def test_what_the_system_refuses(error: Exception, message: str) -> None:
    told = errors.explain(error)
    assert told is not None
    assert message in told
    assert "\n" not in told
    assert errors.explain(AssertionError()) is None, "a bug"
    assert errors.explain(RuntimeError("a bug")) is None, "it keeps its traceback"
