"""The benchmark of attention, at lengths where it takes seconds."""

import argparse
import importlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def scripts(monkeypatch):
    """The benchmark's modules, as the script itself imports them."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = ("benchmarks.attention_contenders", "benchmarks.attention")
    return [importlib.import_module(name) for name in names]


def attention(*arguments):
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), "attention", *arguments]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)


def test_attention_is_measured_at_each_length_against_a_peer(tmp_path):
    file = tmp_path / "rows.json"
    size = ("--lengths=64", "--heads=2", "--head_dim=8")
    result = attention(*size, "--peer=flax", "--skip_epsilon=0", "--rounds=1", f"--json={file}")
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())
    names = ["alibi auto, skip 0", "Flax, dense bias"]
    assert [(row["length"], row["contender"]) for row in rows] == [(64, name) for name in names]
    for row in rows:
        assert (row["benchmark"], row["failed"], row["no_backward"], row["rounds"]) == ("attention", None, None, 1)
        assert 0 < row["forward_seconds"] == row["forward_seconds_of_rounds"][0]
        assert row["both_seconds"] > 0
        # 4 head_dim operations of each pair of the causal half, 3.5 times as many with the backward pass.
        flops = 4 * 8 * 2 * row["length"] * (row["length"] + 1) / 2
        peak = row["matmul_gflops"] * 1e9
        assert row["forward_share_of_matmul_peak"] == pytest.approx(flops / row["forward_seconds"] / peak)
        assert row["both_share_of_matmul_peak"] == pytest.approx(3.5 * flops / row["both_seconds"] / peak)
    ours, flax = rows[:2]
    assert ours["both_of_peers"] == {names[1]: pytest.approx(flax["both_seconds"] / ours["both_seconds"])}
    assert f"x {names[1]}" in result.stdout


def test_a_contender_that_cannot_run_is_a_row_with_its_reason(scripts, capsys):
    contenders, comparison = scripts
    shape = contenders.Shape(length=64, batch=1, heads=2, head_dim=8, dtype="float32")
    entrants = {
        "dies": contenders.AttentionContender(os._exit, (1,)),
        "fails": contenders.AttentionContender(int, ("x",)),
        "large": contenders.AttentionContender(int, ("x",), needed_bytes=2.0**80),
        "runs": contenders.project_attention(shape, "reference", None),
    }
    rows = comparison.measure(shape, entrants, ["dies"], rounds=1)
    reasons = {row["contender"]: row["failed"] for row in rows}
    assert "died" in reasons["dies"]
    assert reasons["fails"] == "ValueError: invalid literal for int() with base 10: 'x'"
    assert "GiB are available" in reasons["large"] or not pathlib.Path("/proc/meminfo").exists()
    assert reasons["runs"] is None
    assert rows[-1]["both_of_peers"] == {"dies": None}
    about = {"machine": {"cpu": "c", "cores": 1}, "date": "d", "rounds": 1}
    comparison.print_rows([{**row, **about} for row in rows])
    assert "fails could not run: ValueError" in capsys.readouterr().out


def test_the_memory_of_a_call_is_its_own(scripts):
    growth, result = scripts[0].growth_of_peak_memory(lambda: float(bytearray(b"\x01" * 2**25)[0]))
    assert result == 1.0
    if growth is not None:
        # The bytes, and the copy of them; the system counts pages in lots, on each processor.
        assert growth == pytest.approx(2**26, abs=2**23)


def test_unknown_names_are_one_line():
    result = attention("--backends=fast", "--lengths=64")
    assert result.returncode == 1
    assert result.stderr.startswith("error: unknown attention backend 'fast'; use auto, ")


def test_the_work_of_a_sliding_window_is_counted(monkeypatch):
    """L = 4, S = 1, one layer, width 64: keys and values of 4 tokens; all else of one, and its head of 2,002 rows."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    evaluate = importlib.import_module("benchmarks.evaluate")
    config = evaluate.small_config()
    config.model.num_layers = 1
    keys_and_values = 4 * 2 * 2 * 64 * 64
    of_one = 2 * 2 * 64 * 64 + 2 * 2 * 64 * 256  # its query and out; feed-forward
    attention, head = 2 * 2 * 64 * 4, 2 * 64 * 2002
    assert evaluate.window_flops(config, 4, 1) == keys_and_values + of_one + attention + head


def test_a_token_against_a_cache_is_a_row_for_each_way(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    decode, rounds = (importlib.import_module(f"benchmarks.{name}") for name in ("decode", "rounds"))
    for name in ("skip none", "skip 1e-6", "skip 0, norms unknown"):  # compile as much as these
        monkeypatch.delitem(decode.WAYS, name)

    def in_this_process(contenders, rounds_, *, turn_seconds, title):
        del rounds_, turn_seconds, title
        for contender in contenders.values():
            contender.build(*contender.arguments).run(1)
        seconds = dict(zip(contenders, (3e-3, 1e-3), strict=True))
        return {name: rounds.Runner(one, seconds={"run": [seconds[name]]}) for name, one in contenders.items()}, 1e11

    monkeypatch.setattr(decode, "run_rounds", in_this_process)
    shape = {"batch": 1, "heads": 2, "head_dim": 8, "dtype": "float32"}
    rows = decode.compare(argparse.Namespace(lengths="64", rounds=1, **shape))
    assert [(row["contender"], row["length"]) for row in rows] == [("dense", 64), ("skip 0", 64)]
    assert [row["of_dense"] for row in rows] == [1.0, pytest.approx(3.0)]
    assert "| skip 0 | 1,000 (3.0x) |" in capsys.readouterr().out
