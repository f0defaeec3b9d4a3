"""The report's files and the figure: what is drawn, and that it can be read."""

import dataclasses
import itertools
import struct

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alibi.positions import METHODS
from alibi.reporting import plots, tables
from alibi.reporting.plots import (
    COLOURS,
    DOTS_PER_INCH,
    FONT_SIZE,
    KNOWN_METHODS,
    draw_axes,
    draw_context_use,
    draw_extrapolation,
    perplexity_ticks,
    spread,
    train_lengths,
)
from alibi.reporting.report import panels, passkey_tables, write_report
from alibi.reporting.rows import ContextUse
from tests.reporting.rowmaker import append_rows, make_row

CURVES = {"sinusoidal": [8.0, 80.0, 800.0], "alibi": [8.1, 7.9, 7.8], "learned": [8.2, None, None]}
ROWS = [
    make_row(position, 128 * 2**i, value, **({} if value else {"error": "too long"}))
    for position, values in CURVES.items()
    for i, value in enumerate(values)
]


@pytest.fixture
def axes():
    axes = Figure().add_subplot()
    draw_axes(axes, panels(ROWS)[0])
    return axes


def test_one_line_a_method_with_colour_and_marker_of_its_own(axes):
    lines = [line for line in axes.get_lines() if line.get_label() in CURVES]
    assert {line.get_label(): list(line.get_ydata()) for line in lines} == {
        "sinusoidal": [8.0, 80.0, 800.0],
        "alibi": [8.1, 7.9, 7.8],
        "learned": [8.2],
    }
    for style in ("get_color", "get_marker"):
        assert len({getattr(line, style)() for line in lines}) == 3, style


def test_both_axes_are_logarithmic_with_the_lengths_as_ticks_and_l_marked(axes):
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["128", "256", "512"]
    texts = [text.get_text() for text in axes.texts]
    assert "trained at L = 128" in texts
    assert any(list(line.get_xdata()) == [128, 128] for line in axes.get_lines())
    assert {"sinusoidal", "alibi", "learned (to 128)"} <= set(texts)


@pytest.mark.parametrize(
    ("lengths", "written"),
    [
        ((64, 512), ["trained at L = 64", "trained at L = 512"]),
        ((64, 128, 512), ["dotted: lengths of training", "", ""]),
    ],
)
def test_train_lengths_are_written_where_they_do_not_run_into_each_other(lengths, written):
    rows = [make_row("alibi", at, 8.0, run=f"alibi-L{of}", train_length=of) for of in lengths for at in (64, 512, 1024)]
    assert train_lengths(panels(rows)[0]) == dict(zip(lengths, written, strict=True))


def test_a_method_looks_the_same_in_every_figure():
    def colour(rows):
        axes = Figure().add_subplot()
        draw_axes(axes, panels(rows)[0])
        return next(line.get_color() for line in axes.get_lines() if line.get_label() == "alibi")

    assert colour(ROWS) == colour(ROWS[3:6])


def test_a_method_with_options_is_called_by_its_run():
    """Else a windowed run would look like the method itself."""
    axes = Figure().add_subplot()
    rows = [*ROWS[3:6], *(make_row("sinusoidal", 128 * 2**i, 8.0 + i, run="sinusoidal-window") for i in range(3))]
    draw_axes(axes, panels(rows)[0])
    assert {"sinusoidal-window", "alibi"} <= {line.get_label() for line in axes.get_lines()}


@pytest.mark.parametrize("shown", [("alibi", "sinusoidal"), tuple(METHODS)])
def test_every_method_has_a_style_of_its_own_and_so_has_a_new_one(shown):
    """A method is a file, a registry line and a test: a figure needs no further list of them."""
    axes = Figure().add_subplot()
    draw_axes(axes, panels([make_row(position) for position in ("new", *shown, "newer")])[0])
    styles = {
        line.get_label(): (line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.get_lines()
    }
    shown_styles = [styles[position] for position in ("new", *shown, "newer")]
    assert len(set(shown_styles)) == len(shown) + 2
    for position in set(shown) & set(KNOWN_METHODS):
        assert styles[position][0] == COLOURS[KNOWN_METHODS.index(position)]
    if len(shown) + 2 <= len(COLOURS):
        assert len({colour for colour, _, _ in shown_styles}) == len(shown) + 2


def test_fonts_are_legible_on_a_projector():
    # The figure is 10 inches wide; the smallest text is one point below FONT_SIZE.
    assert FONT_SIZE - 1 >= 14


@pytest.mark.parametrize(("low", "high"), [(7.7, 8.4), (5, 900), (18.2, 20.1), (1, 1e9), (2.5, 12)])
def test_there_are_enough_round_ticks_in_any_range(low, high):
    ticks = perplexity_ticks(low, high)
    assert 4 <= len(ticks) <= 12
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(ticks)


def test_labels_keep_their_order_and_distance_and_stay_inside():
    placed = spread([0.1, 0.1, 0.12, 0.99, 1.0], [0.06] * 5)
    assert all(b - a >= 0.06 - 1e-9 for a, b in itertools.pairwise(placed))
    assert placed[-1] <= 1.0
    assert placed[0] == 0.1


def test_report_with_tables_figure_and_failures(tmp_path):
    append_rows(tmp_path / "results.jsonl", [*ROWS, make_row(split="test"), make_row("t5", split="test")])
    text = write_report(tmp_path, "A title", {"t5-L128": "no memory\nleft"})
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# A title\n\n**Perplexity by evaluation length: books, split valid")
    assert "- t5-L128: no memory left" in report
    assert "**Bits per byte" in report
    for name in ("extrapolation.png", "extrapolation-books-test.png"):
        assert f"({name})" in report
        assert str(tmp_path / name) in text
        header = (tmp_path / name).read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        assert struct.unpack(">II", header[16:]) == (10 * DOTS_PER_INCH, 6 * DOTS_PER_INCH)
    assert not list(tmp_path.glob("*.tmp"))


def test_without_rows_there_is_no_report(tmp_path):
    assert "no results" in write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_report_without_rows_says_why_there_are_none(tmp_path):
    write_report(tmp_path, failures={"t5-L128": "no memory left"})
    assert "- t5-L128: no memory left" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("kind", [tables.PERPLEXITY, tables.CONTEXT_GAIN], ids=["perplexity", "gain"])
def test_a_figure_of_many_methods_is_read_part_by_part_the_best_first(tmp_path, monkeypatch, kind):
    """Thirty names beside one chart could not be told apart, and a legend of them left no room for the lines."""
    names, drawn = [f"method-{number:02}" for number in range(17)], []
    order = [*names[8:], *names[:8]]
    rows = [
        make_row(name, length, (4.0 if length == 128 else 5.0 + rank), run=name)
        for rank, name in enumerate(order)
        for length in (128, 256)
    ]
    if kind is tables.CONTEXT_GAIN:
        gains = [0.0 if row.eval_length == 128 else 5.0 - row.perplexity for row in rows]
        uses = [ContextUse(100, 128, gain, (gain - 0.1, gain + 0.1)) for gain in gains]
        rows = [dataclasses.replace(row, context_use=use) for row, use in zip(rows, uses, strict=True)]
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure) or path.touch())
    draw = draw_context_use if kind is tables.CONTEXT_GAIN else draw_extrapolation
    (panel,) = panels(rows, kind)
    draw(panel, tmp_path / "figure.png")
    parts = [[name for name in _labels(axes) if name in names] for axes in drawn[0].axes]
    assert parts == [order[:5], order[5:11], order[11:]]
    highest = [axes.get_ylim()[1] for axes in drawn[0].axes]
    if kind is tables.PERPLEXITY:
        assert highest[0] < 10 < highest[1] < 17 < highest[2], "each part has its own scale"


def _labels(axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def test_keys_are_a_row_a_run_with_its_windows_together(tmp_path, monkeypatch):
    """Of rows in the order in which they were measured, and with a length that one run does not have."""
    rows = [
        make_row(position, length, mode="passkey", passkey={"distance": distance, "prompts": 9, "accuracy": share})
        for length, distance, position, share in (
            (128, 64, "alibi", 1.0),
            (128, 64, "rotary", 0.75),
            (256, 64, "alibi", 0.5),
            (256, 128, "alibi", 0.25),
        )
    ]
    (table,) = passkey_tables(rows)
    assert [(str(name), length) for name, length in table.labels] == [("alibi", 128), ("alibi", 256), ("rotary", 128)]
    drawn = []
    monkeypatch.setattr(Axes, "imshow", lambda axes, shares, **how: drawn.append(shares))
    plots.draw_passkeys(table, tmp_path / "passkey.png")
    for shares, expected in zip(drawn, ([[1.0], [0.75]], [[0.5, 0.25], [np.nan, np.nan]]), strict=True):
        np.testing.assert_array_equal(shares, expected)
