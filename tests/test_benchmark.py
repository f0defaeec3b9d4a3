"""The benchmarks of attention, at lengths where it takes seconds, and of training, with steps that are made up."""

import argparse
import importlib
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi import attend
from alibi.attention.backends import BACKENDS
from alibi.config import replaced

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
    growth = scripts[0].growth_of_peak_memory(lambda: bytearray(b"\x01" * 2**25))
    if growth is not None:
        # The bytes, and the copy of them; the system counts pages in lots, on each processor.
        assert growth == pytest.approx(2**26, abs=2**23)


def test_a_process_is_warm_when_its_time_is_steady(scripts, monkeypatch):
    """It may be slow for several turns, all alike; then it takes more turns until two are as fast as the fastest."""
    processes = importlib.import_module("benchmarks.processes")
    slow_then_fast = [0.3] * 3 + [0.1] * 20  # seconds of a step; turns are of one step, then of about half a second
    for of_steps, taken in (([0.1] * 20, 5), (slow_then_fast, 5), ([0.3, 0.1] * 20, 9), ([155.0] * 9, 1)):
        left = iter(of_steps)
        monkeypatch.setattr(processes, "seconds_of", lambda run, steps, left=left: steps * next(left))
        assert processes.warm_up(lambda steps: None) == pytest.approx(of_steps[taken - 1])
        assert len(list(left)) == len(of_steps) - taken


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attention", "--backends=fast", "--lengths=64"], "unknown attention backend 'fast'; use auto, "),
        (["attention", "--lengths=64,abc"], "--lengths=64,abc must be whole numbers above 0, separated by commas"),
        (["decode", "--lengths=0"], "--lengths=0 must be whole numbers above 0"),
        (["train", "--shapes=none", "--lengths=-8"], "--lengths=-8 must be whole numbers above 0"),
        (["evaluate", "--batch_tokens="], "--batch_tokens= must be whole numbers above 0"),
        (["evaluate", "--workdir={tmp_path}/none", "--rounds=0"], "--rounds=0 must be at least 1"),
        (["evaluate", "--workdir={tmp_path}/none", "--peer=torch"], "--peer=torch is a peer of the small model"),
        (
            ["adaptive", "--size=paper", "--peer=torch"],
            "--peer=torch has no step of --size=paper; leave one of the two",
        ),
        (
            ["adaptive", "--json={tmp_path}/absent/rows.json"],
            "--json={tmp_path}/absent/rows.json can't be written; name",
        ),
        (["adaptive", "--json={tmp_path}"], "--json={tmp_path} can't be written"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(scripts, monkeypatch, capsys, tmp_path, words, message):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *(word.format(tmp_path=tmp_path) for word in words)])
    assert importlib.import_module("benchmark").main() == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message.format(tmp_path=tmp_path)}")
    assert said.count("\n") == 1


def test_what_stops_a_measurement_is_one_line(scripts, monkeypatch, capsys):
    benchmark, adaptive = (importlib.import_module(name) for name in ("benchmark", "benchmarks.adaptive"))
    for error in (RuntimeError("the matrix product was not measured"), OSError("no such disk")):
        monkeypatch.setattr(adaptive, "compare", mock.Mock(side_effect=error))
        monkeypatch.setattr(sys, "argv", ["benchmark.py", "adaptive"])
        assert benchmark.main() == 1
        assert capsys.readouterr().err == f"error: {error}\n"


def test_a_system_that_tells_no_cores_of_a_process(scripts, monkeypatch):
    """Such as macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert importlib.import_module("benchmarks.rounds").about(1)["machine"]["cores"] == 3


def test_a_length_is_told_by_ratios_of_its_rounds(scripts, monkeypatch, capsys):
    """ALiBi's step takes 1.25 of sinusoidal's time, and 0.64 of its own without attention, as the machine drifts."""
    rounds, training = (importlib.import_module(f"benchmarks.{name}") for name in ("rounds", "training"))
    seconds = {
        "alibi": [1.25, 5.0, 2.5],
        "sinusoidal": [1.0, 4.0, 4.0],  # of the medians the ratio would be 1.6
        "alibi, no attention": [0.8, 3.2, 0.4],
        "sinusoidal, no attention": [0.8, 3.2, 0.4],
    }

    def run_rounds(contenders, number, **_):
        assert number == 3
        return {name: rounds.Runner(contenders[name], seconds={"run": seconds[name]}) for name in seconds}, 1e11

    monkeypatch.setattr(training, "run_rounds", run_rounds)
    parser = argparse.ArgumentParser()
    training.add_train_arguments(parser)
    parser.add_argument("--rounds", type=int)
    words = ["--shapes=none", "--lengths=16,32", "--batch_tokens=64", "--rounds=3"]
    rows = training.compare_training(parser.parse_args(words))
    assert [row["length"] for row in rows[::4]] == [16, 32]
    alibi, sinusoidal, without, _ = rows[4:]
    assert (alibi["tokens_per_second"], alibi["of_sinusoidal"]) == (64 / 2.5, pytest.approx(0.8))
    assert alibi["share_in_attention"] == pytest.approx(1 - 0.64)
    assert sinusoidal["share_in_attention"] == pytest.approx(0.2)
    assert "share_in_attention" not in without
    assert "in attention" in capsys.readouterr().out
    with pytest.raises(ValueError, match="batch_tokens=64 must be a multiple of the length 24"):
        training.compare_training(parser.parse_args([*words, "--lengths=24"]))


def test_position_methods_are_told_by_ratios_within_a_round(scripts, monkeypatch, capsys):
    rounds, positions = (importlib.import_module(f"benchmarks.{name}") for name in ("rounds", "positions"))
    training = {"alibi": [1.0, 4.0, 2.0], "none": [2.0, 12.0, 3.0]}  # of the medians the ratio would be 1.5
    scoring = {"alibi": [0.5, 0.5, 0.5], "none": [0.25, 0.25, 0.25]}

    def run_rounds(contenders, number, **_):
        configs = {name: one.arguments[0] for name, one in contenders.items()}
        assert {name: (config.position, config.train_length) for name, config in configs.items()} == {
            name: (name, 64) for name in contenders
        }
        seconds = {name: {"run": training[name], "score": scoring[name]} for name in contenders}
        return {name: rounds.Runner(one, seconds=seconds[name]) for name, one in contenders.items()}, 1e11

    monkeypatch.setattr(positions, "run_rounds", run_rounds)
    parser = argparse.ArgumentParser()
    positions.add_arguments(parser)
    parser.add_argument("--rounds", type=int)
    words = ["--lengths=64", "--rounds=3", "--batch_tokens=2048"]
    rows = positions.compare(parser.parse_args(["--positions=alibi,none", *words]))
    assert [(row["contender"], row["run"]["of_none"], row["score"]["of_none"]) for row in rows] == [
        ("none", 1.0, 1.0),
        ("alibi", 2.0, 0.5),
    ]
    assert rows[1]["run"]["tokens_per_second"] == 2048 / 2.0
    assert rows[0]["run"]["of_alibi"] == 0.5
    assert "the quickstart's model at L=64, 2048 tokens a step" in capsys.readouterr().out
    assert positions.compare(parser.parse_args(["--positions=alibi", *words]))[0]["run"]["of_none"] is None
    with pytest.raises(ValueError, match="unknown position method 'alibbi'"):
        positions.compare(parser.parse_args(["--positions=alibbi", *words]))
    with pytest.raises(ValueError, match="batch_tokens=2048 must be a multiple of the length 60"):
        positions.compare(parser.parse_args(["--lengths=60", *words[1:]]))


def test_many_position_methods_are_measured_in_parts_with_the_references_in_each(scripts, monkeypatch):
    rounds, positions = (importlib.import_module(f"benchmarks.{name}") for name in ("rounds", "positions"))
    parts = []

    def run_rounds(contenders, number, **_):
        parts.append(list(contenders))
        seconds = {name: {"run": [1.0 + len(parts)], "score": [1.0]} for name in contenders}
        return {name: rounds.Runner(one, seconds=seconds[name]) for name, one in contenders.items()}, 1e11

    monkeypatch.setattr(positions, "run_rounds", run_rounds)
    parser = argparse.ArgumentParser()
    positions.add_arguments(parser)
    parser.add_argument("--rounds", type=int)
    names = "t5,none,shaw,fire,fox,alibi,xpos,rotary"
    words = [f"--positions={names}", "--lengths=64", "--rounds=1", "--batch_tokens=2048"]
    rows = positions.compare(parser.parse_args(words))
    # All processes at a time would not fit into memory.
    assert parts == [["none", "alibi", "t5", "shaw", "fire", "fox", "xpos"], ["none", "alibi", "rotary"]]
    # A row each, and each ratio is of rounds that both were in.
    assert [row["contender"] for row in rows] == [*parts[0], "rotary"]
    assert all(row["run"]["of_alibi"] == 1.0 for row in rows)


def test_a_position_method_is_trained_and_scored(scripts, tiny_config):
    positions = importlib.import_module("benchmarks.positions")
    step = positions._position_step(tiny_config(position="kerple_log"))
    step.run(2)
    step.score(2)
    assert step.memory_bytes > 0


def test_a_step_is_profiled_by_its_parts(scripts, tiny_config, monkeypatch, capsys):
    """Of a real trace: no part of the model is missing, products are where they belong, and shares make a whole."""
    profile = importlib.import_module("benchmarks.profile")
    monkeypatch.setattr(profile, "keep_freed_memory", lambda: None)  # for the process of all tests
    monkeypatch.setitem(profile.SHAPES, "tiny", lambda arg: tiny_config(**dict([arg.split("=")])))
    rows = profile.profile(argparse.Namespace(shapes="tiny", position="rotary", rounds=2))
    assert {row["part"] for row in rows} - {"other"} == {*profile.PARTS} - {"other"}
    assert sum(row["share"] for row in rows if row["part"] == "other") < 0.2
    products = {(row["part"], row["pass"]) for row in rows if row["kind"] == "with products"}
    of_weights = ("projections of attention", "attention", "feed-forward", "embedding and loss")
    assert products == {(part, way) for part in of_weights for way in ("forward", "backward")}
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert all(row["seconds"] > 0 for row in rows)
    assert "| feed-forward" in capsys.readouterr().out


def test_attention_that_costs_nothing_keeps_its_projections(scripts, tiny_config, monkeypatch):
    """What has no part in the loss, XLA would not compute: then the projections would count as attention."""
    monkeypatch.setitem(BACKENDS, "reference", BACKENDS["reference"])
    contender = importlib.import_module("benchmarks.training_contenders")
    config = tiny_config(mesh__data=1, train__batch_tokens=128)
    monkeypatch.setattr(contender, "_project_step", lambda config: config)
    assert contender._step_without_attention(config).model.attention == "reference"
    query, key, value = 1.0 + np.random.default_rng(0).random((3, 1, 4, 2, 8), np.float32)
    step = jax.jit(jax.grad(lambda *arrays: attend(*arrays, backend="reference").sum(), (0, 1, 2)))
    for gradient, expected in zip(step(query, key, value), (key, query, np.ones_like(value)), strict=True):
        np.testing.assert_array_equal(gradient, expected)


def test_exponents_of_counted_tiles(scripts, monkeypatch, capsys):
    """Steep heads see a tile or two whatever the length; without skipping each head has the causal triangle."""
    growth = importlib.import_module("benchmarks.attention_growth")
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)  # on several all heads go together
    ones, slopes = jnp.ones((1, 2048, 4, 1)), jnp.asarray([4.0, 1.0, 0.25, 2.0**-6])
    every, reached = (growth.computed_weights(*[ones] * 3, slopes, "blocked", epsilon) for epsilon in (None, 0.0))
    # The triangle of 4 by 4 blocks of 512. With all logits 1, keys count up to 104 / m away: the first three
    # heads reach the block before their own, the last all.
    assert every == [10 * 512**2] * 4
    assert reached == [7 * 512**2] * 3 + [10 * 512**2]
    rows = [
        {"contender": "steep", "length": length, "failed": None, "computed_weights": [length], "both_seconds": None}
        for length in (1024, 2048, 4096)
    ]
    rows += [{**row, "contender": "square", "computed_weights": [row["length"] ** 2]} for row in rows]
    rows += [{**row, "length": 512, "computed_weights": None} for row in rows[::3]]  # `saved` took it
    steep, square = growth.growth(rows)
    assert steep["counted_lengths"] == [1024, 2048, 4096]
    assert steep["exponents_of_head_groups"] == [pytest.approx(1.0)]
    assert square["exponent_of_weights"] == pytest.approx(2.0)
    assert steep["exponent_of_seconds"] is None
    assert growth.computed_weights(*[ones[:, :64]] * 3, slopes, "auto", 0.0) is None  # another backend's
    growth.print_growth([steep, square])
    assert "1,024 2,048 4,096" in capsys.readouterr().out


def test_the_work_of_a_sliding_window_is_counted(monkeypatch):
    """L = 4, S = 1, one layer, width 64: keys and values of 4 tokens; all else of one, and its head of 2,002 rows."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    evaluate = importlib.import_module("benchmarks.evaluate")
    config = evaluate.small_config()
    config = replaced(config, {"model.num_layers": 1})
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


def test_generation_is_told_by_its_parts(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    generate, rounds = (importlib.import_module(f"benchmarks.{name}") for name in ("generate", "rounds"))

    def in_this_process(contenders, rounds_, *, turn_seconds, title):
        del rounds_, turn_seconds, title
        answers = {name: one.prepare()[1] for name, one in contenders.items()}
        seconds = {"prefill": [1e-3], "decode": [4e-3], "forward": [2e-3]}
        return {name: rounds.Runner(contenders[name], answer=answers[name], seconds=seconds) for name in answers}, 1e11

    monkeypatch.setattr(generate, "run_rounds", in_this_process)
    (row,) = generate.compare(argparse.Namespace(positions="alibi", batch=2, prompt=6, tokens=2, rounds=1))
    rates = [row[f"{part}_tokens_per_second"] for part in generate.PARTS]
    assert rates == [pytest.approx(12_000), pytest.approx(1000), pytest.approx(8000)]
    assert row["logits_error"] < 1e-5
    assert "| alibi |            12,000 |            1,000 |             8,000 |" in capsys.readouterr().out


def test_making_tokens_is_timed_beside_plain_loops(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    data = importlib.import_module("benchmarks.data")
    monkeypatch.setattr(data, "_in_process", lambda call, *arguments: call(*arguments))
    arguments = argparse.Namespace(text=None, megabytes=1, workers="1", tokenizers="bytes,words", rounds=1)
    rows = data.compare(arguments)
    assert [(row["contender"], row["megabytes"]) for row in rows] == [
        ("numpy + SHA-256", 4), ("bytes, 1 workers", 4), ("split + dict", 1), ("words, 1 workers", 1)
    ]  # fmt: skip
    assert all(0 < row["mb_per_core_second"] < 1e5 for row in rows)
    assert "| words, 1 workers |" in capsys.readouterr().out
    arguments.tokenizers = "words,byte"
    with pytest.raises(ValueError, match="--tokenizers=words,byte: use bytes, words, bpe"):
        data.compare(arguments)
