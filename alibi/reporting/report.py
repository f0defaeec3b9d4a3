"""A directory's report: results.jsonl, report.md, figures, tables for the terminal, and report.html.

report.html is a page in a single file: interactive charts, sortable tables, runs. Vega-Lite's
JavaScript stands in the page, and its policy forbids the browser every request.
"""

import dataclasses
import html
import importlib.metadata
import json
import math
import os
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from alibi.extras import needs
from alibi.reporting.charts import (
    COLOURS,
    OFF,
    SCHEMA,
    SIGNS,
    VEGA_LITE,
    Spec,
    length_chart,
    length_figure,
    png,
    style_numbers,
    training_chart,
)
from alibi.reporting.equivalence import Reference, comparison, rankings
from alibi.reporting.figures import cell_figure, map_figure
from alibi.reporting.names import series_names
from alibi.reporting.panels import (
    Panel,
    build_table,
    panel_groups,
)
from alibi.reporting.recorded import ROWS_FILE, merge_rows
from alibi.reporting.rows import Row, latest
from alibi.reporting.tables import Table
from alibi.reporting.writers import to_html, to_markdown, to_text
from alibi.storage.cache import cache_root, content_key, find_or_make
from alibi.storage.files import read_log, resolve, write_whole

REPORT_FILE = "report.md"
PAGE_FILE = "report.html"
MOST_POINTS = 400  # on a training curve; more don't show

HERE = pathlib.Path(__file__).parent
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"


@dataclasses.dataclass(frozen=True)
class RunSource:
    """A run in a report: its config, command and work directory.

    Attributes:
      config: the value of each dotted key of its config.
      command: the shell command to train it.
      workdir: its work directory, or None if unknown or missing.
    """

    name: str
    config: Mapping[str, Any]
    command: str
    workdir: epath.Path | None = None


def write_report(
    directory: str | os.PathLike[str],
    title: str = "Extrapolation",
    failures: Mapping[str, str] | None = None,
    runs: Sequence[RunSource] = (),
    reference: Reference | None = None,
) -> str:
    """Writes results.jsonl, report.md, report.html and figures for the rows in `directory`. Returns the
    text tables.

    Each panel has a figure: the first is extrapolation.png, and figures of further panels (other
    splits, strides, corpora) have a suffix. Without rows and failures nothing is written.

    Args:
      failures: each failed run's reason, listed at the end.
      runs: the page shows their commands, configs and training curves. Tables and figures have their
        order.
      reference: behind each table stands one of the differences from this run, and behind the last one
        of the measures' rankings.
    """
    folder = resolve(directory)
    rows = merge_rows(folder)
    if not rows and not failures:
        return f"no results in {folder}/{ROWS_FILE} yet\n"
    # Other runs, then `runs` in their order, whichever was evaluated first.
    order = {run.name: index for index, run in enumerate(runs)}
    rows = sorted(rows, key=lambda row: order.get(row.run, -1))
    markdown, text = [f"# {title}\n"], []

    figures: list[str] = []
    tables: list[list[list[Table]]] = []  # for each panel of each group
    for group in (groups := panel_groups(rows)):
        panel = group[0]
        of_group = [_tables(panel, reference) for panel in group]
        tables.append(of_group)
        figures.append(figure := _figure_name(panel, figures))
        draw = length_figure if panel.measure.is_by_length else cell_figure
        spec = map_figure(group) if panel.measure.is_map else draw(panel)
        write_whole(folder / figure, png(spec))
        explanation = panel.measure.explanation(panel)
        shown = [table for of_panel in of_group for table in of_panel]
        markdown += [*map(to_markdown, shown), *([f"{explanation}\n"] if explanation else [])]
        markdown.append(f"![{panel.measure.alt(panel)}]({figure})\n")
        text += [*map(to_text, shown), f"figure: {folder}/{figure}\n"]
    ranked = rankings([panel for panel, *_ in groups]) if reference else None
    if ranked:
        markdown.append(to_markdown(ranked))
        text.append(to_text(ranked))
    runs_shown = {one.label: None for group in groups for one in group[0].series}
    if reference and reference.name not in runs_shown:
        missing = (
            f"No table has the reference {reference.name}; its runs are {', '.join(runs_shown)}.\n"
        )
        markdown.append(missing)
        text.append(missing)
    if failures:
        markdown.append(failed_runs(failures))
    # names of runs and texts are no HTML
    write_whole(folder / REPORT_FILE, "\n".join(markdown).replace("<", "&lt;"))
    write_whole(
        folder / PAGE_FILE, _page(title, groups, tables, ranked, rows, failures or {}, runs)
    )
    return "\n".join([*text, f"report: {folder}/{REPORT_FILE}, {folder}/{PAGE_FILE}\n"])


def _figure_name(panel: Panel, taken: Collection[str]) -> str:
    """Returns the file for a panel's figure, none of those before it."""
    measure, stem = panel.measure, panel.measure.figure or panel.measure.name().rpartition(":")[2]
    if f"{stem}.png" in taken:
        stem += re.sub(
            r"[^\w.-]+", "_", f"-{panel.corpus}-{panel.split}{measure.suffix(panel.rows[0])}"
        )
    return next(
        name
        for suffix in ("", *range(-2, -999, -1))  # -2 is a hyphen and a 2
        if (name := f"{stem}{suffix}.png") not in taken
    )


def failed_runs(failures: Mapping[str, str]) -> str:
    """Returns a Markdown list of failed runs with their reasons, a line for each."""
    lines = (f"- {name}: {' '.join(reason.split())}\n" for name, reason in failures.items())
    return "Runs that failed:\n\n" + "".join(lines)


def training_curve(workdir: epath.Path | None) -> list[dict[str, Any]]:
    """Returns a run's logged losses: step, nats per token and split, "train" or "valid", and the tokens
    that a validation scored.

    In a long run each point is the mean over neighbouring rows, with their tokens as weights.
    """
    rows = read_log(workdir / "metrics.jsonl") if workdir is not None else []
    trained = [row for row in rows if _is_number(row.get("train_nll"))]
    size, points = math.ceil(len(trained) / MOST_POINTS) or 1, []
    for first in range(0, len(trained), size):
        chunk = trained[first : first + size]
        tokens = [row.get("train_tokens") or 1.0 for row in chunk]
        nats = float(np.average([row["train_nll"] for row in chunk], weights=tokens))
        points.append({"step": chunk[-1]["step"], "nats": nats, "split": "train"})
    return points + [
        {"step": row["step"], "nats": row["valid_nll"], "split": "valid"}
        | ({"tokens": int(row["valid_tokens"])} if _is_number(row.get("valid_tokens")) else {})
        for row in rows
        if _is_number(row.get("valid_nll"))
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _page(
    title: str,
    groups: Sequence[tuple[Panel, ...]],
    tables: Sequence[Sequence[Sequence[Table]]],
    ranked: Table | None,
    rows: Sequence[Row],
    failures: Mapping[str, str],
    runs: Sequence[RunSource],
) -> str:
    """Returns report.html. A group's panels have the same text and windows, and a kind of number each.

    Args:
      tables: of each panel of each group.
    """
    specs: list[Spec] = []
    curves = {run.name: points for run in runs if (points := training_curve(run.workdir))}
    names = series_names(latest(rows))
    labels = {name: name for name in curves}  # a run that failed, for example, has no row
    labels |= {row.run: names[row.tested] for row in latest(rows) if row.override is None}
    charted = [panel for panel, *_ in groups if panel.measure.is_by_length]
    positions = {one.label: one.position for panel in charted for one in panel.series}
    positions |= {labels[run.name]: run.config["position"] for run in runs if run.name in curves}
    styles = dict(zip(positions, style_numbers([*positions.values()]), strict=True))
    sections = [
        _group_section(group, of_group, index, styles, specs)
        for index, (group, of_group) in enumerate(zip(groups, tables, strict=True))
    ]
    if ranked:
        sections.append(_section("Rankings", to_html(ranked)))
    if curves:
        scored = [one["tokens"] for points in curves.values() for one in points if "tokens" in one]
        of = f" of {' or '.join(f'{count:,}' for count in dict.fromkeys(scored))} tokens"
        note = f"Lines: training, the mean since the point before. Markers: validation{of * bool(scored)}."
        if missing := [run.name for run in runs if run.name not in curves]:
            note += f" Without metrics here: {', '.join(missing)}."
        sections.append(
            _section("Training", _figure(training_chart(curves, labels, styles), specs, note))
        )
    if runs:
        sections.append(_runs_section(runs))
    if failures:
        reasons = (f"{name}: {' '.join(reason.split())}" for name, reason in failures.items())
        items = "".join(f"<li>{html.escape(reason)}</li>" for reason in reasons)
        sections.append(_section("Runs that failed", f"<ul>{items}</ul>"))
    data = json.dumps(specs, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{html.escape(title)}</title><style>{(HERE / 'page.css').read_text()}</style>"
    )
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">',
            f"<head>{head}</head>\n<body>\n<main>\n<h1>{html.escape(title)}</h1>",
            *[_checkboxes(styles), *sections],
            f'</main>\n<script type="application/json" id="charts">{data}</script>',
            f'<script type="module">{_javascript()}</script>\n</body>\n</html>\n',
        ]
    )


def _javascript() -> str:
    """Returns Vega-Lite, its dependencies and page.js as a single script, from the cache: to make it
    takes two seconds.
    """
    needs("report.html", "vl_convert")
    source = (HERE / "page.js").read_text(encoding="utf-8")

    def script() -> str:
        import vl_convert  # half a second to import

        bundle = vl_convert.javascript_bundle(source, vl_version=VEGA_LITE)
        return bundle.replace("</script", "<\\/script")

    made_of = {
        "page.js": source,
        "Vega-Lite": VEGA_LITE,
        "vl-convert-python": importlib.metadata.version("vl-convert-python"),
    }
    try:
        folder = cache_root() / "scripts" / content_key(made_of)
        find_or_make(folder, lambda new: (new / "report.js").write_text(script(), encoding="utf-8"))
        return (folder / "report.js").read_text(encoding="utf-8")
    except ValueError:  # no cache can be written here
        return script()


def _section(heading: str, *parts: str) -> str:
    return "\n".join(
        [f"<section><h2>{html.escape(heading)}</h2>", *filter(None, parts), "</section>"]
    )


def _checkboxes(styles: Mapping[str, int]) -> str:
    """Returns a checkbox for each line, with its colour and marker: the legend for all charts."""
    boxes = "\n".join(
        f'<label><input type="checkbox" name="method" value="{html.escape(label)}" checked> '
        f'<span aria-hidden="true" style="color:{COLOURS[style % len(COLOURS)]}">{SIGNS[style % len(SIGNS)]}</span> '
        f"{html.escape(label)}</label>"
        for label, style in styles.items()
    )
    buttons = '<button type="button" data-all="true">all</button> <button type="button" data-all="">none</button>'
    field = f'<fieldset class="methods"><legend>Shown in the charts</legend>\n{boxes}\n{buttons}</fieldset>'
    return field if styles else ""


def _tables(panel: Panel, reference: Reference | None) -> list[Table]:
    compared = comparison(panel, reference) if reference else None
    return [build_table(panel), *([compared] if compared else [])]


def _group_section(
    group: Sequence[Panel],
    tables: Sequence[Sequence[Table]],
    section: int,
    styles: Mapping[str, int],
    specs: list[Spec],
) -> str:
    """Returns a chart and a table for each panel in a group. The page shows one panel at a time."""
    panel, name = group[0], f"kind-{section}"
    choices = "\n".join(
        f'<label><input type="radio" name="{name}" value="{index}"{"" if index else " checked"}> '
        f"{one.kind.title}</label>"
        for index, one in enumerate(group)
    )
    field = f'<fieldset class="kinds"><legend>Measured as</legend>\n{choices}</fieldset>'

    def shown(one: Panel, of_panel: Sequence[Table]) -> str:
        chart = _figure(length_chart(one, styles), specs) + "\n" if one.measure.is_by_length else ""
        return chart + "\n".join(map(to_html, of_panel))

    parts = [
        f'<div data-kind="{name}" data-value="{index}"{" hidden" if index else ""}>\n{shown(one, of_panel)}\n</div>'
        for index, (one, of_panel) in enumerate(zip(group, tables, strict=True))
    ]
    facts = [panel.corpus, panel.split, panel.reading, panel.measure.axis()]
    heading = f"{panel.kind.title}: {', '.join(filter(None, facts))}"
    explanation = panel.measure.explanation(panel)
    note = f"<p>{html.escape(explanation)}</p>" if explanation else ""
    return _section(heading, field if len(group) > 1 else "", *parts, note)


def _figure(spec: Spec, specs: list[Spec], note: str = "") -> str:
    """Adds the chart, as wide as its place, to `specs`. Returns its place, in which the page's script
    draws it.
    """
    specs.append({"$schema": SCHEMA, "params": OFF, "width": "container", "height": 380} | spec)
    caption = html.escape(f"Point at a marker for its numbers. {note}".rstrip())
    container = f'<div class="chart" data-chart="{len(specs) - 1}"></div>'
    return f"<figure>{container}<figcaption>{caption}</figcaption></figure>"


def _runs_section(runs: Sequence[RunSource]) -> str:
    """Returns the command and the config of each run."""
    parts = []
    for run in runs:
        name, command = html.escape(run.name), html.escape(run.command)
        keys = "\n".join(
            f"{key} = {json.dumps(value, ensure_ascii=False, default=str)}"
            for key, value in sorted(run.config.items())
        )
        parts.append(
            f"<details><summary>{name}</summary>\n"
            f"<pre><code>{command}</code></pre><pre>{html.escape(keys)}</pre>\n</details>"
        )
    return _section("Runs", "<p>The command that makes each run, and its config.</p>", *parts)
