"""Which ranges of context the figure shows: those whose mean is known well enough, whatever the others are."""

import pytest
from matplotlib.figure import Figure

from alibi.reporting.contexts import ByContext, draw_by_context
from alibi.reporting.rows import Scoring


def by_context(ends, length=8, stride=8, run="run"):
    """Rows of one scoring, by the end of their range: the mean of their 10 tokens, and half of its interval or None."""
    of, low, rows = Scoring(run, 1, "t", "c", length, stride), 0, []
    for end, (mean, half) in ends.items():
        between = None if half is None else (mean - half, mean + half)
        rows.append(ByContext(of, low + 1, end, 10, 10 * mean, between))
        low = end
    return rows


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws rows; returns the ends of the ranges that each line has, by its label, and the lowest end of a shade."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure) or path.touch())

    def draw(rows):
        draw_by_context(rows, tmp_path / "by_context.png")
        figure = figures.pop()
        (axes,) = figure.get_axes()
        figure.draw_without_rendering()
        (legend,) = (one.get_window_extent() for one in figure.legends)
        assert legend.y1 <= axes.get_tightbbox().y0, "the legend covers no line"
        assert 0 <= legend.x0 < legend.x1 <= figure.bbox.x1, "and lies in the figure"
        shades = [shade.get_datalim(axes.transData) for shade in axes.collections if shade.get_paths()]
        lines = {line.get_label(): [float(end) for end in line.get_xdata()] for line in axes.get_lines()}
        return lines, min((shade.y0 for shade in shades), default=None)

    return draw


KNOWN = {1: (6.0, 0.25), 2: (5.5, 0.2), 4: (5.25, 0.1), 8: (5.0, 0.05)}


def test_a_mean_stands_in_its_interval(drawn):
    assert drawn(by_context(KNOWN)) == ({"L = 8": [1, 2, 4, 8]}, 4.95)


def test_a_range_is_drawn_up_to_a_tenth_of_the_surest_cost(drawn):
    """That is 5.75 here, of the range whose interval is from 5.75 to 6.25: a half-width of 0.2875 is its tenth."""
    assert drawn(by_context(KNOWN | {4: (5.25, 0.287)}))[0] == {"L = 8": [1, 2, 4, 8]}
    assert drawn(by_context(KNOWN | {4: (5.25, 0.288)}))[0] == {"L = 8": [1, 2, 8]}
    assert drawn(by_context(KNOWN | {4: (5.25, None)}))[0] == {"L = 8": [1, 2, 8]}


def test_noise_does_not_raise_what_it_is_measured_by(drawn):
    """Of a few tokens each, and so with means from 3 to 12: the spread of all means would let all of them in."""
    noise = {1: (12.0, 7.0), 2: (3.0, 2.5), 4: (9.0, 4.0), 8: (6.5, 1.0), 16: (5.0, 0.06)}
    lines, lowest = drawn([*by_context(KNOWN), *by_context(noise, length=16, stride=16)])
    assert lines == {"L = 8": [1, 2, 4, 8], "L = 16": [16]}
    assert lowest == pytest.approx(4.94)


def test_the_first_tokens_of_a_sliding_window_raise_nothing_either(drawn):
    """There is one of each, in one piece of the text, so without an interval; the level is its last range's."""
    sliding = {1: (2.0, None), 2: (14.0, None), 8: (5.0, 0.05)}
    noise = {1: (9.0, 2.0), 16: (5.0, 0.06)}
    rows = [*by_context(KNOWN), *by_context(noise, 16, 16), *by_context(sliding, stride=1)]
    assert drawn(rows)[0] == {"L = 8": [1, 2, 4, 8], "L = 16": [16], "L = 8, stride 1": [0, 1]}


def test_small_costs_are_drawn_beside_a_great_one(drawn):
    """Where the last tokens cost next to nothing, an interval may be wide beside its mean and narrow in the figure."""
    assert drawn(by_context({1: (3.0, 0.1), 8: (0.05, 0.04)}))[0] == {"L = 8": [1, 8]}


def test_names_of_several_runs_have_room_below(drawn):
    names = [f"rotary-frequencies-L128-seed{seed}-position_options.share=0.75" for seed in (0, 1)]
    rows = [row for name in names for stride in (8, 1) for row in by_context(KNOWN, stride=stride, run=name)]
    labels = [f"{name}, L = 8{end}" for name in names for end in ("", ", stride 1")]
    assert drawn(rows)[0].keys() == set(labels)


def test_without_intervals_there_are_only_levels(drawn):
    rows = [*by_context({8: (5.0, None)}), *by_context({8: (5.0, None)}, stride=1)]
    assert drawn(rows) == ({"L = 8": [], "L = 8, stride 1": [0, 1]}, None)
