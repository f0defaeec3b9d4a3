"""The report as one HTML page that needs nothing else: charts to switch and point at, sortable tables, runs.

Charts are Vega-Lite's, whose JavaScript stands in the page; its policy forbids the browser every request.
"""

import functools
import html
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from alibi.reporting import plots, tables
from alibi.reporting.charts import COLOURS, SIGNS, Spec, length_spec, training_spec
from alibi.reporting.curves import Point, RunSource, differing, training_curve
from alibi.reporting.report import Panel, build_table, explanation, series_names
from alibi.reporting.rows import Row, latest
from alibi.reporting.tables import Table
from alibi.reporting.writers import to_html

HERE = pathlib.Path(__file__).parent
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"


def make_page(
    title: str,
    measured: Sequence[tuple[Panel, ...]],
    gains: Sequence[Panel],
    passkeys: Sequence[Table],
    rows: Sequence[Row],
    failures: Mapping[str, str],
    runs: Sequence[RunSource],
) -> str:
    """The page.

    Args:
      measured: of each corpus, split and windows the panel of each kind of number.
      gains: panels of what context gains.
      rows: all of these, by which runs have their names in charts.
      failures: reasons by run.
      runs: those whose config, command and perhaps metrics are known.
    """
    specs: list[Spec] = []
    curves = {run.name: points for run in runs if (points := training_curve(run.store))}
    names = series_names(latest(rows))
    labels = {row.run: names[row.series] for row in latest(rows) if row.override is None}
    labels |= {name: name for name in curves if name not in labels}  # a run that failed, for example
    shown = [*(group[0] for group in measured), *gains]
    positions = {one.label: one.position for panel in shown for one in panel.series}
    positions |= {labels[run.name]: run.config["position"] for run in runs if run.name in curves}
    styles = dict(zip(positions, plots.style_numbers([*positions.values()]), strict=True))
    sections = [_measured_section(panels, number, styles, specs) for number, panels in enumerate(measured)]
    sections += [_gain_section(panel, styles, specs) for panel in gains]
    sections += [_section("Keys found again", to_html(table)) for table in passkeys]
    sections += [_training_section(curves, runs, labels, styles, specs), _runs_section(runs), _failed_section(failures)]
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


def _training_section(
    curves: Mapping[str, Sequence[Point]],
    runs: Sequence[RunSource],
    labels: Mapping[str, str],
    styles: Mapping[str, int],
    specs: list[Spec],
) -> str:
    """The training curves of the runs whose metrics are there; nothing where there are none."""
    if not curves:
        return ""
    note = "Lines: training, the mean since the point before. Markers: validation."
    if missing := [run.name for run in runs if run.name not in curves]:
        note += f" Without metrics here: {', '.join(missing)}."
    return _section("Training", _figure(training_spec(curves, labels, styles), note, specs))


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
