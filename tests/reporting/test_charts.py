"""Charts show the numbers of their rows, each line in a style of its own, on readable axes."""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest

from alibi.evaluation.context_use import CONTEXT_GAIN
from alibi.evaluation.dumps import Dump
from alibi.evaluation.passkey import ACCURACY
from alibi.positions import METHODS
from alibi.reporting import tables
from alibi.reporting.charts import (
    COLOURS,
    KNOWN_METHODS,
    length_figure,
    png,
)
from alibi.reporting.figures import bias_figure, cell_figure, context_figure
from alibi.reporting.measure import Measure
from alibi.reporting.panels import build_table, panel_groups
from alibi.reporting.report import write_report
from alibi.reporting.tables import Kind, result
from tests.reporting.rowmaker import append_rows, make_gains, make_key, make_row, panels

CURVES = {"sinusoidal": [8.0, 80.0, 800.0], "alibi": [8.1, 7.9, 7.8], "learned": [8.2, None, None]}
ROWS = [
    make_row(position, 128 * 2**i, value, **({} if value else {"error": "too long"}))
    for position, values in CURVES.items()
    for i, value in enumerate(values)
]


def figure_of(rows):
    return length_figure(panels(rows)[0])


def styles_of(spec):
    """Colour, marker and dash of each line."""
    lines = spec["layer"][-1]
    found = [
        lines["encoding"]["color"],
        lines["layer"][2]["encoding"]["shape"],
        lines["layer"][0]["encoding"]["strokeDash"],
    ]
    looks = [dict(zip(one["scale"]["domain"], one["scale"]["range"], strict=True)) for one in found]
    return {run: tuple(str(look[run]) for look in looks) for run in looks[0]}


def test_each_line_has_its_numbers_and_a_style_and_the_legend_their_order():
    spec = figure_of(ROWS)
    values = {(value["run"], value["length"]): value["value"] for value in spec["data"]["values"]}
    expected = {
        (row.position, row.length): row.results["perplexity"] for row in ROWS if row.results
    }
    assert values == expected
    styles = styles_of(spec)
    assert [*styles] == ["sinusoidal", "learned", "alibi"], "from the highest last number down"
    for column in zip(*styles.values(), strict=True):
        assert len(set(column)) == 3
    assert spec["layer"][-1]["encoding"]["color"]["legend"] == {}


def test_both_axes_are_logarithmic_with_the_lengths_as_ticks_and_l_marked():
    marks, lines = figure_of(ROWS)["layer"]
    x, y = lines["encoding"]["x"], lines["layer"][0]["encoding"]["y"]
    assert (x["scale"]["type"], y["scale"]["type"]) == ("log", "log")
    assert x["axis"]["values"] == [128, 256, 512]
    assert marks["data"]["values"] == [{"length": 128}]
    assert x["title"][-1] == "dotted: trained at 128"


def test_an_endless_band_leaves_the_lines_readable():
    """For 8 and 800 by two seeds the interval is exp(4.4 +- 29.3), and for 8 and 9 it is 4 to 18."""
    rows = [make_row(seed=seed, perplexity=value) for seed, value in ((0, 8.0), (1, 9.0))]
    rows += [make_row("t5", seed=seed, perplexity=value) for seed, value in ((0, 8.0), (1, 800.0))]
    alibi, t5 = figure_of(rows)["data"]["values"][::-1]
    assert (t5["low"], t5["high"]) == (0.85, 4040.0), "a tenth of 8.5, and ten times 404"
    assert 4 < alibi["low"] < 4.1
    assert 17.9 < alibi["high"] < 18


def test_a_method_looks_the_same_in_every_figure_and_runs_of_one_method_differ():
    assert styles_of(figure_of(ROWS))["alibi"] == styles_of(figure_of(ROWS[3:6]))["alibi"]
    windowed = [
        make_row("sinusoidal", 128 * 2**i, 8.0 + i, run="sinusoidal-window") for i in range(3)
    ]
    assert styles_of(figure_of([*ROWS[3:6], *windowed])).keys() == {"sinusoidal-window", "alibi"}


@pytest.mark.parametrize("shown", [("alibi", "sinusoidal"), tuple(METHODS)[:10]])
def test_every_method_has_a_style_of_its_own_and_so_has_a_new_one(shown):
    """A method is a file, a registry line and a test: a figure needs no further list of them."""
    styles = styles_of(figure_of([make_row(position) for position in ("new", *shown, "newer")]))
    assert len(set(styles.values())) == len(shown) + 2
    for position in set(shown) & set(KNOWN_METHODS):
        assert styles[position][0] == COLOURS[KNOWN_METHODS.index(position)]


@pytest.mark.parametrize("kind", [tables.PERPLEXITY, CONTEXT_GAIN], ids=["perplexity", "gain"])
def test_a_figure_of_many_methods_is_read_part_by_part_the_best_first(kind):
    names = [f"method-{number:02}" for number in range(17)]
    order = [*names[8:], *names[:8]]
    rows = [
        make_row(name, length, (4.0 if length == 128 else 5.0 + rank), run=name)
        for rank, name in enumerate(order)
        for length in (128, 256)
    ]
    if kind is CONTEXT_GAIN:
        rows = [
            make_gains(name, {128: 0.0, 256: -float(rank)}, run=name)
            for rank, name in enumerate(order)
        ]
    spec = length_figure(panels(rows, kind)[0])
    expected = [order[:5], order[5:11], order[11:]]
    if kind is tables.PERPLEXITY:
        expected = [part[::-1] for part in expected]  # a legend is in the order of the numbers
    assert [list(styles_of(part)) for part in spec["concat"]] == expected


def test_keys_are_a_row_a_run_with_a_part_for_each_length_of_windows():
    """From rows in the order of measurement, with a length which a run lacks."""
    rows = [
        make_key(position, length, distance, share)
        for length, distance, position, share in (
            (128, 64, "alibi", 1.0),
            (128, 64, "rotary", 0.75),
            (256, 64, "alibi", 0.5),
            (256, 128, "alibi", 0.25),
        )
    ]
    (panel,) = panels(rows, ACCURACY)
    assert list(build_table(panel).labels) == [("alibi", 128), ("alibi", 256), ("rotary", 128)]
    spec = cell_figure(panel)
    found = [
        (one["run"], one["part"], one["column"], one["text"]) for one in spec["data"]["values"]
    ]
    assert found == [
        ("alibi", "window 128", 64, "100%"),
        ("rotary", "window 128", 64, "75%"),
        ("alibi", "window 256", 64, "50%"),
        ("alibi", "window 256", 128, "25%"),
    ]
    assert spec["facet"]["column"]["sort"] == ["window 128", "window 256"]
    assert png(spec).startswith(b"\x89PNG")


@dataclasses.dataclass(frozen=True)
class Sink(Measure):
    """A number that is no share, and no loss by length."""

    kinds: ClassVar = (Kind("Weight of the first key", "{:.1f}".format, value=result("weight")),)
    labels: ClassVar = ("layer", "head")
    across: ClassVar = "layer"


class Task(Sink):
    labels: "ClassVar[Absent]" = ()  # noqa: F821 - as of an import for type checkers alone


@pytest.mark.parametrize(
    ("evaluator", "cells", "titles"),
    [
        (Sink, [{"layer": 1, "head": 2, "length": 8}, {"layer": 1, "head": 3, "length": 8}],
         ["layer 1, head 2", "layer 1, head 3"]),
        (Task, [{"task": "lambada"}, {"task": "wikitext"}], [""]),
    ],
)  # fmt: skip
def test_numbers_that_are_no_shares_and_no_lengths_are_cells(tmp_path, evaluator, cells, titles):
    known = {"evaluator": f"{__name__}:{evaluator.__name__}"}
    rows = [
        make_row(**known, cell=cell, results={"weight": weight})
        for cell, weight in zip(cells, (2.0, 6.0), strict=True)
    ]
    ((panel,),) = panel_groups(rows)
    spec = cell_figure(panel)
    assert spec["facet"]["column"]["sort"] == titles
    rect, text = spec["spec"]["layer"]
    assert rect["encoding"]["color"]["scale"]["domain"] == [2.0, 6.0]
    assert text["encoding"]["color"]["condition"]["test"] == "datum.share < 4.0"
    append_rows(tmp_path / "results.jsonl", rows)
    assert "Weight of the first key" in write_report(tmp_path)
    assert (tmp_path / f"{evaluator.__name__}.png").read_bytes().startswith(b"\x89PNG")
    failed = [make_row(**known, cell=cell, results={}, error="none") for cell in cells]
    assert png(cell_figure(panel_groups(failed)[0][0])).startswith(b"\x89PNG")


def test_a_bias_is_relative_to_the_querys_own_key_and_hidden_keys_are_white():
    pictures, curves = bias_figure("name", np.arange(9.0).reshape(1, 3, 3), causal=True)["vconcat"]
    (cells,) = (part["data"]["values"] for part in pictures["hconcat"])
    assert {(cell["q"], cell["k"]): cell["added"] for cell in cells} == {
        (0, 0): 0, (1, 0): -1, (1, 1): 0, (2, 0): -2, (2, 1): -1, (2, 2): 0
    }  # fmt: skip
    assert [(value["distance"], value["added"]) for value in curves["data"]["values"]] == [
        (2, -2),
        (1, -1),
        (0, 0),
    ]
    pictures, _ = bias_figure("name", np.zeros((2, 130, 130)), causal=False)["vconcat"]
    assert [len(part["data"]["values"]) for part in pictures["hconcat"]] == [44**2] * 2, (
        "every third token"
    )


def by_context(ends, length=8, stride=8, run="run"):
    """Returns the rows of a scoring; by the end of a range: the mean of its 10 tokens, half of its
    interval or None.
    """
    options = {} if stride == length else {"stride": stride}
    known = {"run": run, "step": 1, "tokens_sha256": "t", "config_hash": "c", "options": options}
    row = make_row(length=length, perplexity=None, **known)
    dump, low, rows = Dump(row, np.zeros(0, np.float32), np.zeros(0, np.int32)), 0, []
    for end, (mean, half) in ends.items():
        known = {"context_from": low + 1, "context_to": end, "tokens": 10, "nll_nats": 10 * mean}
        rows.append(dump.line("by_context", **known, interval=half and (mean - half, mean + half)))
        low = end
    return rows


def drawn(rows):
    """The ends of the ranges of each line, by its label, and the levels of sliding windows."""
    spec = context_figure(rows)
    lines = {label: [] for label in spec["encoding"]["color"]["scale"]["domain"]}
    for point in spec["data"]["values"]:
        lines[point["run"]].append(point["context"])
    return lines, [level["nats"] for level in spec["layer"][-1]["data"]["values"]]


KNOWN = {1: (6.0, 0.25), 2: (5.5, 0.2), 4: (5.25, 0.1), 8: (5.0, 0.05)}


def test_a_mean_lies_in_its_interval():
    spec = context_figure(by_context(KNOWN))
    assert [(point["low"], point["high"]) for point in spec["data"]["values"]] == [
        (5.75, 6.25), (5.3, 5.7), (5.15, 5.35), (4.95, 5.05)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("half", "shown"), [(0.287, [1, 2, 4, 8]), (0.288, [1, 2, 8]), (None, [1, 2, 8])]
)
def test_a_range_is_drawn_up_to_a_tenth_of_the_surest_cost(half, shown):
    """It is 5.75 here, from the interval 5.75 to 6.25: a half-width of 0.2875 is its tenth."""
    assert drawn(by_context(KNOWN | {4: (5.25, half)}))[0] == {"L = 8": shown}


def test_a_sliding_window_is_the_level_of_its_last_range():
    sliding = {1: (2.0, None), 2: (14.0, None), 8: (5.0, 0.05)}
    rows = [*by_context({8: (5.0, None)}), *by_context(sliding, stride=1)]
    assert drawn(rows) == ({"L = 8": [], "L = 8, stride 1": []}, [5.0])


def test_lines_are_named_by_differing_facts():
    rows = [
        row
        for run in ("a", "b")
        for stride in (8, 1)
        for row in by_context(KNOWN, stride=stride, run=run)
    ]
    assert drawn(rows)[0].keys() == {
        f"{run}, L = 8{end}" for run in ("a", "b") for end in ("", ", stride 1")
    }
    alike = [
        line | {"trained_on": text} for text in ("1" * 64, "2" * 64) for line in by_context(KNOWN)
    ]
    assert drawn(alike)[0].keys() == {
        f"L = 8, config c, trained on {text}" for text in ("111111", "222222")
    }
    assert png(context_figure(rows)).startswith(b"\x89PNG")
