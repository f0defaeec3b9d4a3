"""The charts of the report's page, as Vega-Lite takes them."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from alibi.reporting import plots, tables
from alibi.reporting.curves import Point
from alibi.reporting.report import Panel, Series
from alibi.reporting.tables import Number

# Of Vega: the shapes of plots.MARKERS, and its dashes.
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-left", "triangle-right")
SIGNS = ("●", "■", "▲", "◆", "▼", "✚", "◀", "▶")  # the same as text
DASHES = ([1, 0], [8, 4], [8, 3, 2, 3], [2, 3], [8, 2, 2, 2, 2, 2])
COLOURS = (*plots.COLOURS[:-1], "currentColor")  # black on white, white on black
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name: nothing is loaded from there

Spec = dict[str, Any]
# A method that the page has switched off has no lines.
SHOWN = [{"filter": "indexof(off, datum.run) < 0"}]


def length_spec(panel: Panel, styles: Mapping[str, int]) -> Spec:
    """The chart of `panel` for Vega-Lite: lines over the evaluation length, with markers, bands and train lengths."""
    gain = panel.kind is tables.CONTEXT_GAIN
    values = [value for series in panel.series for value in _length_values(series)]
    title = panel.kind.title.lower() if gain else f"{panel.kind.title.lower()} (log scale)"
    ends = [length * factor for length, factor in zip((panel.lengths[0], panel.lengths[-1]), (0.9, 1.1), strict=True)]
    x = {
        "field": "length", "type": "quantitative", "title": "evaluation length in tokens (log scale)",
        "scale": {"type": "log", "base": 2, "domain": ends, "nice": False},
        "axis": {"values": panel.lengths, "format": ",d", "labelOverlap": "greedy"},
    }  # fmt: skip
    ticks: Spec = {"tickCount": 6, "format": "~r"}
    if values and not gain:
        least, most = min(value["low"] for value in values), max(value["high"] for value in values)
        ticks = {"values": plots.perplexity_ticks(0.95 * least, 1.05 * most), "format": ",~r"}
    scale = {"type": "symlog", "constant": 0.01} if gain else {"type": "log", "nice": False, "padding": 12}
    y = {
        "field": "value",
        "type": "quantitative",
        "title": title,
        "scale": scale,
        "axis": ticks,
    }
    spread: Spec = {"mark": {"type": "rule"} if gain else {"type": "area", "opacity": 0.2}}
    spread["encoding"] = {"y": y | {"field": "low"}, "y2": {"field": "high"}}
    tooltip = [
        {"field": "run", "title": "run"}, {"field": "length", "format": ",d", "title": "evaluation length"},
        {"field": "text", "title": panel.kind.title}, {"field": "ratio", "title": "of its own at L"},
        {"field": "seeds", "title": "seeds"},
    ]  # fmt: skip
    marks = {
        "data": {"values": [{"length": length, "text": text} for length, text in plots.train_lengths(panel).items()]},
        "encoding": {"x": x},
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [2, 3], "color": "currentColor", "opacity": 0.6}},
            {
                "mark": {"type": "text", "align": "left", "dx": 4, "y": 8, "color": "currentColor", "opacity": 0.8},
                "encoding": {"text": {"field": "text"}},
            },
        ],
    }
    of_method = _encoding([series.label for series in panel.series], styles)
    lines = {
        "transform": SHOWN,
        "encoding": {"x": x, "color": of_method["color"]},
        "layer": [
            spread,
            {"mark": {"type": "line", "strokeWidth": 2.5}, "encoding": {"y": y, "strokeDash": of_method["strokeDash"]}},
            {
                "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
                "encoding": {"y": y, "shape": of_method["shape"], "tooltip": tooltip},
            },
        ],
    }
    description = f"{panel.kind.title} by evaluation length, {panel.corpus}, split {panel.split}, on logarithmic axes"
    if gain:
        description = f"{panel.kind.title}, by evaluation length, {panel.corpus}, split {panel.split}"
    return _spec(description, values, [marks, lines])


def _length_values(series: Series) -> Iterable[dict[str, Any]]:
    """A series' points; numbers that a log scale has no place for are left to the table."""
    for length, cell in series.cells.items():
        if isinstance(cell, Number) and math.isfinite(cell.mean):
            low, high = plots.band(cell) if cell.kind.is_loss else cell.span
            yield {
                "run": series.label, "length": length, "value": cell.mean, "low": low, "high": high,
                "text": cell.text, "ratio": "" if cell.ratio is None else tables.write_ratio(cell.ratio),
                "seeds": len(cell.values),
            }  # fmt: skip


def training_spec(curves: Mapping[str, Sequence[Point]], labels: Mapping[str, str], styles: Mapping[str, int]) -> Spec:
    """The chart of the losses of runs over their updates; `labels` are what runs are called, by their names."""
    values = [
        {"run": labels[name], "name": name, **dataclasses.asdict(point)}
        for name, points in curves.items()
        for point in points
    ]
    x = {
        "field": "step",
        "type": "quantitative",
        "title": "updates",
        "axis": {"format": ",d"},
        "scale": {"nice": False},
    }
    y = {"field": "nats", "type": "quantitative", "title": "nats a token", "scale": {"zero": False}}
    looks = _encoding((value["run"] for value in values), styles)
    tooltip = [
        {"field": "name", "title": "run"}, {"field": "step", "format": ",d", "title": "updates"},
        {"field": "nats", "format": ".4f", "title": "nats a token"}, {"field": "split", "title": "text"},
    ]  # fmt: skip
    lines = {
        "transform": SHOWN,
        "encoding": {"x": x, "y": y, "color": looks["color"], "detail": {"field": "name"}, "tooltip": tooltip},
        "layer": [
            {"transform": [{"filter": "datum.split == 'train'"}], "mark": {"type": "line", "strokeWidth": 1.2}},
            {
                "transform": [{"filter": "datum.split == 'valid'"}],
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
                "encoding": {"shape": looks["shape"]},
            },
        ],
    }
    return _spec("Loss by updates of each run", values, [lines])


def _encoding(labels: Iterable[str], styles: Mapping[str, int]) -> dict[str, Spec]:
    """Colour, marker and dash of each method, the same in every chart; the page's checkboxes are their legend."""
    labels = list(dict.fromkeys(labels))
    looks: dict[str, Sequence[Any]] = {"color": COLOURS, "shape": SHAPES, "strokeDash": DASHES}
    return {
        channel: {
            "field": "run", "type": "nominal", "legend": None,
            "scale": {"domain": labels, "range": [all_[styles[label] % len(all_)] for label in labels]},
        }
        for channel, all_ in looks.items()
    }  # fmt: skip


def _spec(description: str, values: list[dict[str, Any]], layers: list[Spec]) -> Spec:
    return {
        "$schema": SCHEMA, "description": description, "width": "container", "height": 380,
        "params": [{"name": "off", "value": []}], "data": {"values": values}, "layer": layers,
    }  # fmt: skip
