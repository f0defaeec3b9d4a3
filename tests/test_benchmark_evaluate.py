"""The benchmark of the evaluator, on a text that takes a second."""

import argparse
import importlib
import pathlib

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def benchmark(monkeypatch):
    """The module, as scripts/benchmark.py imports it, with one layer and a small product to compare with."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("benchmark_evaluate")
    config = module.small_config()
    config.model.num_layers = 1
    monkeypatch.setattr(module, "small_config", lambda: config)
    monkeypatch.setattr(module, "PEAK_SIZE", 64)
    return module


def test_windows_and_flops_are_counted(benchmark, capsys):
    """L = 4, S = 1, one layer, width 64: keys and values of 4 tokens; all else of one, and its head of 2,002 rows."""
    arguments = argparse.Namespace(workdir="", length=4, stride=1, tokens=12, batch_tokens="32", rounds=1)
    (row,) = benchmark.compare_evaluation(arguments)
    assert row["windows_per_second"] == pytest.approx(12 / row["seconds"][0])
    assert row["inputs_per_second"] == pytest.approx(4 * row["windows_per_second"])
    keys_and_values = 4 * 2 * 2 * 64 * 64
    of_one = 2 * 2 * 64 * 64 + 2 * 2 * 64 * 256  # its query and out; feed-forward
    attention, head = 2 * 2 * 64 * 4, 2 * 64 * 2002
    flops = keys_and_values + of_one + attention + head
    assert benchmark.window_flops(benchmark.small_config(), 4, 1) == flops
    share = row["windows_per_second"] * flops / (row["matmul_gflops"] * 1e9)
    assert row["share_of_matmul_peak"] == pytest.approx(share)
    assert "| batch tokens | windows/s |" in capsys.readouterr().out
