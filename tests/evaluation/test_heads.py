"""Measures of heads, each beside its definition in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import make_config
from alibi.evaluation import head_sums
from alibi.evaluation.heads import HeadBias, HeadLoss, Heads
from alibi.generation.decoding import unrolled
from alibi.model.decoder import build_model
from alibi.reporting.figures import map_figure
from alibi.reporting.panels import panel_groups
from alibi.reporting.report import write_report
from alibi.runs.trained import TrainedRun
from tests.evaluation.runs import make_run, options_of, rows_of
from tests.reporting.rowmaker import append_rows

TEXT = np.random.default_rng(0).integers(97, 123, 150).astype(np.uint8)
WINDOWS = np.append(10, TEXT)[17 + 50 * np.arange(3)[:, None] + np.arange(16)].astype(np.int32)
TARGETS = TEXT[17 + 50 * np.arange(3)[:, None] + np.arange(16)].astype(np.int32)
SLOPES = np.array([1 / 16, 1 / 256])
TINY = "length=16,model.num_layers=1,model.width=16,model.num_heads=2,model.feed_forward=16"
EVALUATORS = tuple(kind(head_tokens=48) for kind in (Heads, HeadLoss, HeadBias))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    (folder / "text.txt").write_bytes(TEXT.tobytes())
    layers = "model.num_layers=2"
    others = f"{layers},model.window=8,model.normalizer=softmax1,model.num_kv_heads=1,model.scan_layers=True"
    return [
        make_run(folder, "alibi", "plain", keys=layers),
        make_run(folder, "alibi", "others", keys=others + ",model.remat=True"),
    ]


@pytest.fixture(scope="module")
def measured(runs, tmp_path_factory):
    """The rows of both runs. Blocks have 3 queries of 16, and the last one 1."""
    out = tmp_path_factory.mktemp("out")
    options = dataclasses.replace(options_of(out, (16,)), evaluators=EVALUATORS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_sums, "BLOCK_WEIGHTS", 3 * 2 * 2 * 16)
        return {(row.run, row.evaluator): row for row in rows_of(runs, options)}


@functools.cache
def attention(workdir):
    """The weights and the outputs of the heads of each layer, from the projections and the formula."""
    run, layers = TrainedRun(workdir), []
    config = run.config.model
    model, params = unrolled(run.model, run.params)
    apply = jax.jit(functools.partial(model.apply, capture_intermediates=True))
    _, state = apply({"params": params}, WINDOWS)
    distance = np.arange(16)[:, None] - np.arange(16)
    seen = (distance >= 0) & (distance < (config.window or 16))
    for layer in range(2):
        found = state["intermediates"][f"layers_{layer}"]["attention"]
        query, key, value = (
            np.asarray(found[name]["__call__"][0], np.float64) for name in ("query", "key", "value")
        )
        key, value = (np.broadcast_to(x, query.shape) for x in (key, value))
        logits = np.einsum("rqhd,rkhd->rhqk", query, key) / np.sqrt(query.shape[-1])
        logits = np.where(seen, logits - SLOPES[:, None, None] * distance, -np.inf)
        weights = np.exp(logits)
        weights /= weights.sum(axis=-1, keepdims=True) + (config.normalizer == "softmax1")
        layers.append((weights, np.einsum("rhqk,rkhd->rqhd", weights, value)))
    return layers


@pytest.mark.parametrize("number", [0, 1])
def test_statistics_are_those_of_the_whole_weights(runs, measured, number):
    results = measured[runs[number].name, "heads"].results
    sink, window, distance = (
        number == 1,
        8 if number else 16,
        np.arange(16)[:, None] - np.arange(16),
    )
    expected = {name: [] for name in results if name not in ("heads", "local", "slope")}
    assert ("none" in expected) == sink
    for weights, _ in attention(runs[number]):
        total = weights.sum(axis=-1)
        share = weights / total[..., None]
        entropy = -np.sum(share * np.log(np.where(share > 0, share, 1)), axis=-1)[:, :, 1:]
        count = np.minimum(np.arange(1, 17), window)[1:]
        beyond = np.where(distance > 8, weights, 0).sum(axis=-1)
        of_layer = {
            "distance": (share * distance).sum(axis=-1).mean(axis=(0, 2)),
            "entropy": (entropy / np.log(count)).mean(axis=(0, 2)),
            "first": weights[..., 0].mean(axis=(0, 2)),
            "near": np.where(distance < 8, weights, 0).sum(axis=-1).mean(axis=(0, 2)),
            "newest 64": total.mean(axis=(0, 2)),
            "newest L": total.mean(axis=(0, 2)),
            "far": beyond.max(axis=(0, 2)),
            "none": (1 - total).mean(axis=(0, 2)),
        }
        for name, values in expected.items():
            values.extend(of_layer[name])
    assert results["heads"] == 2
    assert results["slope"] == pytest.approx([*SLOPES, *SLOPES])
    for name, values in expected.items():
        assert results[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    assert results["local"] == np.mean(np.array(expected["far"]) <= 0.01)


@functools.partial(jax.jit, static_argnums=0)
def of_targets(model, params):
    logits = jax.nn.log_softmax(model.apply({"params": params}, jnp.asarray(WINDOWS)))
    return jnp.take_along_axis(logits, TARGETS[..., None], 2)


def nll(model, params):
    return -np.asarray(of_targets(model, params), np.float64).mean()


@pytest.mark.parametrize("number", [0, 1])
def test_a_head_that_is_left_out_has_no_rows_in_the_output_projection(runs, measured, number):
    """A head at its mean adds a constant, as a bias of the projection does."""
    results, run = measured[runs[number].name, "head_loss"].results, TrainedRun(runs[number])
    model, params = unrolled(run.model, run.params)
    whole = nll(model, params)
    assert results["nats"] == pytest.approx(whole, rel=1e-6)
    for layer, (_, outputs) in enumerate(attention(runs[number])):
        for head in range(2):
            changed = jax.tree.map(np.array, params)
            out = changed[f"layers_{layer}"]["attention"]["out"]
            constant = outputs[:, :, head].mean(axis=(0, 1)) @ out["kernel"][head]
            out["kernel"][head] = 0
            place = 2 * layer + head
            assert results["zero"][place] == pytest.approx(nll(model, changed) - whole, abs=2e-6)
            out["bias"] += constant
            assert results["mean"][place] == pytest.approx(nll(model, changed) - whole, abs=2e-6)


def test_the_first_token_is_that_of_the_querys_document():
    """With zeros as parameters, each query weights its document's tokens alike."""
    model = build_model(make_config(f"position=none,{TINY}"), 256)
    tokens, segments = np.zeros((1, 6), np.int32), np.array([[3, 3, 3, 5, 5, 5]])
    params = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0), tokens)["params"])
    found = jax.jit(head_sums.attention_sums(model))(params, tokens, tokens, None, segments)
    for name, of_queries in (
        ("first", [1, 1 / 2, 1 / 3]),
        ("distance", [0, 1 / 2, 1]),
        ("choices", [0, 1, 1]),
    ):
        np.testing.assert_allclose(found[name], np.full((1, 1, 2), 2 * sum(of_queries)), rtol=1e-6)


def test_the_bias_by_head_and_distance(runs, measured):
    """A window of 8 hides the distances from 8 on, and 16 tokens have distances up to 15."""
    for run in runs:
        bias = measured[run.name, "head_bias"].results["bias"]
        seen = (1, 2, 4, 8) if run.name == "plain" else (1, 2, 4)
        assert [tuple(x for x in curve if x is not None) for curve in bias] == [
            pytest.approx(tuple(-m * distance for distance in seen)) for m in (*SLOPES, *SLOPES)
        ]


@pytest.mark.parametrize("name", ["t5", "fox", "shaw"])
def test_a_block_of_queries_is_a_part_of_the_call(name, monkeypatch):
    """Biases are cut along the queries, whether they read positions, distances or content. A last block
    that begins earlier counts no query again.
    """
    model = build_model(make_config(f"position={name},{TINY}"), 256)
    params = jax.jit(model.init)(jax.random.key(0), WINDOWS)["params"]
    sums = []
    for queries in (5, 16):
        monkeypatch.setattr(head_sums, "BLOCK_WEIGHTS", queries * 3 * 2 * 16)
        sums.append(jax.jit(head_sums.attention_sums(model))(params, WINDOWS, TARGETS))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *sums)


def test_the_report_has_a_map_of_layers_by_heads(measured, tmp_path):
    rows = [row for (_, evaluator), row in measured.items() if evaluator == "heads"]
    append_rows(tmp_path / "results.jsonl", rows)
    write_report(tmp_path)
    report = (tmp_path / "report.md").read_text()
    assert "![heads by layer, in windows of 16](heads.png)" in report
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens beyond distance 8: plain 0%, others 100%." in report
    (group,) = panel_groups(rows)
    first, *others = map_figure(group)["concat"]
    assert len(others) == len(group) - 1
    values = [value for value in first["data"]["values"] if value["part"] == "plain"]
    assert [(value["run"], value["column"]) for value in values] == [
        ("head 1", 1), ("head 1", 2), ("head 2", 1), ("head 2", 2)
    ]  # fmt: skip
    distances = measured["plain", "heads"].results["distance"]
    assert [value["share"] for value in values] == [distances[i] for i in (0, 2, 1, 3)]
