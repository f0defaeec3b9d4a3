"""Charts over lengths and updates as Vega-Lite specifications, and their PNG files."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from alibi.extras import needs
from alibi.reporting import tables
from alibi.reporting.panels import Panel, Series
from alibi.reporting.tables import Number

# Okabe and Ito's palette (jfly.uni-koeln.de/color), distinct under every common colour blindness,
# without its yellow, which is too pale on white. Marker and dash differ as well, for print without
# colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "currentColor")
SHAPES = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "triangle-down",
    "cross",
    "triangle-left",
    "triangle-right",
)
SIGNS = ("●", "■", "▲", "◆", "▼", "✚", "◀", "▶")  # the shapes as text
DASHES = ([1, 0], [8, 4], [8, 3, 2, 3], [2, 3], [8, 2, 2, 2, 2, 2])

# These methods have the style of their place in this list, unless a chart shows a method twice;
# other methods take the remaining styles.
KNOWN_METHODS = ("alibi", "sinusoidal", "rotary", "t5", "learned", "none", "alibi_learned")

FONT_SIZE = 17  # pixels on a figure about 900 pixels wide: legible from the back of a lecture room
MOST_LINES = 12  # in a chart; more are drawn in several charts
LINES_OF_PART = 8  # in each of several charts
WIDEST = 10  # an interval is drawn from a tenth of the least mean to ten times the greatest

Spec = dict[str, Any]
VEGA_LITE = "6.1"
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name: nothing is loaded from there
# The page's parameter `off` lists the runs switched off by the reader.
OFF = [{"name": "off", "value": []}]
SHOWN = [{"filter": "indexof(off, datum.run) < 0"}]
# Characters, as JSON writes them, that no SVG or title may hold: the process is aborted at some, and
# Vega-Lite makes expressions of titles, in which a backslash begins an escape.
_UNDRAWN = re.compile(r'\\u....|\\[^"]|[\ud800-\udfff\ufffe\uffff\u2028\u2029]')
PNG_CONFIG = {
    "font": "Liberation Sans, Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelFontSize": FONT_SIZE, "titleFontSize": FONT_SIZE, "titleFontWeight": "normal", "gridColor": "#dddddd",
        "labelColor": "black", "titleColor": "black", "tickColor": "black", "domainColor": "black",
    },
    "title": {"fontSize": FONT_SIZE, "fontWeight": "normal", "offset": 24, "anchor": "middle"},
    "header": {"labelFontSize": FONT_SIZE, "title": None},
    "legend": {
        "labelFontSize": FONT_SIZE, "titleFontSize": FONT_SIZE, "labelLimit": 0, "title": None, "symbolOpacity": 1,
        "symbolSize": 110, "symbolStrokeWidth": 0,
    },
    "text": {"fontSize": FONT_SIZE},
}  # fmt: skip


def png(spec: Spec) -> bytes:
    """Returns the chart as a PNG file."""
    needs("a figure", "vl_convert")
    import vl_convert  # half a second to import

    whole = {"$schema": SCHEMA, "background": "white", "params": OFF, "config": PNG_CONFIG} | spec
    text = _UNDRAWN.sub("\ufffd", json.dumps(whole, ensure_ascii=False))
    return vl_convert.vegalite_to_png(
        text, vl_version=VEGA_LITE, scale=2 if "layer" in spec else 1.5
    )


def length_figure(panel: Panel) -> Spec:
    """Returns the figure of `panel`: its lines over the evaluation length.

    More lines than MOST_LINES are drawn in several charts, each with its own scale, the best ones
    first.
    """
    if len(panel.series) <= MOST_LINES:
        return named_lines(panel)
    series = sorted(panel.series, key=_last, reverse=not panel.kind.is_loss)
    count = math.ceil(len(series) / LINES_OF_PART)
    bounds = [index * len(series) // count for index in range(count + 1)]
    return {
        "concat": [
            named_lines(dataclasses.replace(panel, series=tuple(series[a:b])))
            for a, b in itertools.pairwise(bounds)
        ],
        "columns": 2,
        "spacing": 40,
        "title": f"{len(series)} lines by their last value, best first; each chart has its own scale",
        "resolve": apart("color", "shape", "strokeDash"),
    }


def named_lines(panel: Panel) -> Spec:
    """Returns all lines of `panel` in a single chart. Its legend has the order of their last values."""
    numbers = style_numbers([series.position for series in panel.series])
    styles = dict(zip((series.label for series in panel.series), numbers, strict=True))
    series = tuple(sorted(panel.series, key=_last, reverse=True))
    spec = length_chart(dataclasses.replace(panel, series=series), styles, legend={})
    return spec | {"width": 660, "height": 420}


def _last(series: Series) -> float:
    """Returns the number at the greatest length, or infinity without numbers."""
    means = [cell.mean for cell in series.cells.values() if isinstance(cell, Number)]
    return means[-1] if means else math.inf


def length_chart(panel: Panel, styles: Mapping[str, int], legend: Spec | None = None) -> Spec:
    """Returns lines over the evaluation length, with markers, intervals and train lengths.

    Args:
      styles: each line's number for colour, marker and dash.
      legend: as in Vega-Lite, defaults to none.
    """
    kind, covered = panel.kind, tables.spread_of(panel.numbers)
    trained = sorted({series.train_length for series in panel.series} - {0})  # 0 is an n-gram
    text_facts = panel.corpus, panel.split, panel.measure.axis()
    x: Spec = {
        "field": "length", "type": "quantitative",
        "title": [
            f"evaluation length in tokens ({', '.join(filter(None, text_facts))})",
            *filter(None, [panel.reading, covered and f"bands: {covered}"]),
            *([f"dotted: trained at {', '.join(f'{length:,}' for length in trained)}"] if trained else []),
        ],
        "scale": {"type": "log", "base": 2, "nice": False, "padding": 16},
        "axis": {"values": panel.columns, "format": ",d", "labelOverlap": "greedy", "labelSeparation": 6},
    }  # fmt: skip
    y: Spec = {
        "field": "value", "type": "quantitative",
        "title": kind.title.lower() + kind.axis,
        "scale": {"nice": False, "padding": 16, **kind.scale},
        "axis": {"tickCount": 6, "format": ",~r"},
    }  # fmt: skip
    tooltip = [
        {"field": "run", "title": "run"}, {"field": "length", "format": ",d", "title": "evaluation length"},
        {"field": "text", "title": kind.title}, {"field": "ratio", "title": "of its own at L"},
        {"field": "seeds", "title": "seeds"},
    ]  # fmt: skip
    channels = looks([series.label for series in panel.series], styles, legend)
    grey = {"color": "currentColor", "opacity": 0.6}
    marks: list[Spec] = [
        {
            "data": {"values": [{"length": length} for length in trained]},
            "mark": {"type": "rule", "strokeDash": [2, 3]} | grey,
            "encoding": {"x": x},
        }
    ]
    if not kind.is_loss:
        zero = {"data": {"values": [{"value": 0}]}, "mark": {"type": "rule"} | grey}
        marks.append(zero | {"encoding": {"y": y}})
    lines: Spec = {
        "transform": SHOWN,
        "encoding": {"x": x, "color": channels["color"]},
        "layer": [
            {
                "mark": {"type": "line", "strokeWidth": 2.5},
                "encoding": {"y": y, "strokeDash": channels["strokeDash"]},
            },
            {
                "mark": {"type": "area", "opacity": 0.15},
                "encoding": {"y": y | {"field": "low"}, "y2": {"field": "high"}},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
                "encoding": {"y": y, "shape": channels["shape"], "tooltip": tooltip},
            },
        ],
    }
    return {
        "description": f"{kind.title} by evaluation length, {panel.corpus}, split {panel.split}",
        "data": {"values": _length_values(panel)},
        "layer": [*marks, lines],
    }


def _length_values(panel: Panel) -> list[dict[str, Any]]:
    """Returns the points on all lines. An infinite mean has no place in a chart.

    A loss's interval ends at WIDEST times the means, since with two seeds it may have no end in sight.
    """
    drawn = [
        (series.label, length, cell)
        for series in panel.series
        for length, cell in series.cells.items()
        if isinstance(cell, Number) and math.isfinite(cell.mean)
    ]
    means = [cell.mean for *_, cell in drawn]
    values = []
    for label, length, cell in drawn:
        low, high = cell.interval.bounds if cell.interval else (cell.mean, cell.mean)
        if cell.kind.is_loss:
            low, high = max(low, min(means) / WIDEST), min(high, max(means) * WIDEST)
        values.append({
            "run": label, "length": length, "value": cell.mean, "low": low, "high": high,
            "text": cell.text, "ratio": "" if cell.ratio is None else tables.write_ratio(cell.ratio),
            "seeds": len(cell.values),
        })  # fmt: skip
    return values


def style_numbers(positions: Sequence[str]) -> list[int]:
    """Returns the place in COLOURS, SHAPES and DASHES of each series, given their position methods."""
    if len(set(positions)) < len(positions):
        return list(range(len(positions)))
    left = [index for index, method in enumerate(KNOWN_METHODS) if method not in positions]
    others = itertools.chain(reversed(left), itertools.count(len(KNOWN_METHODS)))
    return [
        KNOWN_METHODS.index(name) if name in KNOWN_METHODS else next(others) for name in positions
    ]


def looks(
    labels: Iterable[str], styles: Mapping[str, int], legend: Spec | None = None
) -> dict[str, Spec]:
    """Returns colour, marker and dash for each line, as Vega-Lite's channels. The legend has no dashes."""
    labels = list(dict.fromkeys(labels))
    ranges: dict[str, Sequence[Any]] = {"color": COLOURS, "shape": SHAPES, "strokeDash": DASHES}
    return {
        channel: {
            "field": "run", "type": "nominal", "legend": None if channel == "strokeDash" else legend,
            "scale": {"domain": labels, "range": [values[styles[label] % len(values)] for label in labels]},
        }
        for channel, values in ranges.items()
    }  # fmt: skip


def apart(*channels: str) -> Spec:
    """Returns the resolution that gives each part of a figure its own scales."""
    return {"scale": dict.fromkeys(channels, "independent")}


def training_chart(
    curves: Mapping[str, Sequence[dict[str, Any]]],
    labels: Mapping[str, str],
    styles: Mapping[str, int],
) -> Spec:
    """Returns runs' losses over their updates: lines for training, markers for validation.

    Args:
      curves: points (step, nats, split) of each run, under its name.
      labels: each run's name in charts.
      styles: as for `length_chart`.
    """
    values = [
        {"run": labels[name], "name": name} | point
        for name, points in curves.items()
        for point in points
    ]
    x = {"field": "step", "type": "quantitative", "title": "updates", "axis": {"format": ",d"}}
    y = {
        "field": "nats",
        "type": "quantitative",
        "title": "nats per token",
        "scale": {"zero": False},
    }
    channels = looks((value["run"] for value in values), styles)
    tooltip = [
        {"field": "name", "title": "run"}, {"field": "step", "format": ",d", "title": "updates"},
        {"field": "nats", "format": ".4f", "title": "nats per token"}, {"field": "split", "title": "text"},
    ]  # fmt: skip
    of_split = [[{"filter": f"datum.split == '{split}'"}] for split in ("train", "valid")]
    point = {"type": "point", "filled": True, "size": 60, "opacity": 1}
    lines = {
        "transform": SHOWN,
        "encoding": {
            "x": x | {"scale": {"nice": False}}, "y": y, "color": channels["color"], "detail": {"field": "name"},
            "tooltip": tooltip,
        },
        "layer": [
            {"transform": of_split[0], "mark": {"type": "line", "strokeWidth": 1.2}},
            {"transform": of_split[1], "mark": point, "encoding": {"shape": channels["shape"]}},
        ],
    }  # fmt: skip
    return {
        "description": "Loss by updates of each run",
        "data": {"values": values},
        "layer": [lines],
    }
