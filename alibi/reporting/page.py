"""The report as one HTML page that needs nothing else: charts to switch and point at, sortable tables, runs.

Charts are Vega-Lite's, whose JavaScript stands in the page; its policy forbids the browser every request.
"""

import dataclasses
import functools
import html
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from alibi.reporting import plots, tables
from alibi.reporting.curves import RunSource, differing, training_curve
from alibi.reporting.report import Panel, Series, build_table, explanation
from alibi.reporting.tables import Number, Table
from alibi.reporting.writers import to_html

HERE = pathlib.Path(__file__).parent
# Of Vega: the shapes of plots.MARKERS, and its dashes.
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-left", "triangle-right")
SIGNS = ("●", "■", "▲", "◆", "▼", "✚", "◀", "▶")  # the same as text
DASHES = ([1, 0], [8, 4], [8, 3, 2, 3], [2, 3], [8, 2, 2, 2, 2, 2])
COLOURS = (*plots.COLOURS[:-1], "currentColor")  # black on white, white on black
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name: nothing is loaded from there

Spec = dict[str, Any]


def make_page(
    title: str,
    measured: Sequence[tuple[Panel, ...]],
    gains: Sequence[Panel],
    passkeys: Sequence[Table],
    names: Mapping[str, str],
    failures: Mapping[str, str],
    runs: Sequence[RunSource],
) -> str:
    """The page.

    Args:
      measured: of each corpus, split and windows the panel of each kind of number.
      gains: panels of what context gains.
      names: what each run is called in charts, by the run's own name.
      failures: reasons by run.
      runs: those whose config, command and perhaps metrics are known.
    """
    specs: list[Spec] = []
    series = list(
        {one.label: one for panel in [*(group[0] for group in measured), *gains] for one in panel.series}.values()
    )
    styles = dict(zip((one.label for one in series), plots.style_numbers(series), strict=True))
    sections = [_measured_section(panels, number, styles, specs) for number, panels in enumerate(measured)]
    sections += [_gain_section(panel, styles, specs) for panel in gains]
    sections += [_section("Keys found again", to_html(table)) for table in passkeys]
    sections += [_training_section(runs, names, styles, specs), _runs_section(runs), _failed_section(failures)]
    data = json.dumps(specs, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{html.escape(title)}</title><style>{(HERE / 'page.css').read_text()}</style>"
    )
    body = "\n".join([f"<h1>{html.escape(title)}</h1>", _methods(styles), *filter(None, sections)])
    scripts = (
        f'<script type="application/json" id="charts">{data}</script>\n<script type="module">{_javascript()}</script>'
    )
    start = '<!DOCTYPE html>\n<html lang="en">\n'
    return f"{start}<head>{head}</head>\n<body>\n<main>\n{body}\n</main>\n{scripts}\n</body>\n</html>\n"


@functools.cache
def _javascript() -> str:
    """Vega-Lite and what it needs, with page.js, in one piece."""
    import vl_convert  # half a second to import

    return vl_convert.javascript_bundle((HERE / "page.js").read_text(), vl_version="6.1").replace(
        "</script", "<\\/script"
    )


def _section(heading: str, *parts: str) -> str:
    return "\n".join([f"<section><h2>{html.escape(heading)}</h2>", *filter(None, parts), "</section>"])


def _methods(styles: Mapping[str, int]) -> str:
    """Which methods the charts show: a checkbox for each, with its colour and sign."""
    if not styles:
        return ""
    boxes = "\n".join(
        f'<label><input type="checkbox" name="method" value="{html.escape(label)}" checked> '
        f'<span aria-hidden="true" style="color:{COLOURS[number % len(COLOURS)]}">{SIGNS[number % len(SIGNS)]}</span> '
        f"{html.escape(label)}</label>"
        for label, number in styles.items()
    )
    buttons = '<button type="button" data-all="true">all</button> <button type="button" data-all="">none</button>'
    return f'<fieldset class="methods"><legend>Shown in the charts</legend>\n{boxes}\n{buttons}</fieldset>'


def _measured_section(panels: Sequence[Panel], number: int, styles: Mapping[str, int], specs: list[Spec]) -> str:
    """One corpus, split and windows: a chart and a table of each kind of number, of which one is shown."""
    panel = panels[0]
    windows = "windows that don't overlap" if panel.stride is None else f"sliding windows, stride {panel.stride:,}"
    choices = "\n".join(
        f'<label><input type="radio" name="kind-{number}" value="{index}"{" checked" if index == 0 else ""}> '
        f"{one.kind.title}</label>"
        for index, one in enumerate(panels)
    )
    choice = f'<fieldset class="kinds"><legend>Measured as</legend>\n{choices}</fieldset>' if len(panels) > 1 else ""
    shown = []
    for index, one in enumerate(panels):
        note = f"Bands: {tables.SPREAD}." if one.has_seeds else ""
        figure = _figure(length_spec(one, styles), note, specs)
        hidden = " hidden" if index else ""
        start = f'<div data-kind="kind-{number}" data-value="{index}"{hidden}>'
        shown.append(f"{start}\n{figure}\n{to_html(build_table(one))}\n</div>")
    return _section(
        f"{panel.corpus}, {panel.split}, {windows}", choice, *shown, f"<p>{html.escape(explanation(panel))}</p>"
    )


def _gain_section(panel: Panel, styles: Mapping[str, int], specs: list[Spec]) -> str:
    note = f"Bars: {tables.SPREAD}." if panel.has_seeds else "Bars: 95% interval of a single run."
    figure = _figure(length_spec(panel, styles), note, specs)
    return _section(
        f"What context gains: {panel.corpus}, {panel.split}", figure, to_html(build_table(panel)),
        f"<p>{html.escape(explanation(panel))}</p>",
    )  # fmt: skip


def _figure(spec: Spec, note: str, specs: list[Spec]) -> str:
    """A place for the chart, which the page's script draws when it comes to be seen."""
    specs.append(spec)
    caption = html.escape(f"Point at a marker for its numbers. {note}".rstrip())
    place = f'<div class="chart" data-chart="{len(specs) - 1}"></div>'
    return f"<figure>{place}<figcaption>{caption}</figcaption></figure>"


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
    trained = sorted({series.train_length for series in panel.series})
    marks = {
        "data": {"values": [{"length": length, "text": f"trained at L = {length:,}"} for length in trained]},
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


# A method that the page has switched off has no lines.
SHOWN = [{"filter": "indexof(off, datum.run) < 0"}]


def _spec(description: str, values: list[dict[str, Any]], layers: list[Spec]) -> Spec:
    return {
        "$schema": SCHEMA, "description": description, "width": "container", "height": 380,
        "params": [{"name": "off", "value": []}], "data": {"values": values}, "layer": layers,
    }  # fmt: skip


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


def _training_section(
    runs: Sequence[RunSource], names: Mapping[str, str], styles: Mapping[str, int], specs: list[Spec]
) -> str:
    """The training curves of the runs whose metrics are there; nothing where there are none."""
    values = [
        {"run": names[run.name], "name": run.name, **dataclasses.asdict(point)}
        for run in runs
        if run.name in names
        for point in training_curve(run.store)
    ]
    if not values:
        return ""
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
    seen = {value["name"] for value in values}
    note = "Lines: training, the mean since the point before. Markers: validation."
    missing = [run.name for run in runs if run.name not in seen]
    if missing:
        note += f" Without metrics here: {', '.join(missing)}."
    return _section("Training", _figure(_spec("Loss by updates of each run", values, [lines]), note, specs))


def _runs_section(runs: Sequence[RunSource]) -> str:
    """The command and config of each run: what not all share, and on demand all of it."""
    if not runs:
        return ""
    shared, own = differing(runs)
    parts = []
    for run, keys in zip(runs, own, strict=True):
        whole = _details("its whole config", _keys(run.config))
        command = f"<pre><code>{html.escape(run.command)}</code></pre>" if run.command else ""
        parts.append(_details(run.name, f"{command}\n{_keys(keys) if len(runs) > 1 else ''}\n{whole}"))
    common = _details("config keys that all runs share", _keys(shared)) if len(runs) > 1 else ""
    return _section(
        "Runs",
        "<p>The command that makes each run, and the keys of its config that not all runs share.</p>",
        *parts,
        common,
    )


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>\n{content}\n</details>"


def _keys(config: Mapping[str, Any]) -> str:
    lines = "\n".join(f"{key} = {_literal(value)}" for key, value in sorted(config.items()))
    return f"<pre>{html.escape(lines)}</pre>"


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _failed_section(failures: Mapping[str, str]) -> str:
    if not failures:
        return ""
    items = (
        f"<li>{html.escape(name)}: {html.escape(' '.join(reason.split()))}</li>" for name, reason in failures.items()
    )
    return _section("Runs that failed", f"<ul>{''.join(items)}</ul>")
