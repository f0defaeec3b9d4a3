"""Charts as Vega-Lite specifications: the page draws them in a browser, `png` draws them for files."""

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
MAX_TICKS = 16  # lengths on the axis
MARK_WIDTH = 0.3  # of the axis: room for the text of a train length
LABEL_HEIGHT = 0.06  # of the axis: room for the name of a line
WIDEST = 10  # a log axis reaches from a tenth of the least mean to ten times the greatest
LINEAR = 0.01  # nats: up to here a scale of very different gains is linear, and logarithmic beyond
# nats at the ends of lines, and their ratio, beyond which gains are very different
LARGE_GAIN, MOST_RATIO = 0.05, 20

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
    "legend": {"labelFontSize": FONT_SIZE, "titleFontSize": FONT_SIZE, "labelLimit": 0, "title": None},
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
    """Returns the figure of `panel`: its lines over the evaluation length, with their names at
    their right ends.

    More lines than MOST_LINES are drawn in several charts, each with its own scale, the best ones
    first.
    """
    if len(panel.series) <= MOST_LINES:
        return named_lines(panel)
    worth = -1 if panel.kind.is_loss else 1

    def last(series: Series) -> tuple[int, float]:
        found = [
            (length, worth * cell.mean)
            for length, cell in series.cells.items()
            if isinstance(cell, Number)
        ]
        return max(found, default=(0, 0.0))

    series, count = (
        sorted(panel.series, key=last, reverse=True),
        math.ceil(len(panel.series) / LINES_OF_PART),
    )
    bounds = [number * len(series) // count for number in range(count + 1)]
    title = f"{len(series)} lines by their value at the greatest length, best first; each chart has its own scale"
    parts = [
        named_lines(dataclasses.replace(panel, series=tuple(series[a:b])))
        for a, b in itertools.pairwise(bounds)
    ]
    return {
        "concat": parts,
        "columns": 2,
        "spacing": 40,
        "title": title,
        "resolve": apart("color", "shape", "strokeDash"),
    }


def named_lines(panel: Panel) -> Spec:
    """Returns a single chart of all lines of `panel`, each with its name at the right."""
    styles = style_numbers([series.position for series in panel.series])
    spec = length_chart(
        panel, {series.label: style for series, style in zip(panel.series, styles, strict=True)}
    )
    lines = spec["layer"][-1]
    x, y = lines["encoding"]["x"], lines["layer"][0]["encoding"]["y"]
    ends, linear = (
        {value["run"]: value for value in spec["data"]["values"]},
        y["scale"].get("constant"),
    )
    low, high = (_height(bound, linear) for bound in y["scale"]["domain"])
    right = max(panel.columns, default=0)
    labels = sorted(ends.values(), key=lambda end: end["value"])
    wanted = [(_height(end["value"], linear) - low) / (high - low) for end in labels]
    placed = [
        {
            **end,
            "at": _value(low + height * (high - low), linear),
            "name": end["run"] + ("" if end["length"] == right else f" (to {end['length']:,})"),
        }
        for end, height in zip(labels, spread(wanted, LABEL_HEIGHT), strict=True)
    ]
    at_label, name = (
        y | {"field": "at"},
        {"type": "text", "align": "left", "dx": 14, "fontWeight": "bold"},
    )
    reaching = {
        "transform": [{"filter": f"datum.length == {right}"}],
        "mark": {"type": "rule", "opacity": 0.4},
    }
    names = {
        "data": {"values": placed},
        "encoding": {"color": lines["encoding"]["color"]},
        "layer": [
            reaching
            | {"encoding": {"x": x, "x2": {"value": "width"}, "y": y, "y2": {"field": "at"}}},
            {
                "mark": name,
                "encoding": {"x": {"value": "width"}, "y": at_label, "text": {"field": "name"}},
            },
        ],
    }
    return spec | {"width": 660, "height": 420, "layer": [*spec["layer"], names]}


def length_chart(panel: Panel, styles: Mapping[str, int]) -> Spec:
    """Returns lines over the evaluation length on logarithmic axes, with markers, spreads and train
    lengths.

    Args:
      styles: number of the colour, marker and dash of each line.
    """
    gain, lengths = not panel.kind.is_loss, panel.columns or [1]
    values = [value for series in panel.series for value in _length_values(series)]
    spread_is = tables.spread_of(panel.numbers)
    spread_is = spread_is and f"{'bars' if gain else 'bands'}: {spread_is}"
    about = panel.corpus, panel.split, panel.measure.axis()
    least, ticks = (lengths[-1] / lengths[0]) ** (1 / MAX_TICKS), lengths[:1]
    for length in lengths:
        ticks += [length] * (length >= least * ticks[-1] and length > ticks[-1])
    x: Spec = {
        "field": "length", "type": "quantitative",
        "title": [
            f"evaluation length in tokens ({', '.join(filter(None, about))})",
            *filter(None, [panel.reading, spread_is]),
        ],
        "scale": {"type": "log", "base": 2, "domain": [0.9 * lengths[0], 1.1 * lengths[-1]], "nice": False},
        "axis": {"values": ticks, "format": ",d", "labelOverlap": "greedy", "labelSeparation": 6},
    }  # fmt: skip
    ends = [
        abs(value["value"]) for value in {value["run"]: value for value in values}.values()
    ] or [0.0]
    # gains of hundredths stand beside losses of nats
    mixed = not panel.kind.trials and max(ends) > max(LARGE_GAIN, MOST_RATIO * min(ends))
    linear = (LINEAR if mixed else 1e3) if gain else None
    domain = _domain(values, linear)
    y: Spec = {
        "field": "value", "type": "quantitative",
        "title": panel.kind.title.lower() + panel.kind.axis,
        "scale": {"type": "symlog", "constant": linear} if gain else {"type": "log"},
        "axis": {"tickCount": 6, "format": "~r"},
    }  # fmt: skip
    if not gain:
        marked = perplexity_ticks(*domain)
        domain = [marked[0], marked[-1]]
        y["axis"] = {"values": marked, "format": ",~r"}
    y["scale"] |= {"domain": domain, "nice": False}
    tooltip = [
        {"field": "run", "title": "run"}, {"field": "length", "format": ",d", "title": "evaluation length"},
        {"field": "text", "title": panel.kind.title}, {"field": "ratio", "title": "of its own at L"},
        {"field": "seeds", "title": "seeds"},
    ]  # fmt: skip
    grey: Spec = {"color": "currentColor", "opacity": 0.6}
    marks: Spec = {
        "data": {
            "values": [
                {"length": length, "text": text} for length, text in train_lengths(panel).items()
            ]
        },
        "encoding": {"x": x},
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [2, 3]} | grey},
            {
                "mark": {"type": "text", "align": "left", "dx": 4, "y": -8} | grey,
                "encoding": {"text": {"field": "text"}},
            },
        ],
    }
    zero = {
        "data": {"values": [{"value": 0}]},
        "mark": {"type": "rule"} | grey,
        "encoding": {"y": y},
    }
    looks = _looks([series.label for series in panel.series], styles)
    spread: Spec = {
        "mark": {"type": "rule"} if gain else {"type": "area", "opacity": 0.2, "clip": True}
    }
    lines: Spec = {
        "transform": SHOWN,
        "encoding": {"x": x, "color": looks["color"]},
        "layer": [
            {
                "mark": {"type": "line", "strokeWidth": 2.5},
                "encoding": {"y": y, "strokeDash": looks["strokeDash"]},
            },
            spread | {"encoding": {"y": y | {"field": "low"}, "y2": {"field": "high"}}},
            {
                "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
                "encoding": {"y": y, "shape": looks["shape"], "tooltip": tooltip},
            },
        ],
    }
    description = f"{panel.kind.title} by evaluation length, {panel.corpus}, split {panel.split}"
    return {
        "description": description,
        "data": {"values": values},
        "layer": [marks, *([zero] if gain else []), lines],
    }


def _length_values(series: Series) -> Iterable[dict[str, Any]]:
    """Yields a series' points; an infinite mean has no place in a chart."""
    for length, cell in series.cells.items():
        if isinstance(cell, Number) and math.isfinite(cell.mean):
            low, high = cell.span
            if cell.kind.is_loss and low <= 0:  # a log scale ends above zero
                low = min(cell.values)
            yield {
                "run": series.label, "length": length, "value": cell.mean, "low": low, "high": high,
                "text": cell.text, "ratio": "" if cell.ratio is None else tables.write_ratio(cell.ratio),
                "seeds": len(cell.values),
            }  # fmt: skip


def _domain(values: Sequence[Mapping[str, Any]], linear: float | None) -> list[float]:
    """Returns the ends of an axis for all spreads, with a margin on both sides; a log axis ends at
    most at WIDEST times the means, since two seeds may have a band without any end in sight.
    """
    means = [value["value"] for value in values]
    least, most = (min(means) / WIDEST, max(means) * WIDEST) if means else (0.0, 0.0)
    ends = [value[end] for value in values for end in ("low", "high")]
    heights = [_height(end if linear else min(most, max(least, end)), linear) for end in ends]
    heights += [0.0] if linear or not heights else []
    margin = 0.06 * (max(heights) - min(heights)) or 0.1
    return [_value(min(heights) - margin, linear), _value(max(heights) + margin, linear)]


def _height(value: float, linear: float | None) -> float:
    """Returns the place of `value` on Vega's symlog scale, which is linear up to `linear`; None: on
    a log scale.
    """
    return math.copysign(math.log1p(abs(value) / linear), value) if linear else math.log(value)


def _value(height: float, linear: float | None) -> float:
    return math.copysign(linear * math.expm1(abs(height)), height) if linear else math.exp(height)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Moves ascending heights `gap` apart, up and then down again to stay below 1."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    ceiling = max(1.0, gap * len(placed))
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def train_lengths(panel: Panel) -> dict[int, str]:
    """Returns the train lengths of a panel with the text at each; if they lie too close, the first
    has all text.
    """
    lengths = sorted({series.train_length for series in panel.series} - {0})  # 0: of an n-gram
    least = (panel.columns[-1] / panel.columns[0]) ** MARK_WIDTH if panel.columns else 1.0
    if all(b >= least * a for a, b in itertools.pairwise(lengths)):
        return {length: f"trained at L = {length:,}" for length in lengths}
    return dict.fromkeys(lengths, "") | {lengths[0]: "dotted: lengths of training"}


def perplexity_ticks(low: float, high: float) -> list[float]:
    """Returns round values: between `low` and `high` at least four, with the coarsest steps, and the
    nearest below and above, at which an axis ends.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tenths, fiftieths = ([step / each for step in range(each, 10 * each)] for each in (10, 50))
    inside: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), tenths, fiftieths):
        ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
        inside = [tick for tick in ticks if low < tick < high]
        if len(inside) >= 4:
            break
    ends = steps if len(steps) > 6 else (1, 1.5, 2, 2.5, *range(3, 10))
    ticks = [float(f"{step}e{decade}") for decade in (*decades, decades[-1] + 1) for step in ends]
    least, most = max(t for t in ticks if t <= low), min(t for t in ticks if t >= high)
    return [least, *inside[:: math.ceil(len(inside) / 10) or 1], most]


def style_numbers(positions: Sequence[str]) -> list[int]:
    """Returns the place in COLOURS, SHAPES and DASHES of each series, given their position methods."""
    if len(set(positions)) < len(positions):
        return list(range(len(positions)))
    left = [number for number, method in enumerate(KNOWN_METHODS) if method not in positions]
    others = itertools.chain(reversed(left), itertools.count(len(KNOWN_METHODS)))
    return [
        KNOWN_METHODS.index(name) if name in KNOWN_METHODS else next(others) for name in positions
    ]


def _looks(labels: Iterable[str], styles: Mapping[str, int]) -> dict[str, Spec]:
    """Returns colour, marker and dash of each line, without a legend."""
    labels = list(dict.fromkeys(labels))
    channels: dict[str, Sequence[Any]] = {"color": COLOURS, "shape": SHAPES, "strokeDash": DASHES}
    return {
        channel: {
            "field": "run", "type": "nominal", "legend": None,
            "scale": {"domain": labels, "range": [looks[styles[label] % len(looks)] for label in labels]},
        }
        for channel, looks in channels.items()
    }  # fmt: skip


def apart(*channels: str) -> Spec:
    """Returns the resolution by which each part of a figure has its own scales."""
    return {"scale": dict.fromkeys(channels, "independent")}


def training_chart(
    curves: Mapping[str, Sequence[dict[str, Any]]],
    labels: Mapping[str, str],
    styles: Mapping[str, int],
) -> Spec:
    """Returns the losses of runs over their updates: lines for training, markers for validation.

    Args:
      curves: points (step, nats, split) by the run's name.
      labels: names in charts by the run's name.
      styles: as of `length_chart`.
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
    looks = _looks((value["run"] for value in values), styles)
    tooltip = [
        {"field": "name", "title": "run"}, {"field": "step", "format": ",d", "title": "updates"},
        {"field": "nats", "format": ".4f", "title": "nats per token"}, {"field": "split", "title": "text"},
    ]  # fmt: skip
    of_split = [[{"filter": f"datum.split == '{split}'"}] for split in ("train", "valid")]
    point = {"type": "point", "filled": True, "size": 60, "opacity": 1}
    lines = {
        "transform": SHOWN,
        "encoding": {
            "x": x | {"scale": {"nice": False}}, "y": y, "color": looks["color"], "detail": {"field": "name"},
            "tooltip": tooltip,
        },
        "layer": [
            {"transform": of_split[0], "mark": {"type": "line", "strokeWidth": 1.2}},
            {"transform": of_split[1], "mark": point, "encoding": {"shape": looks["shape"]}},
        ],
    }  # fmt: skip
    return {
        "description": "Loss by updates of each run",
        "data": {"values": values},
        "layer": [lines],
    }
