"""The command lines of a user, on a corpus for training in seconds."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users")]

ROOT = pathlib.Path(__file__).resolve().parents[1]

CONFIG = """
from configs import base


def get_config(arg=""):
    config = base.get_config("length=16,train.steps=6,train.batch_tokens=128,optimizer.warmup_steps=2")
    config.model.update(num_layers=1, width=16, num_heads=2, feed_forward=32)
    config.data.update(corpus="text", train={train!r}, valid={valid!r})
    config.eval.update(every_steps=3, batch_tokens=256)
    config.log.every_steps = 2
    return base.apply(config, arg)
"""
SWEEP = """
def get_sweep():
    return {{
        "title": "tiny",
        "config": {config!r},
        "product": {{"position": ["alibi", "learned"], "train_length": [16], "seed": [0]}},
        "multiples": [1, 2],
    }}
"""


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, tiny_text: dict[str, pathlib.Path]
) -> dict[str, pathlib.Path]:
    folder = tmp_path_factory.mktemp("end-to-end")
    config, sweep = folder / "tiny.py", folder / "sweep.py"
    config.write_text(CONFIG.format(train=str(tiny_text["train"]), valid=str(tiny_text["valid"])))
    sweep.write_text(SWEEP.format(config=str(config)))
    return {"folder": folder, "config": config, "sweep": sweep, "valid": tiny_text["valid"]}


def run(
    files: dict[str, pathlib.Path], *words: object, cwd: pathlib.Path = ROOT
) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "ALIBI_CACHE": str(files["folder"] / "cache"),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, timeout=300)
    assert b"\r" not in done.stdout + done.stderr, (
        "a file gets whole lines, without bars drawn anew"
    )
    return subprocess.CompletedProcess(
        command, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def rows(folder: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_sweep_in_tasks_by_submit_is_reported_and_then_has_nothing_to_do(
    files, run_script
) -> None:
    workdir, template = files["folder"] / "tasks", files["folder"] / "both.sh"
    template.write_text("for TASK in $(seq 0 {{LAST_TASK}}); do {{COMMAND}} & done; wait\n")
    words = (f"--template={template}", f"--sweep={files['sweep']}", f"--workdir={workdir}", "--go")
    assert run_script(ROOT / "scripts/submit.py", *words).stdout.count(": training; ") == 2
    by_cell = {(row["position"], row["cell"]["length"]): row for row in rows(workdir)}
    assert set(by_cell) == {
        (position, length) for position in ("alibi", "learned") for length in (16, 32)
    }
    size = files["valid"].stat().st_size
    for cell, row in by_cell.items():
        if cell == ("learned", 32):
            assert "16 positions" in row["error"], (
                "beyond its table learned is an error in the report, not a crash"
            )
            assert "results" not in row
            continue
        assert row["results"]["tokens"] == row["results"]["bytes"] == size, (
            "every token of the split is scored exactly once"
        )
        assert (row["step"], row["train_length"], row["seed"]) == (6, 16, 0)
        assert (row["evaluator"], "options" in row) == ("perplexity", False)
    assert (workdir / "extrapolation.png").read_bytes().startswith(b"\x89PNG")
    assert "learned" in (workdir / "report.md").read_text()
    shown = run_script(ROOT / "scripts/status.py", workdir, "--once")
    assert shown.stdout.startswith(f"{workdir}: 2 finished; report: {workdir}/report.md\nrun "), (
        shown.stderr
    )
    assert re.search(
        r"^alibi-L16-seed0 +finished +6 of 6 +[\d.]+ +[\d,]+ +\d+ \w+ ago$", shown.stdout, re.M
    )
    before = {path: path.stat().st_mtime_ns for path in workdir.glob("runs/*/metrics.jsonl")}
    again = run_script(
        ROOT / "scripts/sweep.py", f"--sweep={files['sweep']}", f"--workdir={workdir}"
    )
    assert {path: path.stat().st_mtime_ns for path in before} == before, (
        "a finished run was touched"
    )
    assert len(rows(workdir)) == 4
    # the last line is a command that writes text with the trained model
    _, script, *words = shlex.split(again.stdout.splitlines()[-1])
    written = run_script(ROOT / script, *words)
    assert written.stdout.startswith("It was "), written.stderr
    assert "200 tokens, " in written.stderr


METHOD = """
import dataclasses

import jax.numpy as jnp

from alibi.positions import DistanceBias, PositionMethod, per_head


class SquareBias(DistanceBias):
    bounded = True
    rates: object = per_head()

    def at(self, distance):
        distance = jnp.asarray(distance, jnp.float32)[None]
        return -self.rates.reshape(-1, *(1,) * (distance.ndim - 1)) * distance**2


@dataclasses.dataclass(frozen=True)
class Square(PositionMethod):
    shift_invariant = True
    rate: float = 0.01

    def bias(self, params):
        return SquareBias(jnp.full(self.num_heads, self.rate))
"""


def test_a_method_from_outside_trains_and_is_evaluated_like_any_other(
    files: dict[str, pathlib.Path], run_script, monkeypatch
) -> None:
    """In the folder of its package, with an option; its evaluation slides and dumps the NLL of each
    token.
    """
    folder = files["folder"] / "elsewhere"
    (folder / "outside_package").mkdir(parents=True)
    (folder / "outside_package" / "square.py").write_text(METHOD)
    workdir, output = folder / "outside", folder / "results"
    words = [ROOT / "train.py", f"--config={files['config']}", f"--workdir={workdir}"]
    options = [
        "--config.position=outside_package.square:Square",
        "--config.position_options.rate=0.1",
    ]
    trained = run(files, *words, *options, cwd=folder)
    assert trained.returncode == 0, trained.stderr
    assert json.loads((workdir / "status.json").read_text())["state"] == "finished"
    assert list((workdir / "tensorboard").iterdir())
    assert trained.stderr.startswith("devices: "), "without a sweep it describes itself"
    assert (
        f"finished; evaluate it by\n  python eval_extrapolation.py --workdirs={workdir}"
        in trained.stderr
    )
    monkeypatch.syspath_prepend(str(folder))
    run_script(
        ROOT / "eval_extrapolation.py", f"--workdirs={workdir}", "--lengths=16,24", "--stride=5", "--dump_nll",
        f"--output_dir={output}", f"--text_file={files['valid']}",
    )  # fmt: skip
    assert (output / "extrapolation.png").exists()
    found = rows(output)
    assert [row["cell"]["length"] for row in found] == [16, 24]
    for row in found:
        assert (row["position"], row["options"]) == ("outside_package.square:Square", {"stride": 5})
        assert list(output.glob(f"nll/outside-length={row['cell']['length']}-stride=5-*.npz"))
    wrong = run_script(*words, "--config.position=outside_package.square:Circle", code=1)
    assert (
        "position=outside_package.square:Circle: module 'outside_package.square' has no attribute 'Circle'"
        in wrong.stderr
    )


def test_a_training_is_submitted_and_known_before_it_starts(files, run_script) -> None:
    workdir, template = files["folder"] / "submitted", files["folder"] / "one.sh"
    template.write_text("echo {{COMMAND}}\n")
    words = (f"--template={template}", f"--config={files['config']}", f"--workdir={workdir}")
    done = run_script(ROOT / "scripts/submit.py", *words, "--go")
    assert re.search(rf"^[^e].*train.py .*--workdir={workdir}", done.stdout, re.M), "bash ran it"
    assert done.stderr.endswith(f"look at it by: python scripts/status.py {workdir}\n")
    assert json.loads((workdir / "submitted.json").read_text()) == {"template": "one.sh"}
