"""Figures of shares, contexts and biases, as Vega-Lite specifications."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from alibi.reporting.charts import FONT_SIZE, Spec, apart, looks
from alibi.reporting.names import grouped
from alibi.reporting.panels import Panel, Series
from alibi.reporting.tables import Number
from alibi.reporting.writers import heading_text

MOST_CELLS = 64  # in each direction of the picture of a head
# for a drawn range of contexts, as a share of a cost that is certain for some range
WIDEST_INTERVAL = 0.1
LETTERS = 80  # in a legend below a figure, side by side


def map_figure(group: Sequence[Panel]) -> Spec:
    """Returns the numbers of panels as colours, two panels side by side: a facet for each run."""
    pictures = [
        cell_figure(panel) | {"title": f"{panel.kind.title}{panel.kind.axis}"} for panel in group
    ]
    title = {"text": group[0].measure.alt(group[0]), "anchor": "start"}
    return {"concat": pictures, "columns": 2, "title": title, "resolve": apart("color")}


def cell_figure(panel: Panel) -> Spec:
    """Returns a panel's numbers as colours: a row for each run, a facet for each label, or the other way
    round for a measure that is a map.
    """

    def title(series: Series) -> str:
        headed = zip(panel.measure.labels, series.labels, strict=True)
        return ", ".join(f"{heading} {heading_text(label)}" for heading, label in headed)

    def places(series: Series) -> tuple[str, str]:
        names = series.label, title(series)
        return names[::-1] if panel.measure.is_map else names

    by_labels = sorted(panel.series, key=lambda series: series.labels)
    values: list[dict[str, Any]] = [
        {
            **dict(zip(("run", "part"), places(series), strict=True)),
            "column": column,
            "share": cell.mean,
            "text": cell.kind.write(cell.mean),
        }
        for series in by_labels
        for column, cell in series.cells.items()
        if isinstance(cell, Number)
    ]
    shares = [0.0, 1.0] if panel.kind.trials else [value["share"] for value in values] or [0.0]
    names = list(dict.fromkeys(places(series)[0] for series in panel.series))
    parts = list(dict.fromkeys(value["part"] for value in values))
    middle = (min(shares) + max(shares)) / 2
    dark = {"condition": {"test": f"datum.share < {middle}", "value": "white"}, "value": "black"}
    colour = {
        "field": "share", "type": "quantitative", "legend": None,
        "scale": {"scheme": "cividis", "domain": [min(shares), max(shares)]},
    }  # fmt: skip
    return {
        "data": {"values": values},
        "facet": {"column": {"field": "part", "sort": parts}},
        "spec": {
            "width": {"step": 56}, "height": {"step": 24},
            "encoding": {
                "x": {"field": "column", "type": "ordinal", "title": None, "axis": {"labelAngle": 0}},
                "y": {
                    "field": "run", "type": "nominal", "title": None, "axis": {"labelLimit": 0},
                    "scale": {"domain": names},
                },
            },
            "layer": [
                {"mark": "rect", "encoding": {"color": colour}},
                {
                    "mark": {"type": "text", "fontSize": FONT_SIZE - 4},
                    "encoding": {"text": {"field": "text"}, "color": dark},
                },
            ],
        },
        "spacing": 8,
        "title": {"text": panel.measure.alt(panel), "offset": 16},
        "resolve": apart("x"),
    }  # fmt: skip


def context_figure(lines: Iterable[Mapping[str, Any]]) -> Spec:
    """Returns the NLL over the context: a line for each run and length of blocks.

    Each mean lies in the band of its 95% interval. A range of contexts is left out without an interval,
    or if its interval is wider than a tenth of the greatest lower end among all intervals, a cost that
    is certain for some range. A sliding window, in which all tokens but a text's first have nearly the
    same context, is a dashed line at the level of its last range.

    Args:
      lines: as `alibi.evaluation.by_position.analyse` returns them.

    Raises:
      ValueError: there is no NLL over the context.
    """
    ranges = [line for line in lines if line["analysis"] == "by_context"]
    if not ranges:
        raise ValueError(
            "there are no rows of NLL by context to draw; give dumps of eval_extrapolation.py --dump_nll"
        )
    by_scoring = dict(sorted(grouped(ranges, _scoring).items()))
    labels = dict(zip(by_scoring, _context_labels([*by_scoring]), strict=True))
    # Lower ends, not means: ranges of few tokens have high means by chance, but then wide intervals
    # too.
    sure = max((line["interval"][0] for line in ranges if line["interval"]), default=0.0)
    points = [
        {
            "run": labels[scoring],
            "context": line["context_to"],
            "nats": line["nll_nats"] / line["tokens"],
            "low": line["interval"][0],
            "high": line["interval"][1],
        }
        for scoring in labels
        for line in by_scoring[scoring]
        if line["mode"] != "sliding"
        and line["interval"]
        and line["interval"][1] - line["interval"][0] <= WIDEST_INTERVAL * sure
    ]
    levels = [
        {"run": labels[scoring], "nats": last["nll_nats"] / last["tokens"]}
        for scoring, (*_, last) in by_scoring.items()
        if last["mode"] == "sliding"
    ]
    columns = max(1, LETTERS // (max(map(len, labels.values())) + 8))
    numbers = {label: index for index, label in enumerate(labels.values())}
    channels = looks(numbers, numbers, {"orient": "bottom", "columns": columns})
    x = {
        "field": "context", "type": "quantitative", "title": "tokens of context, up to",
        "scale": {"type": "log", "base": 2, "nice": False, "padding": 16},
        "axis": {
            "values": sorted({line["context_to"] for line in ranges}), "format": ",d",
            "labelOverlap": "greedy",
        },
    }  # fmt: skip
    y = {
        "field": "nats",
        "type": "quantitative",
        "title": "nats per token",
        "scale": {"zero": False},
    }
    band = {"y": y | {"field": "low"}, "y2": {"field": "high"}}
    return {
        "width": 760, "height": 440,
        "data": {"values": points},
        "encoding": {"color": channels["color"]},
        "layer": [
            {"mark": {"type": "area", "opacity": 0.15}, "encoding": {"x": x} | band},
            {"mark": {"type": "line", "strokeWidth": 2.5}, "encoding": {"x": x, "y": y}},
            {
                "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
                "encoding": {"x": x, "y": y, "shape": channels["shape"]},
            },
            {"data": {"values": levels}, "mark": {"type": "rule", "strokeDash": [8, 4], "strokeWidth": 2},
             "encoding": {"y": y}},
        ],
    }  # fmt: skip


def _scoring(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the run, text and windows that a line in the figure stands for."""
    names = ("run", "step", "tokens_sha256", "config_hash", "eval_length", "stride")
    return (*(line[name] for name in names), line.get("override", ""), line.get("trained_on", ""))


def _context_labels(scorings: Sequence[tuple[Any, ...]]) -> list[str]:
    """Returns the name of each line: its windows, and run, override, step and text if they differ. The
    config and the train text follow if two names would be the same.
    """
    facts = [
        (run, override, f"{step:,} updates", f"text {(sha256 or '')[:8]}")
        for run, step, sha256, _, _, _, override, _ in scorings
    ]
    differ = [len(set(words)) > 1 for words in zip(*facts, strict=True)]
    windows = [
        f"L = {length:,}" + (f", stride {stride:,}" if stride != length else "")
        for *_, length, stride, _, _ in scorings
    ]
    labels = [
        ", ".join(filter(None, [*itertools.compress(words, differ), end]))
        for words, end in zip(facts, windows, strict=True)
    ]
    return [
        f"{label}, config {(scoring[3] or '')[:6]}, trained on {(scoring[-1] or '')[:6]}"
        if labels.count(label) > 1
        else label
        for label, scoring in zip(labels, scorings, strict=True)
    ]


def bias_figure(name: str, added: Float[np.ndarray, "heads q k"], *, causal: bool) -> Spec:
    """Returns what each head adds to the logit at each query (row) and key (column), and at each distance.

    Softmax ignores a constant within a row, so each row is relative to the query's own key. Keys
    that a causal mask or a NaN in `added` hides are left white. Each head has its own colours
    from its least to its greatest number. Beyond MOST_CELLS tokens a picture shows every n-th token.
    """
    heads, length, _ = added.shape
    shown = added - np.diagonal(added, axis1=1, axis2=2)[:, :, None]
    picked = range(0, length, -(-length // MOST_CELLS))
    side = {"axis": None, "type": "ordinal"}
    size = len(picked) * max(1, 128 // len(picked))  # whole pixels for each cell
    seen = np.isfinite(added[0])
    pairs = [(i, j) for i in picked for j in picked if seen[i, j] and (j <= i or not causal)]
    colour = {
        "field": "added",
        "type": "quantitative",
        "scale": {"scheme": "magma"},
        "legend": None,
    }
    pictures = [
        {
            "data": {"values": [{"q": i, "k": j, "added": float(shown[head, i, j])} for i, j in pairs]},
            "title": {"text": f"head {head + 1}", "offset": 4},
            "width": size, "height": size,
            "mark": {"type": "rect", "strokeWidth": 1},
            "encoding": {
                "x": side | {"field": "k"}, "y": side | {"field": "q"},
                "fill": colour, "stroke": colour,  # strokes close the seams between cells
            },
        }
        for head in range(heads)
    ]  # fmt: skip
    # With causal attention the last query, which has all distances; else the middle one, which has
    # both sides.
    query = length - 1 if causal else length // 2
    curves = [
        {"head": head + 1, "distance": query - key, "added": float(shown[head, query, key])}
        for head in range(heads)
        for key in range(length)
        if seen[query, key]
    ]
    by_distance = {
        "data": {"values": curves},
        "width": max(600, 140 * heads), "height": 320,
        "mark": {"type": "line", "strokeWidth": 2},
        "encoding": {
            "x": {"field": "distance", "type": "quantitative", "title": f"tokens from the key to query {query}"},
            "y": {"field": "added", "type": "quantitative", "title": "added to the logit"},
            "color": {"field": "head", "type": "ordinal", "scale": {"scheme": "viridis"}, "title": "head"},
        },
    }  # fmt: skip
    row = {"hconcat": pictures, "spacing": 10, "resolve": apart("fill", "stroke")}
    return {
        "vconcat": [row, by_distance],
        "title": name,
        "resolve": apart("fill", "stroke", "color"),
    }
