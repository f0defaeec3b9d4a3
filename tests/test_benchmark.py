"""The benchmarks: attention at short lengths, and what others measure."""

import argparse
import importlib
import json
import os
import pathlib
import sys

import jax
import numpy as np
import pytest

from alibi import attend
from alibi.attention.backends import BACKENDS
from alibi.config import replaced
from alibi.model.decoder import build_model
from tests.torch_states import fused_state

pytestmark = pytest.mark.slow


def load(name):
    return importlib.import_module(f"benchmarks.{name}")


def test_a_ratio_is_the_median_of_those_of_the_rounds():
    """As the machine drifts; the ratio of the medians would be 1.6."""
    rounds = load("rounds")
    seconds = [1.25, 5.0, 2.5], [1.0, 4.0, 4.0]
    ours, peer = (rounds.Runner(None, seconds={"run": each}) for each in seconds)
    assert ours.times_as_fast(peer) == pytest.approx(0.8)
    assert ours.median() == 2.5


def test_attention_is_measured_at_each_length_against_a_peer(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ALIBI_WARM_SECONDS", "0.1")
    file = tmp_path / "rows.json"
    words = [
        "--lengths=64",
        "--heads=2",
        "--head_dim=8",
        "--peer=flax",
        "--skip_epsilon=0",
        "--rounds=1",
        "--turn_seconds=0.1",
    ]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "attention", *words, f"--json={file}"])
    assert load("__main__").main() == 0
    rows = json.loads(file.read_text())
    names = ["alibi auto, skip 0", "Flax, dense bias"]
    assert [(row["length"], row["contender"]) for row in rows] == [(64, name) for name in names]
    for row in rows:
        assert (row["benchmark"], row["failed"], row["no_backward"], row["rounds"]) == (
            "attention",
            None,
            None,
            1,
        )
        assert 0 < row["forward_seconds"] == row["forward_seconds_of_rounds"][0]
        # 4 head_dim operations of each pair of the causal half, 3.5 times as many with the backward
        # pass.
        flops = 4 * 8 * 2 * row["length"] * (row["length"] + 1) / 2
        peak = row["matmul_gflops"] * 1e9
        assert row["forward_share_of_matmul_peak"] == pytest.approx(
            flops / row["forward_seconds"] / peak
        )
        assert row["both_share_of_matmul_peak"] == pytest.approx(
            3.5 * flops / row["both_seconds"] / peak
        )
    ours, flax = rows
    assert ours["both_of_peers"] == {
        names[1]: pytest.approx(flax["both_seconds"] / ours["both_seconds"])
    }
    assert f"x {names[1]}" in capsys.readouterr().out


def test_a_contender_that_cannot_run_is_a_row_with_its_reason(monkeypatch, capsys):
    monkeypatch.setenv("ALIBI_WARM_SECONDS", "0.1")
    attention, contenders, processes = (
        load("attention"),
        load("attention_contenders"),
        load("processes"),
    )
    shape = contenders.Shape(length=64, batch=1, heads=2, head_dim=8, dtype="float32")
    entrants = {
        "dies": processes.Contender(os._exit, (1,)),
        "fails": processes.Contender(int, ("x",)),
        "large": processes.Contender(int, ("x",), needed_bytes=2.0**80),
        "runs": contenders.contender(shape, contenders.Way("reference", None)),
    }
    rows = attention.compare_contenders(shape, entrants, ["dies"], rounds=1, turn_seconds=0.1)
    reasons = {row["contender"]: row["failed"] for row in rows}
    assert "died" in reasons["dies"]
    assert "invalid literal for int() with base 10: 'x'" in reasons["fails"]
    assert "GiB are available" in reasons["large"] or not pathlib.Path("/proc/meminfo").exists()
    assert reasons["runs"] is None
    assert rows[-1]["both_of_peers"] == {"dies": None}
    assert "fails could not run: ValueError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["attention", "--backends=fast", "--lengths=64"],
            "unknown attention backend 'fast'; use auto, ",
        ),
        (["attention", "--lengths=64,abc"], "--lengths=64,abc must be whole numbers above 0"),
        (["decode", "--lengths=0"], "--lengths=0 must be whole numbers above 0"),
        (["train", "--peer=torch,jax"], "unknown peer 'jax'; use torch, torch_rotary, "),
        (["train", "--shapes=none", "--lengths=-8"], "--lengths=-8 must be whole numbers above 0"),
        (
            ["train", "--lengths=24", "--batch_tokens=64"],
            "--batch_tokens=64 must be a multiple of the length 24",
        ),
        (["positions", "--positions=alibbi"], "unknown position method 'alibbi'"),
        (["data", "--tokenizers=words,byte"], "unknown tokenizer 'byte'; use bytes, words, bpe"),
        (["evaluate", "--batch_tokens="], "--batch_tokens= must be whole numbers above 0"),
        (["evaluate", "--rounds=0"], "--rounds=0 must be at least 1"),
        (["adaptive", "--size=paper", "--peer=torch"], "--peer=torch has no step of --size=paper"),
        (
            ["adaptive", "--json={tmp_path}/absent/rows.json"],
            "--json={tmp_path}/absent/rows.json can't be written",
        ),
        (["adaptive", "--json={tmp_path}"], "--json={tmp_path} can't be written"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(
    monkeypatch, capsys, tmp_path, words, message
):
    monkeypatch.setattr(
        sys, "argv", ["benchmark.py", *(word.format(tmp_path=tmp_path) for word in words)]
    )
    assert load("__main__").main() == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message.format(tmp_path=tmp_path)}")
    assert error.count("\n") == 1


def test_a_position_method_is_trained_and_scored(tiny_config):
    step = load("positions").position_step(tiny_config(position="kerple_log", model__num_layers=1))
    for part in ("run", "score"):
        step.parts[part](2)
    assert step.facts["step_memory_bytes"] > 0


def test_a_step_is_profiled_by_its_parts(tiny_config, monkeypatch, capsys):
    """In a real trace no part of the model is missing, products are in their parts, and shares make
    a whole.
    """
    profile = load("profile")
    monkeypatch.setattr(profile, "keep_freed_memory", lambda: None)  # for the process of all tests
    # Collectives of many steps in flight on fake devices wait for each other's threads.
    monkeypatch.setattr(profile, "warm_up", lambda run: run(2))
    monkeypatch.setitem(
        profile.SHAPES,
        "tiny",
        lambda arg: tiny_config(model__num_layers=1, **dict([arg.split("=")])),
    )
    rows = profile.profile(argparse.Namespace(shapes="tiny", position="rotary", rounds=2))
    assert {row["part"] for row in rows} - {"other"} == {*profile.PARTS} - {"other"}
    # kernels, not seconds: a stall of the machine lengthens one
    others = sum(row["kernels"] for row in rows if row["part"] == "other")
    assert others < 0.1 * sum(row["kernels"] for row in rows)
    products = {(row["part"], row["pass"]) for row in rows if row["kind"] == "with products"}
    of_weights = ("projections of attention", "attention", "feed-forward", "embedding and loss")
    assert products == {(part, way) for part in of_weights for way in ("forward", "backward")}
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert "| feed-forward" in capsys.readouterr().out


def test_attention_that_costs_nothing_keeps_its_projections(tiny_config, monkeypatch):
    """XLA would not compute an array without a part in the loss: then the projections would count
    as attention.
    """
    monkeypatch.setitem(BACKENDS, "reference", BACKENDS["reference"])
    step = load("training_contenders").step_without_attention(tiny_config(model__num_layers=1), 256)
    step.parts["run"](1)
    query, key, value = 1.0 + np.random.default_rng(0).random((3, 1, 4, 2, 8), np.float32)
    gradient = jax.jit(
        jax.grad(lambda *arrays: attend(*arrays, backend="reference").sum(), (0, 1, 2))
    )
    for got, expected in zip(
        gradient(query, key, value), (key, query, np.ones_like(value)), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_the_work_of_a_sliding_window_is_counted():
    """L = 4, S = 1, one layer, width 64: keys and values of 4 tokens; the rest of a token; a head
    of 2,002 rows.
    """
    evaluate = load("evaluate")
    config = replaced(evaluate.small_config(), {"model.num_layers": 1})
    keys_and_values = 4 * 2 * 2 * 64 * 64
    of_one = 2 * 2 * 64 * 64 + 2 * 2 * 64 * 256  # its query and out; feed-forward
    attention, head = 2 * 2 * 64 * 4, 2 * 64 * 2002
    assert evaluate.window_flops(config, 4, 1) == keys_and_values + of_one + attention + head


def test_the_peer_of_generation_is_the_same_model(tiny_config):
    """With the same parameters it has the same logits and likeliest tokens, eager and through all slots."""
    torch = pytest.importorskip("torch")
    peer, decoders = load("torch_generation"), load("torch_peer")
    config = tiny_config(position="alibi", model__num_heads=2)
    model = build_model(config, 40)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32))["params"]
    tokens = np.random.default_rng(0).integers(0, 40, (2, 9))

    decoder = decoders.FusedDecoder(config, 40)
    decoder.load_state_dict(fused_state(params, config))
    cached = peer.CachedDecoder(decoder, config, 2, 9)
    expected = np.asarray(jax.jit(model.apply)({"params": params}, tokens))
    with torch.inference_mode():
        cached(torch.from_numpy(tokens[:, :6]), 0)
        for slot in range(6, 9):
            token = torch.from_numpy(tokens[:, slot : slot + 1])
            for place in (slot, torch.tensor([slot])):
                likeliest, logits = cached(token, place)
                np.testing.assert_allclose(logits, expected[:, slot], atol=1e-5)
                np.testing.assert_array_equal(likeliest[:, 0], expected[:, slot].argmax(axis=-1))


def test_making_tokens_is_timed_beside_plain_loops(monkeypatch, capsys):
    data = load("data")
    monkeypatch.setattr(data, "in_process", lambda call, *arguments: call(*arguments))
    rows = data.compare_tokenizers(
        argparse.Namespace(text=None, megabytes=1, workers="1", tokenizers="words", rounds=1)
    )
    assert [(row["contender"], row["megabytes"]) for row in rows] == [
        ("split + dict", 1), ("words, 1 workers", 1)
    ]  # fmt: skip
    assert all(0 < row["mb_per_core_second"] < 1e5 for row in rows)
    assert "| words, 1 workers |" in capsys.readouterr().out


def test_cycles_are_counted_by_part_and_loops_times_their_rounds():
    """The lines of a program that libtpu compiled, cut to what is read; kernels have no cycles."""

    def line(name, cycles, scope):
        return (
            f'  %{name} = f32[8] fusion(%a), calls=%f, metadata={{op_name="jit(update)/{scope}"}}, '
            f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
        )

    program = "\n".join(
        [
            "%known (p: s32[]) -> pred[] {",
            "  %limit = s32[]{:T(128)} constant(8)",
            "  ROOT %less = pred[] compare(%p, %limit), direction=LT",
            "}",
            "%unknown (p: s32[]) -> pred[] {",
            "  ROOT %less = pred[] compare(%p, %q), direction=LT",
            "}",
            "%body (p: s32[]) -> s32[] {",
            line("loss", 10, "jvp(DecoderLM.token_nll)/while/body/dot"),
            "}",
            "ENTRY %main_spmd (p: s32[]) -> s32[] {",
            line("up", 100, "jvp(DecoderLM)/layers_0/up/dot_general"),
            line("out", 1000, "transpose(jvp(DecoderLM))/layers_0/attention/out/dot_general"),
            '  %kernel = custom-call(%a), custom_call_target="tpu_custom_call", frontend={"a":{',
            '}}, metadata={op_name="jit(update)/layers_0/attention/pallas_call"}',
            "  %w = s32[] while(%t), condition=%known, body=%body",
            "  %v = s32[] while(%t), condition=%unknown, body=%body",
            line("adam", 7, "mul"),
            "}",
        ]
    )
    cycles, unknown = load("compiled").cycles_by_part(program)
    assert {part: count for part, count in cycles.items() if count} == {
        "feed-forward": 100,
        "projections of attention": 1000,
        "embedding and loss": 8 * 10 + 10,
        "optimizer": 7,
    }
    assert unknown == 1
